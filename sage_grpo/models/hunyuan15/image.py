"""HunyuanVideo-1.5 image-to-video: the same transformer, which also sees the image that the clip begins with.

It sees it twice: as tokens of a SigLIP vision model in front of the text, and as VAE latents of the first frame in the
condition channels, where a mask marks them. Both come from the image cropped to the size of the clip, as in the stock
pipeline. The latents that are denoised do not contain it, so sampling and log-probabilities are those of text-to-video.

Shapes: I image tokens (729), C latent channels, (y, x) latent rows and columns.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from diffusers.pipelines.hunyuan_video1_5.image_processor import HunyuanVideo15ImageProcessor
from torch import Tensor
from transformers import SiglipImageProcessorPil, SiglipVisionModel

from sage_grpo.data.images import Image
from sage_grpo.data.requests import Request
from sage_grpo.json_files import naming
from sage_grpo.models.folder import MODEL
from sage_grpo.models.hunyuan15.backbone import Hunyuan15
from sage_grpo.models.hunyuan15.folder import ModelFolder
from sage_grpo.models.hunyuan15.text import TextConditioning, TextEncoder
from sage_grpo.models.hunyuan15.transformer import PackedTransformer
from sage_grpo.models.text import empty_model
from sage_grpo.models.weights import Weights, load_model, open_folder

IMAGE_FILES = {"image_encoder": MODEL, "feature_extractor": ("preprocessor_config.json",)}


class ImageFolder(ModelFolder):
    task = "i2v"

    @property
    def files(self) -> Mapping[str, tuple[str, ...]]:
        return {**super().files, **IMAGE_FILES}


@dataclass(frozen=True)
class ImageConditioning(TextConditioning):
    """Text and image of a request; a negative prompt has none, and takes that of the positive branch."""

    image: Tensor  # (I, image_dim)
    first: Tensor  # (C, y, x), latents of the first frame in the model's scaling

    @property
    def tokens(self) -> tuple[Tensor, ...]:
        return *super().tokens, self.image

    def seeing(self, other: "ImageConditioning") -> "ImageConditioning":
        return replace(self, image=other.image, first=other.first)


class ImageEncoder(TextEncoder):
    """The text encoders, the vision model and, from the backbone, the VAE."""

    kind = ImageConditioning
    parts = (*TextEncoder.parts, *IMAGE_FILES, "vae")
    encode_video: Callable[[Tensor], Tensor]

    def load(self) -> tuple[tuple, tuple]:
        tokenizers, encoders = super().load()
        place = self.folder.part("feature_extractor")
        with naming(place / "preprocessor_config.json"):
            processor = SiglipImageProcessorPil.from_pretrained(place, local_files_only=True)
        vision = vision_model(self.folder.part("image_encoder"), self.device, self.dtype)
        return (*tokenizers, processor), (*encoders, vision)

    @torch.no_grad()
    def encode(self, request: Request) -> ImageConditioning:
        text = super().encode(request)
        seen = self._image(request.image) if request.image else {name: torch.zeros(0) for name in ("image", "first")}
        return ImageConditioning(**vars(text), **seen)

    def _image(self, image: Image) -> dict[str, Tensor]:
        picture = image.cropped()
        with naming(self.folder.part("image_encoder")):
            pixels = self._tokenizers[-1](picture, return_tensors="pt").pixel_values
            tokens = self._models[-1](pixels.to(self.device, self.dtype)).last_hidden_state[0]
        first = self.encode_video(torch.from_numpy(np.array(picture))[None, None])[0, :, 0]
        if not first.isfinite().all():
            raise ValueError(f"the VAE gives latents of {image.path} that are not finite; use another image or --dtype")
        return {"image": tokens, "first": first}


def vision_model(folder: Path, device: torch.device, dtype: torch.dtype) -> SiglipVisionModel:
    """Load a SigLIP vision model; the published files call it `vision_model`."""
    stored, model = open_folder(folder), empty_model(SiglipVisionModel, folder)
    pieces = {name.removeprefix("vision_model."): piece for name, piece in stored.pieces.items()}
    load_model(model, Weights(folder, pieces), device, dtype)
    embeddings = model.embeddings
    embeddings.position_ids = torch.arange(embeddings.num_positions, device=device)[None]  # computed, not stored
    return model.eval()


class ImageTransformer(PackedTransformer):
    unseen = ()


class ImageToVideo(Hunyuan15):
    folder_class, encoder_class, transformer_class = ImageFolder, ImageEncoder, ImageTransformer
    sees_image, image_tokens = True, 729

    def encoder(self) -> ImageEncoder:
        encoder = super().encoder()
        encoder.encode_video = self.encode_video
        return encoder

    def condition(self, blank: Tensor, cond: ImageConditioning) -> Tensor:
        blank[:, :-1, 0], blank[:, -1, 0] = cond.first, 1
        return blank

    def default_size(self, request: Request) -> tuple[int, int]:
        """Of the sizes that the model was trained on, the one whose shape is closest to the image."""
        target = self.parts.config("transformer").get("target_size", 640)
        rule = HunyuanVideo15ImageProcessor(vae_scale_factor=self.multiple).calculate_default_height_width
        return rule(*request.image.shape, target)
