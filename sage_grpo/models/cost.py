"""Sizes of a backbone, and the token and FLOP counts derived from them."""

from dataclasses import dataclass
from typing import NamedTuple

# bytes inside HunyuanVideo-1.5's VAE when it decodes in half precision
UNTILED = (
    1.4e6,
    1.9e6,
)  # per token of a clip that is not tiled; compiled, eager (2026-11-17-decode-h200.md)
TILED = 9.8e9 / 81  # per frame of a clip in tiles of 256 pixels (2026-11-16-full-stack-h200.md)
BACKWARD_OF_ATTENTION = 2.5  # times its forward: five matmuls instead of two


class Forward(NamedTuple):
    """FLOPs of one forward of one clip in the blocks; everything else is under 1 %."""

    linear: float
    attention: float


@dataclass(frozen=True)
class Architecture:
    """A model whose blocks attend over all tokens. Models of another kind override this."""

    layers: int  # blocks
    heads: int
    width: int  # channels per token
    mlp_ratio: float
    parameters: int  # in the full denoiser
    block: int  # of these, in one block
    vae: int  # parameters of the VAE
    channels: int = 32  # latent numbers per token
    temporal: int = 4  # frames per latent frame, after the first
    spatial: int = 16  # pixels per row and column of tokens
    untiled: tuple[float, float] = UNTILED
    tiled: float = TILED
    cross: int = 0  # context tokens that the video attends to in a layer of its own; 0: they join the video's tokens
    image: int = 0  # tokens of an image, which join the context

    def video_tokens(self, frames: int, height: int, width: int) -> int:
        return (
            ((frames - 1) // self.temporal + 1) * (height // self.spatial) * (width // self.spatial)
        )

    def sequence(self, num_video: int, num_context: int) -> int:
        """Tokens that a block processes."""
        return num_video if self.cross else num_video + num_context + self.image

    def forward(self, num_video: int, num_context: int) -> Forward:
        # query, key, value, output; feed-forward; query and output of the cross-attention
        matrices = (4 + 2 * self.mlp_ratio + 2 * bool(self.cross)) * self.width**2
        tokens = self.sequence(num_video, num_context)
        scores = tokens * (tokens + self.cross)
        return Forward(2 * matrices * tokens * self.layers, 4 * scores * self.width * self.layers)
