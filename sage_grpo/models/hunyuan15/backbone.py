"""HunyuanVideo-1.5 text-to-video backbone, built on `PackedTransformer` and the stock VAE and text encoders.

Shapes: B clips of one prompt, F frames of (Y, X) pixels, C latent channels, (T, y, x) latent frames, rows, columns.
"""

import inspect
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLHunyuanVideo15, ModelMixin
from torch import Tensor

from sage_grpo.json_files import check_kinds, naming
from sage_grpo.models.backbone import Backbone, BrokenClip, Sampling, at_least_fp32
from sage_grpo.models.cost import UNTILED, Architecture
from sage_grpo.models.hunyuan15 import DEFAULT_VERSION
from sage_grpo.models.hunyuan15.folder import ROLLOUT, ModelFolder
from sage_grpo.models.hunyuan15.text import MAX_TEXT_TOKENS, TextConditioning, TextEncoder
from sage_grpo.models.hunyuan15.transformer import PackedTransformer
from sage_grpo.models.hunyuan15.vae import allow_batches, fast_on_cpu, fuse_decoder
from sage_grpo.models.weights import Weights, load_model

MOST_POSITIONS = 1 << 24  # of a clip; 720p has 110,000
TIMESTEPS = 1000  # the model's timestep is TIMESTEPS * sigma
# latent positions that the VAE takes together: small clips in batches, which is faster, large ones one by one
BATCHED = {"cpu": 512, "cuda": 4096}


