"""Wan 2.1 text-to-video backbone, of 1.3 B or 14 B parameters, built on the stock transformer, VAE and text encoder.

Shapes: B clips, C latent channels, (T, y, x) latent frames, rows, columns.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan
from torch import Tensor

from sage_grpo.data.requests import Request
from sage_grpo.models.backbone import Origin, at_least_fp32
from sage_grpo.models.cost import DecodeBytes
from sage_grpo.models.latent import LatentBackbone, model_timestep
from sage_grpo.models.wan.folder import SMALL, WanFolder
from sage_grpo.models.wan.text import NUM_TOKENS, PaddedText, TextEncoder
from sage_grpo.models.wan.transformer import WanTransformer


class Wan(LatentBackbone):
    folder_class = WanFolder
    encoder_class = TextEncoder
    transformer_class = WanTransformer
    vae_class = AutoencoderKLWan

    vae_sizes = ("z_dim", "scale_factor_temporal", "scale_factor_spatial")
    patch = 2
    cross = NUM_TOKENS
    max_tokens = NUM_TOKENS

    # Assumed, not measured: the VAE holds four frames at a time, and the pixels of the clip.
    untiled = DecodeBytes(compiled=2e5, eager=2e5)
    tiled = 2.5e7

    lora_targets = ("to_q", "to_k", "to_v", "to_out.0")
    # the one that Wan publishes
    negative_prompt = Path(__file__).with_name("negative_prompt.txt").read_text("utf-8").strip()

    @property
    def origin(self) -> Origin:
        config = self.parts.config("transformer")
        size = "1.3B" if config.get("num_layers") == SMALL["num_layers"] else "14B"
        return Origin(f"Wan-AI/Wan2.1-T2V-{size}-Diffusers", license="apache-2.0")

    def default_size(self, request: Request) -> tuple[int, int]:
        """With an image its aspect ratio, with as many pixels as the model's own size."""
        height, width = super().default_size(request)
        if request.image is None:
            return height, width
        image_height, image_width = request.image.shape
        ratio = image_height / image_width

        def rounded_down(side: float) -> int:
            return max(self.multiple, int(side) // self.multiple * self.multiple)

        area = height * width
        return rounded_down(math.sqrt(area * ratio)), rounded_down(math.sqrt(area / ratio))

    def num_tokens(self, cond: PaddedText) -> int:
        return int(cond.text.any(1).sum())

    def branch(self, x: Tensor, sigma: Tensor | float, cond: PaddedText) -> Tensor:
        return self.run_transformer(x, model_timestep(sigma, x.device), cond)

    def run_transformer(
        self,
        x: Tensor,
        timestep: Tensor,
        cond: PaddedText,
        transformer: Callable[..., Tensor] | None = None,
    ) -> Tensor:
        """The velocity, at least fp32, of all that the transformer, or the given one, sees: x (B, C, T, y, x)."""
        transformer = transformer or self.transformer
        text = cond.text.to(x.device, self.dtype)
        if text.ndim == 2:  # one prompt for all clips
            text = text[None]
        return at_least_fp32(transformer(x.to(self.dtype), timestep, text))

    def scaling(self) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(self.vae.dtype, torch.float32)

        def per_channel(name: str) -> Tensor:
            values = torch.tensor(self.vae.config[name], dtype=wide, device=self.vae.device)
            return values.reshape(-1, 1, 1, 1)

        return per_channel("latents_mean"), 1 / per_channel("latents_std")

    def mlp_ratio(self, config: Any) -> float:
        return config.ffn_dim / (config.num_attention_heads * config.attention_head_dim)
