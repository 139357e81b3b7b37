"""Wan 2.1 text-to-video backbone, of 1.3 B or 14 B parameters, built on the stock transformer, VAE and text encoder."""

from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan
from torch import Tensor

from sage_grpo.models.backbone import at_least_fp32
from sage_grpo.models.latent import TIMESTEPS, LatentBackbone
from sage_grpo.models.wan21.folder import WanFolder
from sage_grpo.models.wan21.text import NUM_TOKENS, PaddedText, TextEncoder
from sage_grpo.models.wan21.transformer import WanTransformer


class Wan21(LatentBackbone):
    folder_class, encoder_class = WanFolder, TextEncoder
    transformer_class, vae_class = WanTransformer, AutoencoderKLWan
    vae_sizes = ("z_dim", "scale_factor_temporal", "scale_factor_spatial")
    vae_bytes = (
        (2e5, 2e5),
        2.5e7,
    )  # assumed: the VAE holds four frames at a time, and the pixels of the clip
    patch, cross = 2, NUM_TOKENS
    lora_targets = ("to_q", "to_k", "to_v", "to_out.0")
    max_tokens = NUM_TOKENS
    negative_prompt = (
        Path(__file__).with_name("negative_prompt.txt").read_text(encoding="utf-8").strip()
    )  # Wan's own

    def num_tokens(self, cond: PaddedText) -> int:
        return int(cond.text.any(1).sum())

    def branch(self, x: Tensor, sigma: Tensor | float, cond: PaddedText) -> Tensor:
        text = cond.to(x.device, self.dtype).text
        timestep = TIMESTEPS * torch.as_tensor(sigma, dtype=torch.float32, device=x.device).reshape(
            -1
        )
        return at_least_fp32(
            self.transformer(x.to(self.dtype), timestep, text if text.ndim == 3 else text[None])
        )

    def scaling(self) -> tuple[Tensor, Tensor]:
        kind = {
            "dtype": torch.promote_types(self.vae.dtype, torch.float32),
            "device": self.vae.device,
        }
        statistics = (self.vae.config[name] for name in ("latents_mean", "latents_std"))
        mean, std = (torch.tensor(values, **kind).reshape(-1, 1, 1, 1) for values in statistics)
        return mean, 1 / std

    def mlp_ratio(self, config: Any) -> float:
        return config.ffn_dim / (config.num_attention_heads * config.attention_head_dim)
