"""What backbones from a diffusers folder share: a VAE whose latents the transformer denoises, and their sizes.

Shapes: B clips, F frames of (Y, X) pixels, C latent channels, (T, y, x) latent frames, rows, columns.
"""

import math
from abc import abstractmethod
from functools import cached_property
from typing import Any

import numpy as np
import torch
from diffusers import ModelMixin
from torch import Tensor, nn

from sage_grpo.data.images import Image
from sage_grpo.files.fingerprints import files_fingerprint
from sage_grpo.models.backbone import Backbone, BrokenClip, Sampling, at_least_fp32
from sage_grpo.models.cost import TILED, UNTILED, Architecture, DecodeBytes
from sage_grpo.models.denoiser import Denoiser
from sage_grpo.models.folder import DiffusersFolder
from sage_grpo.models.text import FolderEncoder
from sage_grpo.models.versions import DEFAULT_VERSION
from sage_grpo.models.weights import Weights, load_model

MAX_POSITIONS = 1 << 24  # of a clip; 720p has 110,000
TIMESTEPS = 1000  # the model's timestep is TIMESTEPS * sigma

# Latent positions that go through the VAE together, by device type: small clips in batches, which
# is faster, large ones one by one.
BATCHED = {"cpu": 512, "cuda": 4096}


