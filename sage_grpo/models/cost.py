"""Sizes of a backbone, and the token and FLOP counts derived from them."""

from dataclasses import dataclass
from typing import NamedTuple

BACKWARD_OF_ATTENTION = 2.5  # times its forward: five matmuls instead of two


class DecodeBytes(NamedTuple):
    """Bytes that a VAE holds per token of a clip while it decodes without tiles."""

    compiled: float
    eager: float


# HunyuanVideo-1.5's VAE in half precision: without tiles (2026-11-17-decode-h200.md), and in tiles
# of 256 pixels, bytes per frame (2026-11-16-full-stack-h200.md).
UNTILED = DecodeBytes(compiled=1.4e6, eager=1.9e6)
TILED = 9.8e9 / 81


class Forward(NamedTuple):
    """FLOPs of one forward of one clip in the blocks; everything else is under 1 %."""

    linear: float
    attention: float


@dataclass(frozen=True)
class Architecture:
    """A model whose blocks attend over all tokens. Models of another kind override this."""

    # transformer
    layers: int  # blocks
    heads: int
    width: int  # channels per token
    mlp_ratio: float  # width of the feed-forward relative to `width`

    # parameters
    parameters: int  # of the full denoiser; of one transformer, if there are several
    block: int  # of these, in one block
    vae: int  # of the VAE

    # latents
    channels: int = 32  # numbers per token
    temporal: int = 4  # frames per latent frame, after the first
    spatial: int = 16  # pixels per row and column of tokens

    # bytes inside the VAE while it decodes
    untiled: DecodeBytes = UNTILED  # per token
    tiled: float = TILED  # per frame

    # context
    # tokens that the video attends to in a layer of its own; 0: they join the video's tokens
    cross: int = 0
    image: int = 0  # tokens of an image, which join the context

    # transformers, of which a step runs one; the first of two at noise levels from `boundary` on
    experts: int = 1
    boundary: float = 0.0

    def video_tokens(self, frames: int, height: int, width: int) -> int:
        """Tokens of a clip of so many frames and pixels."""
        latent_frames = (frames - 1) // self.temporal + 1
        return latent_frames * (height // self.spatial) * (width // self.spatial)

    def sequence(self, num_video: int, num_context: int) -> int:
        """Tokens that a block processes."""
        return num_video if self.cross else num_video + num_context + self.image

    def forward(self, num_video: int, num_context: int) -> Forward:
        """FLOPs of one forward of one clip, two per multiply-add."""
        # matrices of width x width: query, key, value and output; two of the feed-forward
        matrices = 4 + 2 * self.mlp_ratio
        if self.cross:
            matrices += 2  # query and output of the cross-attention
        tokens = self.sequence(num_video, num_context)
        scores = tokens * (tokens + self.cross)
        return Forward(
            linear=2 * matrices * self.width**2 * tokens * self.layers,
            attention=4 * scores * self.width * self.layers,
        )
