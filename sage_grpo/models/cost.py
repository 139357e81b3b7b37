"""Sizes of a backbone, and the token and FLOP counts derived from them."""

from dataclasses import dataclass
from typing import NamedTuple

# bytes inside the VAE per latent position of a clip that is decoded untiled, in half precision; compiled or not
UNTILED = {True: 1.4e6, False: 1.9e6}
BACKWARD_OF_ATTENTION = 2.5  # times its forward: five matmuls instead of two


class Forward(NamedTuple):
    """FLOPs of one forward of one clip in the blocks; everything else is under 1 %."""

    linear: float
    attention: float


@dataclass(frozen=True)
class Architecture:
    """A model whose blocks attend over all tokens, one token per latent position. Other models override this."""

    layers: int  # blocks
    heads: int
    width: int  # channels per token
    mlp_ratio: float
    parameters: int  # in the full denoiser
    block: int  # of these, in one block
    vae: int  # parameters of the VAE
    channels: int = 32  # latent channels
    temporal: int = 4  # frames per latent frame, after the first
    spatial: int = 16  # pixels per latent row and column

    def video_tokens(self, frames: int, height: int, width: int) -> int:
        return ((frames - 1) // self.temporal + 1) * (height // self.spatial) * (width // self.spatial)

    def forward(self, num_video: int, num_context: int) -> Forward:
        matrices = (4 + 2 * self.mlp_ratio) * self.width**2  # query, key, value, output; feed-forward
        tokens = num_video + num_context
        return Forward(2 * matrices * tokens * self.layers, 4 * tokens**2 * self.width * self.layers)
