"""What the trainer and the generator need of a video model, and nothing more.

Shapes: B clips of one prompt, F frames of (Y, X) pixels, C latent channels, L text tokens, M glyph tokens.
"""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from sage_grpo.json_files import read_object

LARGEST = 2**31  # no setting of a model comes near


@dataclass(frozen=True)
class Conditioning:
    """Text embeddings of one prompt without padding: `text` (L, text_dim), `glyph` (M, glyph_dim), M may be 0."""

    text: Tensor
    glyph: Tensor

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "Conditioning":
        """The same conditioning on `device` and in `dtype`; None leaves either as it is."""
        return Conditioning(self.text.to(device=device, dtype=dtype), self.glyph.to(device=device, dtype=dtype))


@dataclass(frozen=True)
class Sampling:
    """How a model is meant to be sampled: pixels and frames per second of a clip, and the settings of the ODE."""

    frames: int
    height: int
    width: int
    fps: int
    shift: float
    guidance: float
    num_steps: int

    @classmethod
    def from_json(cls, path: Path) -> "Sampling":
        """Read a `sampling.json`; missing and unknown keys are errors, and so is what is not a number above 0."""
        values, kinds = read_object(path), {field.name: field.type for field in dataclasses.fields(cls)}
        if sorted(values) != sorted(kinds):
            raise ValueError(f"{path} has keys {sorted(values)}; it needs exactly {sorted(kinds)}.")
        for name, value in values.items():
            if type(value) not in (int, kinds[name]) or not 0 < value < LARGEST:
                whole = "whole " if kinds[name] is int else ""
                raise ValueError(f"{path} has {name} {value!r}; it must be a {whole}number above 0, below {LARGEST}.")
        return cls(**values)

    def to_json(self, path: Path) -> None:
        """Write what `from_json` reads."""
        path.write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n")


class BrokenClip(ValueError):
    """A clip whose pixels are not finite: it cannot be shown or scored."""


class Policy(Protocol):
    """A text-to-video flow model: x = (1 - sigma) x0 + sigma z, velocity v = dx/dsigma."""

    sampling: Sampling

    def encode(self, prompts: Sequence[str]) -> list[Conditioning]:
        """One conditioning per prompt."""

    def velocity(
        self, x: Tensor, sigma: Tensor | float, cond: Conditioning, guidance: float, negative: Conditioning | None
    ) -> Tensor:
        """Guided velocity, fp32, of latents x (B, C, ...) at noise level sigma (one number, or (B,))."""

    def decode(self, latents: Tensor) -> Tensor:
        """Latents (B, C, ...) in the model's own scaling -> uint8 clips (B, F, Y, X, 3), or BrokenClip."""

    def encode_video(self, clips: Tensor) -> Tensor:
        """uint8 clips (B, F, Y, X, 3) -> latents (B, C, ...) in the model's own scaling."""

    def latent_shape(self, frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        """Shape (C, T, y, x) of the latents of one clip of that many frames and pixels."""