class Hunyuan15(Backbone):
    lora_targets = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
    max_tokens = MAX_TEXT_TOKENS

    @cached_property
    def parts(self) -> ModelFolder:
        return ModelFolder(self.folder, self.version or DEFAULT_VERSION)

    @cached_property
    def sampling(self) -> Sampling:
        """Read on first use: a folder with only encoders has no sampling settings but can still encode."""
        return self.parts.sampling()

    @property
    def rollout_size(self) -> tuple[int, int, int]:
        return ROLLOUT.get(super().rollout_size, super().rollout_size)

    def check(self) -> None:
        self.parts.check()

    def encoder(self) -> TextEncoder:
        return TextEncoder(self.parts, self.device, self.dtype)

    def num_tokens(self, cond: TextConditioning) -> int:
        return len(cond.text)

    def branch(self, x: Tensor, sigma: Tensor | float, cond: TextConditioning) -> Tensor:
        """Velocity under one conditioning. In text-to-video the condition latents and their mask are all zero."""
        cond = cond.to(x.device, self.dtype)
        batch, channels, *grid = x.shape
        blank = x.new_zeros(batch, self.transformer.config.in_channels - channels, *grid, dtype=self.dtype)
        timestep = TIMESTEPS * torch.as_tensor(sigma, dtype=torch.float32, device=x.device).reshape(-1)
        text, glyph = (part if part.ndim == 3 else part[None] for part in (cond.text, cond.glyph))
        velocity = self.transformer(torch.cat([x.to(self.dtype), blank], dim=1), timestep, text, glyph)
        return at_least_fp32(velocity)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Latents (B, C, T, y, x) -> uint8 clips (B, F, Y, X, 3). The only place where latents are unscaled.

        Raises BrokenClip if any clip has non-finite pixels.
        """
        return torch.cat([self._decode(part) for part in latents.split(self._together(latents[0, 0].numel()))])

    def _together(self, positions: int) -> int:
        """Clips of so many latent positions that go through the VAE at a time."""
        return max(1, BATCHED[self.vae.device.type] // positions)

    def _decode(self, latents: Tensor) -> Tensor:
        pixels = self._pixels(latents)
        broken = ~pixels.isfinite().flatten(1).all(1)
        if broken.any() and self.vae.dtype == torch.float16:  # beyond its range; overflows always end in NaN
            try:
                self.vae.float()
                pixels[broken] = self._pixels(latents[broken.to(latents.device)])
            finally:
                self.vae.half()
        if not pixels.isfinite().all():  # a uint8 cast would turn them black, and a reward would score them
            raise BrokenClip("a decoded clip has pixels that are not finite: the latents or the weights are broken")
        return ((pixels + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 4, 1).contiguous()

    def _pixels(self, latents: Tensor) -> Tensor:
        self.vae.use_tiling = latents[:, 0].numel() * UNTILED[self.compiled] > self.decode_gb * 1e9
        exact = torch.promote_types(self.vae.dtype, torch.float32)
        unscaled = latents.to(self.vae.device, exact) / self.vae.config.scaling_factor
        return at_least_fp32(self.vae.decode(unscaled.to(self.vae.dtype), return_dict=False)[0])

    @torch.no_grad()
    def encode_video(self, clips: Tensor) -> Tensor:
        """uint8 clips (B, F, Y, X, 3) -> scaled latents (B, C, T, y, x), fp32, the mode of the posterior."""
        together = self._together(math.prod(self.latent_shape(*clips.shape[1:4])[1:]))
        return torch.cat([self._encode(part) for part in clips.split(together)])

    def _encode(self, clips: Tensor) -> Tensor:
        self.vae.use_tiling = True
        pixels = clips.to(self.vae.device).permute(0, 4, 1, 2, 3) / 127.5 - 1
        mode = self.vae.encode(pixels.to(self.vae.dtype)).latent_dist.mode()
        return at_least_fp32(mode) * self.vae.config.scaling_factor

    def latent_shape(self, frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        """Latent shape (C, T, y, x) of one clip; rejects sizes that the VAE cannot encode."""
        temporal, spatial = self.vae.temporal_compression_ratio, self.multiple
        if frames < 1 or (frames - 1) % temporal:
            nearest = max(0, round((frames - 1) / temporal)) * temporal + 1
            raise ValueError(f"num_frames {frames} is not {temporal}n + 1; the nearest is {nearest}.")
        for name, size in (("height", height), ("width", width)):
            if size < spatial or size % spatial:
                raise ValueError(f"{name} {size} is not a multiple of {spatial}, the VAE's spatial compression.")
        grid = ((frames - 1) // temporal + 1, height // spatial, width // spatial)
        if math.prod(grid) > MOST_POSITIONS:
            raise ValueError(
                f"{frames} frames of {height} x {width} have {math.prod(grid)} latent positions, and no machine holds "
                f"{MOST_POSITIONS}; lower num_frames, height or width."
            )
        return (self.vae.config.latent_channels, *grid)

    @property
    def multiple(self) -> int:
        return self.vae.spatial_compression_ratio

    def empty_transformer(self) -> PackedTransformer:
        return self._empty("transformer", PackedTransformer)

    def open_weights(self) -> Weights:
        return self.parts.weights("transformer")

    @property
    def vae_dtype(self) -> torch.dtype:
        """For a bf16 model fp16, which rounds an eighth as much, as Tencent decodes; fp32 where fp16 is not faster."""
        half = torch.float16 if self.device.type == "cuda" else torch.float32
        return half if self.dtype == torch.bfloat16 else self.dtype

    @cached_property
    def vae(self) -> AutoencoderKLHunyuanVideo15:
        """The frozen autoencoder; `_pixels` says which clips are tiled, if they are larger than 256 pixels."""
        empty = self._empty("vae", AutoencoderKLHunyuanVideo15)
        model = load_model(empty, self.parts.weights("vae"), self.device, self.vae_dtype)
        model.enable_tiling()
        if self.device.type == "cpu":
            fast_on_cpu(model)
        elif self.compiled:
            fuse_decoder(model)
        return allow_batches(model).requires_grad_(False)

    def _empty(self, part: str, kind: type[ModelMixin]) -> ModelMixin:
        config, path = self.parts.config(part), self.parts.place(part) / "config.json"
        defaults = {name: one.default for name, one in inspect.signature(kind.__init__).parameters.items()}
        check_kinds(path, config, {name: type(defaults[name]) for name in config if name in defaults})
        check_sizes(path, defaults | config)
        with naming(path), torch.device("meta"):
            return kind.from_config(config).eval()

    def architecture(self) -> Architecture:
        transformer, vae = self.empty_transformer(), self._empty("vae", AutoencoderKLHunyuanVideo15)
        config, heads = transformer.config, transformer.config.num_attention_heads
        parts = (transformer, transformer.all_blocks[0], vae)
        parameters, block, in_vae = (sum(p.numel() for p in part.parameters()) for part in parts)
        return Architecture(
            layers=config.num_layers, heads=heads, width=heads * config.attention_head_dim, mlp_ratio=config.mlp_ratio,
            parameters=parameters, block=block, vae=in_vae, channels=vae.config.latent_channels,
            temporal=vae.temporal_compression_ratio, spatial=vae.spatial_compression_ratio,
        )  # fmt: skip

    def awaits(self, name: str, seen: Sequence[TextConditioning]) -> str:
        quoted = any(len(cond.glyph) for cond in seen)
        if name.startswith("context_embedder_2.") and not quoted:
            return "of the glyph embedder wait for a prompt that quotes text"
        return ""


def check_sizes(path: Path, config: Mapping[str, Any]) -> None:
    """Reject sizes of a transformer or a VAE that contradict each other where the weights would not tell."""
    axes, width = config.get("rope_axes_dim", ()), config.get("attention_head_dim", 0)
    if sum(axes) != width:
        raise ValueError(f"{path} has rope_axes_dim {list(axes)}, whose sum must be attention_head_dim, {width}")
    time, space = (config.get(f"{axis}_compression_ratio", 1) for axis in ("temporal", "spatial"))
    if time & (time - 1) or space & (space - 1) or time > space:
        raise ValueError(f"{path} compresses time by {time} and space by {space}; download it again")