class LatentBackbone(Backbone):
    """A backbone from a folder, with a stock VAE."""

    # classes of the parts
    folder_class: type[DiffusersFolder]
    encoder_class: type[FolderEncoder]
    transformer_class: type[Denoiser]
    vae_class: type[ModelMixin]

    # names of VAE settings: latent channels, frames per latent frame, pixels per latent row and column
    vae_sizes = ("latent_channels", "temporal_compression_ratio", "spatial_compression_ratio")
    patch = 1  # latent rows and columns of a token

    # see the fields of `Architecture`
    untiled: DecodeBytes = UNTILED
    tiled: float = TILED
    cross = 0
    image_tokens = 0

    @cached_property
    def parts(self) -> DiffusersFolder:
        return self.folder_class(self.folder, self.version or DEFAULT_VERSION)

    @cached_property
    def sampling(self) -> Sampling:
        """Read on first use: a folder with only encoders has no sampling settings but can still encode."""
        return self.parts.sampling()

    def check(self) -> None:
        self.parts.check()

    def encoder(self) -> FolderEncoder:
        return self.encoder_class(self.parts, self.device, self.dtype)

    @property
    def encoder_bytes(self) -> float:
        """The size of their files, which hold weights in the precision of the run or a wider one."""
        files = (
            file
            for part in self.encoder_class.parts
            for file in self.parts.part(part).rglob("*")
            if file.is_file()
        )
        return sum(file.stat().st_size for file in files)

    @abstractmethod
    def scaling(self) -> tuple[Tensor | float, Tensor | float]:
        """Shift and factor, numbers or (C, 1, 1, 1): the model's latents are (the VAE's - shift) * factor."""

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Latents (B, C, T, y, x) -> uint8 clips (B, F, Y, X, 3). The only place where latents are unscaled.

        Raises BrokenClip if any clip has non-finite pixels.
        """
        batch = self._vae_batch(latents[0, 0].numel())
        return torch.cat([self._decode(part) for part in latents.split(batch)])

    def _vae_batch(self, positions: int) -> int:
        """How many clips of so many latent positions go through the VAE at a time."""
        return max(1, BATCHED[self.vae.device.type] // positions)

    def _decode(self, latents: Tensor) -> Tensor:
        pixels = self._pixels(latents)
        broken = ~pixels.isfinite().flatten(1).all(1)
        if broken.any() and self.vae.dtype == torch.float16:
            # Activations exceeded the range of fp16, which always ends in NaN: decode these clips again.
            try:
                self.vae.float()
                pixels[broken] = self._pixels(latents[broken.to(latents.device)])
            finally:
                self.vae.half()
        if not pixels.isfinite().all():
            # The cast to uint8 would turn them black, and a reward would score them.
            raise BrokenClip(
                "a decoded clip has pixels that are not finite: the latents or the weights are broken"
            )
        clips = ((pixels + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
        return clips.permute(0, 2, 3, 4, 1).contiguous()

    def _pixels(self, latents: Tensor) -> Tensor:
        """Latents (B, C, T, y, x) in the model's scaling -> pixels (B, 3, F, Y, X) from -1 to 1, at least fp32."""
        tokens = latents[:, 0].numel() / self.patch**2
        bytes_per_token = self.untiled.compiled if self.compiled else self.untiled.eager
        self.vae.use_tiling = tokens * bytes_per_token > self.decode_gb * 1e9

        shift, factor = self.scaling()
        wide = torch.promote_types(self.vae.dtype, torch.float32)
        unscaled = latents.to(self.vae.device, wide) / factor + shift
        pixels = self.vae.decode(unscaled.to(self.vae.dtype), return_dict=False)[0]
        return at_least_fp32(pixels)

    @torch.no_grad()
    def encode_video(self, clips: Tensor) -> Tensor:
        """uint8 clips (B, F, Y, X, 3) -> scaled latents (B, C, T, y, x), fp32, the mode of the posterior."""
        _, *grid = self.latent_shape(*clips.shape[1:4])
        batch = self._vae_batch(math.prod(grid))
        return torch.cat([self._encode(part) for part in clips.split(batch)])

    def _encode(self, clips: Tensor) -> Tensor:
        pixels = clips.to(self.vae.device).permute(0, 4, 1, 2, 3) / 127.5 - 1
        # an image needs no tiles, which would change it
        return self.encode_pixels(pixels, tiled=clips.shape[1] > 1)

    def encode_pixels(self, pixels: Tensor, tiled: bool) -> Tensor:
        """Pixels (B, 3, F, Y, X) from -1 to 1 -> scaled latents (B, C, T, y, x), fp32 or more, the mode."""
        self.vae.use_tiling = tiled
        mode = self.vae.encode(pixels.to(self.vae.dtype)).latent_dist.mode()
        shift, factor = self.scaling()
        return (at_least_fp32(mode) - shift) * factor

    def encode_image(self, image: Image) -> Tensor:
        """Scaled latents (C, 1, y, x) of an image, cropped to the size of the clip that begins with it."""
        return self.checked(self.encode_video(clip_of(image))[0], image)

    @staticmethod
    def checked(latents: Tensor, image: Image) -> Tensor:
        """The latents of an image, which must be finite."""
        if not latents.isfinite().all():
            raise ValueError(
                f"the VAE's latents of {image.path} are not finite; use another image, or dtype fp32"
            )
        return latents

    def latent_shape(self, frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        """Latent shape (C, T, y, x) of one clip; rejects sizes that the VAE cannot encode."""
        channels, temporal, spatial = self._compression(self.vae)
        if frames < 1 or (frames - 1) % temporal:
            nearest = max(0, round((frames - 1) / temporal)) * temporal + 1
            raise ValueError(
                f"num_frames {frames} is not {temporal}n + 1; the nearest is {nearest}."
            )
        for name, size in (("height", height), ("width", width)):
            if size < self.multiple or size % self.multiple:
                raise ValueError(
                    f"{name} {size} is not a multiple of {self.multiple}, the pixels of a token."
                )
        grid = ((frames - 1) // temporal + 1, height // spatial, width // spatial)
        positions = math.prod(grid)
        if positions > MAX_POSITIONS:
            raise ValueError(
                f"{frames} frames of {height} x {width} have {positions} latent positions, and no machine holds "
                f"{MAX_POSITIONS}; lower num_frames, height or width."
            )
        return (channels, *grid)

    @property
    def multiple(self) -> int:
        _, _, spatial = self._compression(self.vae)
        return spatial * self.patch

    def _compression(self, vae: ModelMixin) -> list[int]:
        """Latent channels, frames per latent frame, pixels per latent row and column."""
        return [vae.config[name] for name in self.vae_sizes]

    def empty_transformer(self) -> Denoiser:
        return self.parts.empty("transformer", self.transformer_class)

    def open_weights(self) -> Weights:
        return self.parts.weights("transformer")

    def fingerprints(self) -> dict[str, str]:
        transformer_config = self.parts.part("transformer") / "config.json"
        return super().fingerprints() | {
            "transformer config": files_fingerprint([transformer_config]),
            "VAE": files_fingerprint([self.parts.part("vae")]),
        }

    @property
    def vae_dtype(self) -> torch.dtype:
        """For a bf16 model fp16, which rounds an eighth as much; fp32 on a CPU, where fp16 is not faster."""
        if self.dtype != torch.bfloat16:
            return self.dtype
        return torch.float16 if self.device.type == "cuda" else torch.float32

    @cached_property
    def vae(self) -> ModelMixin:
        """The frozen autoencoder. Clips larger than 256 pixels may be tiled; `_pixels` decides which."""
        empty = self.parts.empty("vae", self.vae_class)
        model = load_model(empty, self.parts.weights("vae"), self.device, self.vae_dtype)
        model.enable_tiling()
        return model.requires_grad_(False)

    def mlp_ratio(self, config: Any) -> float:
        """Width of the feed-forward relative to the transformer's."""
        return config.mlp_ratio

    def architecture(self) -> Architecture:
        transformer, *_ = self.empty_transformer().experts.values()
        vae = self.parts.empty("vae", self.vae_class)
        c = transformer.config
        channels, temporal, spatial = self._compression(vae)
        return Architecture(
            layers=c.num_layers,
            heads=c.num_attention_heads,
            width=c.num_attention_heads * c.attention_head_dim,
            mlp_ratio=self.mlp_ratio(c),
            parameters=_count_parameters(transformer),
            block=_count_parameters(transformer.all_blocks[0]),
            vae=_count_parameters(vae),
            channels=channels * self.patch**2,
            temporal=temporal,
            spatial=spatial * self.patch,
            untiled=self.untiled,
            tiled=self.tiled,
            cross=self.cross,
            image=self.image_tokens,
            experts=len(self.experts),
            boundary=self.boundary,
        )


def _count_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def model_timestep(sigma: Tensor | float, device: torch.device) -> Tensor:
    """The timestep that the transformer reads for noise level(s) sigma: fp32, (1,) for a scalar, else (B,)."""
    return TIMESTEPS * torch.as_tensor(sigma, dtype=torch.float32, device=device).reshape(-1)


def clip_of(image: Image) -> Tensor:
    """A clip of one frame, uint8 (1, 1, Y, X, 3): the image, cropped to its size."""
    return torch.from_numpy(np.array(image.cropped()))[None, None]


def high_levels(sigma: Tensor | float, boundary: float, device: torch.device) -> Tensor:
    """Whether the first of two transformers works at noise level(s) sigma: bool, (1,) or (B,).

    As in stock pipelines, timesteps are compared, in fp32.
    """
    return model_timestep(sigma, device) >= boundary * TIMESTEPS


def trained_levels(sigmas: Tensor, boundary: float, adapted: str) -> Tensor:
    """(n,) bool: whether the transformers for `high`, `low` or `both` noise levels work at `sigmas` (n,)."""
    is_high = high_levels(sigmas, boundary, sigmas.device)
    sides = {"high": is_high, "low": ~is_high, "both": torch.ones_like(is_high)}
    return sides[adapted]
