"""HunyuanVideo-1.5 image-to-video: the same transformer, which also sees the image that the clip begins with.

It sees the image as I tokens of a SigLIP vision model, and as VAE latents of the first frame in the condition channels,
where a mask marks them. Both are of the image cropped to the size of the clip, as in the stock pipeline. The latents
that are denoised do not contain it, so sampling and log-probabilities are those of text-to-video.

Shapes: B clips, I image tokens, C latent channels, (T, y, x) latent frames, rows, columns.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from diffusers.pipelines.hunyuan_video1_5.image_processor import HunyuanVideo15ImageProcessor
from torch import Tensor
from transformers import SiglipImageProcessorPil, SiglipVisionConfig, SiglipVisionModel

from sage_grpo.data.requests import Request
from sage_grpo.files.json_files import naming
from sage_grpo.models.folder import MODEL
from sage_grpo.models.hunyuan15.backbone import Hunyuan15
from sage_grpo.models.hunyuan15.folder import ModelFolder
from sage_grpo.models.hunyuan15.text import TextConditioning, TextEncoder
from sage_grpo.models.hunyuan15.transformer import PackedTransformer
from sage_grpo.models.text import empty_model
from sage_grpo.models.weights import Weights, load_model, open_folder

IMAGE_TOKENS = 729  # of the published models

# Files required to load each part, in addition to those of text-to-video.
IMAGE_FILES = {
    "image_encoder": MODEL,
    "feature_extractor": ("preprocessor_config.json",),
}


class ImageFolder(ModelFolder):
    task = "i2v"

    @property
    def files(self) -> Mapping[str, tuple[str, ...]]:
        return {**super().files, **IMAGE_FILES}


@dataclass(frozen=True)
class ImageConditioning(TextConditioning):
    """Text and image of a request; a negative prompt has no image and takes that of the positive branch."""

    image: Tensor  # (I, image_dim)
    first: Tensor  # (C, y, x), latents of the first frame in the model's scaling

    @property
    def tokens(self) -> tuple[Tensor, ...]:
        return *super().tokens, self.image

    def seeing(self, other: "ImageConditioning") -> "ImageConditioning":
        return replace(self, image=other.image, first=other.first)


class ImageEncoder(TextEncoder):
    """The text encoders, the vision model and, as `encode_image` of the backbone, the VAE."""

    kind = ImageConditioning
    parts = (*TextEncoder.parts, *IMAGE_FILES, "vae")

    def load(self) -> tuple[tuple, tuple]:
        tokenizers, encoders = super().load()

        place = self.folder.part("feature_extractor")
        with naming(place / "preprocessor_config.json"):
            processor = SiglipImageProcessorPil.from_pretrained(place, local_files_only=True)

        place = self.folder.part("image_encoder")
        stored = open_folder(place)
        pieces = {  # without the prefix that published files have
            name.removeprefix("vision_model."): piece for name, piece in stored.pieces.items()
        }
        model = empty_model(SiglipVisionModel, place)
        load_model(model, Weights(place, pieces), self.device, self.dtype)
        positions = torch.arange(model.embeddings.num_positions, device=self.device)
        model.embeddings.position_ids = positions[None]  # computed, not stored
        return (*tokenizers, processor), (*encoders, model.eval())

    @torch.no_grad()
    def encode(self, request: Request) -> ImageConditioning:
        text = super().encode(request)
        if request.image is None:
            return ImageConditioning(**vars(text), image=torch.zeros(0), first=torch.zeros(0))
        picture = request.image.cropped()

        *_, processor = self._tokenizers
        *_, vision_model = self._models
        with naming(self.folder.part("image_encoder")):
            pixels = processor(picture, return_tensors="pt").pixel_values
            tokens = vision_model(pixels.to(self.device, self.dtype)).last_hidden_state[0]

        first = self.encode_image(request.image)[:, 0]
        return ImageConditioning(**vars(text), image=tokens, first=first)


class ImageTransformer(PackedTransformer):
    unseen = ()


class ImageToVideo(Hunyuan15):
    folder_class = ImageFolder
    encoder_class = ImageEncoder
    transformer_class = ImageTransformer
    sees_image = True

    def encoder(self) -> ImageEncoder:
        encoder = super().encoder()
        encoder.encode_image = self.encode_image
        return encoder

    @property
    def image_tokens(self) -> int:
        """Tokens of an image."""
        if not self.folder.is_dir():
            return IMAGE_TOKENS
        place = self.parts.part("image_encoder")
        with naming(place / "config.json"):
            vision = SiglipVisionConfig.from_pretrained(place, local_files_only=True)
        return (vision.image_size // vision.patch_size) ** 2

    def condition(self, blank: Tensor, cond: ImageConditioning) -> Tensor:
        blank[:, :-1, 0] = cond.first
        blank[:, -1, 0] = 1  # the mask
        return blank

    def default_size(self, request: Request) -> tuple[int, int]:
        """The size of those the model was trained with whose aspect ratio is nearest to the image's."""
        target_size = self.parts.config("transformer").get("target_size", 640)
        processor = HunyuanVideo15ImageProcessor(vae_scale_factor=self.multiple)
        return processor.calculate_default_height_width(*request.image.shape, target_size)
