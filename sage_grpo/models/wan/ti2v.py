"""Wan 2.2 TI2V: text to video, or image to video if a request has an image.

The image is the first latent frame itself. The transformer sees its clean latents with timestep 0 before those that are
denoised, whose velocities alone are returned: noise, log-probabilities, losses and means never see the clean frame, and
`full_latents` puts it back before a clip is decoded.

Shapes: B clips, C latent channels, (T, y, x) latent frames, rows, columns.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sage_grpo.data.images import Image
from sage_grpo.data.requests import Request
from sage_grpo.models.backbone import Origin
from sage_grpo.models.cost import DecodeBytes
from sage_grpo.models.latent import model_timestep
from sage_grpo.models.wan.backbone import Wan
from sage_grpo.models.wan.folder import Ti2vFolder
from sage_grpo.models.wan.text import PaddedText, TextEncoder


@dataclass(frozen=True)
class FirstFrame(PaddedText):
    """Text of a request, and the first frame if the request has an image; a negative prompt takes the clip's."""

    first: Tensor  # (C, 1, y, x), clean latents in the model's scaling; empty without an image

    @property
    def has_image(self) -> bool:
        return self.first.numel() > 0

    def seeing(self, other: "FirstFrame") -> "FirstFrame":
        return replace(self, first=other.first)


class FirstFrameEncoder(TextEncoder):
    """The text encoder and, as `encode_image` of the backbone, the VAE."""

    kind = FirstFrame
    parts = (*TextEncoder.parts, "vae")
    encode_image: Callable[[Image], Tensor]

    @torch.no_grad()
    def encode(self, request: Request) -> FirstFrame:
        text = super().encode(request)
        first = torch.zeros(0)
        if request.image is not None:
            first = self.encode_image(request.image)
        return FirstFrame(text.text, first)


class Ti2v(Wan):
    folder_class = Ti2vFolder
    encoder_class = FirstFrameEncoder

    # Assumed, not measured: the decoder is 2.7 times as wide as that of 2.1, at half the resolution.
    untiled = DecodeBytes(compiled=7e5, eager=7e5)
    tiled = 4e7

    origin = Origin("Wan-AI/Wan2.2-TI2V-5B-Diffusers", license="apache-2.0")

    def encoder(self) -> FirstFrameEncoder:
        encoder = super().encoder()
        encoder.encode_image = self.encode_image
        return encoder

    def check_requests(self, requests: Sequence[Request]) -> None:
        """Every request will do, with an image or without."""

    def free_shape(self, shape: Sequence[int], cond: FirstFrame) -> tuple[int, ...]:
        channels, frames, rows, columns = shape
        if not cond.has_image:
            return channels, frames, rows, columns
        if frames == 1:
            raise ValueError(
                "num_frames is 1, which is the image itself; give at least 5 for clips that begin with an image"
            )
        return channels, frames - 1, rows, columns

    def full_latents(self, free: Tensor, cond: FirstFrame) -> Tensor:
        if not cond.has_image:
            return free
        first = cond.first.to(free).expand(len(free), -1, -1, -1, -1)
        return torch.cat([first, free], dim=2)

    def branch(self, x: Tensor, sigma: Tensor | float, cond: FirstFrame) -> Tensor:
        if not cond.has_image:
            return super().branch(x, sigma, cond)
        timestep = model_timestep(sigma, x.device)
        by_frame = torch.stack([torch.zeros_like(timestep), timestep], dim=1)
        return self.run_transformer(self.full_latents(x, cond), by_frame, cond)[:, :, 1:]
