"""Tokens and floating-point operations of HunyuanVideo-1.5, counted from its sizes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

BACKWARD_OF_ATTENTION = 2.5  # times its forward: five products instead of two


@dataclass(frozen=True)
class Forward:
    """Operations of one forward of one clip in the blocks; all else is under 1 %."""

    linear: float
    attention: float

    @property
    def total(self) -> float:
        return self.linear + self.attention

    def backward(self, trains_weights: bool) -> float:
        """Of the backward pass, without recomputation. Frozen weights need the gradient of their input only."""
        return self.linear * (2 if trains_weights else 1) + self.attention * BACKWARD_OF_ATTENTION


def video_tokens(frames: int, height: int, width: int, temporal: int = 4, spatial: int = 16) -> int:
    """One for each place of the latents: the model's patch is 1."""
    return ((frames - 1) // temporal + 1) * (height // spatial) * (width // spatial)


def forward(config: Mapping[str, Any], num_video: int, num_context: int) -> Forward:
    """`config` of the transformer as diffusers writes it."""
    width, tokens = config["num_attention_heads"] * config["attention_head_dim"], num_video + num_context
    matrices = (4 + 2 * config["mlp_ratio"]) * width**2  # query, key, value, output; feed-forward
    layers = config["num_layers"]
    return Forward(2 * matrices * tokens * layers, 4 * tokens**2 * width * layers)
