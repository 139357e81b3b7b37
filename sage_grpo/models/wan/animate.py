"""Wan 2.2 A14B image to video: the transformers also see the image that the clip begins with.

They see, in channels of their own, the latents of a clip that begins with the image and goes on in gray, and a mask
that marks the image. The latents that are denoised do not contain it, so sampling and log-probabilities are those of
text to video. The VAE is causal: the latents of a shorter clip are the first ones of a longer one.

Shapes: B clips, C latent channels, (T, y, x) latent frames, rows, columns.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sage_grpo.data.images import Image
from sage_grpo.data.requests import Request
from sage_grpo.models.backbone import Origin
from sage_grpo.models.latent import clip_of
from sage_grpo.models.wan.a14b import A14b
from sage_grpo.models.wan.folder import AnimatingFolder
from sage_grpo.models.wan.text import PaddedText, TextEncoder


@dataclass(frozen=True)
class AnimatedImage(PaddedText):
    """Text and image of a request; a negative prompt has no image and takes that of the positive branch."""

    image: Tensor  # (C, T, y, x), scaled latents of the image and gray frames after it, of the longest clip

    def seeing(self, other: "AnimatedImage") -> "AnimatedImage":
        return replace(self, image=other.image)


class ImageEncoder(TextEncoder):
    """The text encoder and, as `encode_image` of the backbone, the VAE."""

    kind = AnimatedImage
    parts = (*TextEncoder.parts, "vae")
    encode_image: Callable[[Image], Tensor]

    @torch.no_grad()
    def encode(self, request: Request) -> AnimatedImage:
        text = super().encode(request)
        image = torch.zeros(0)
        if request.image is not None:
            image = self.encode_image(request.image)
        return AnimatedImage(text.text, image)


class AnimatingA14b(A14b):
    folder_class = AnimatingFolder
    encoder_class = ImageEncoder
    sees_image = True

    origin = Origin("Wan-AI/Wan2.2-I2V-A14B-Diffusers", license="apache-2.0")

    def encoder(self) -> ImageEncoder:
        encoder = super().encoder()
        encoder.encode_image = self.encode_image
        encoder.settings = f"{TextEncoder.settings} {self.sampling.frames}"
        return encoder

    @torch.no_grad()
    def encode_image(self, image: Image) -> Tensor:
        """Scaled latents (C, T, y, x) of the image and gray frames after it, of the longest clip."""
        first = clip_of(image).to(self.vae.device).permute(0, 4, 1, 2, 3) / 127.5 - 1
        gray = first.new_zeros(1, 3, self.sampling.frames - 1, *first.shape[-2:])
        latents = self.encode_pixels(torch.cat([first, gray], dim=2), tiled=False)[0]
        return self.checked(latents, image)

    def latent_shape(self, frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        if frames > self.sampling.frames:
            raise ValueError(
                f"num_frames {frames} is more than {self.sampling.frames}, the longest clip that {self.folder} animates"
            )
        return super().latent_shape(frames, height, width)

    def model_input(self, x: Tensor, cond: AnimatedImage) -> Tensor:
        """Latents, mask and image in the channels of the input, (B, 2 C + M, T, y, x); M frames per latent frame."""
        batch, _, frames, *grid = x.shape
        image = cond.image[..., :frames, :, :].to(x).expand(batch, -1, -1, -1, -1)
        _, num_masks, _ = self._compression(self.vae)
        mask = x.new_zeros(batch, num_masks, frames, *grid)
        mask[:, :, 0] = 1
        return torch.cat([x, mask, image], dim=1)
