"""HunyuanVideo-1.5 text-to-video backbone, built on `PackedTransformer` and the stock VAE and text encoders.

Shapes: B clips of one prompt, F frames of (Y, X) pixels, C latent channels, (T, y, x) latent frames, rows, columns.
"""

from collections.abc import Sequence
from functools import cached_property

import torch
from diffusers import AutoencoderKLHunyuanVideo15
from torch import Tensor

from sage_grpo.models.backbone import at_least_fp32
from sage_grpo.models.hunyuan15.folder import ROLLOUT, ModelFolder
from sage_grpo.models.hunyuan15.text import MAX_TEXT_TOKENS, TextConditioning, TextEncoder
from sage_grpo.models.hunyuan15.transformer import PackedTransformer
from sage_grpo.models.hunyuan15.vae import allow_batches, fast_on_cpu, fuse_decoder
from sage_grpo.models.latent import TIMESTEPS, LatentBackbone


class Hunyuan15(LatentBackbone):
    folder_class, encoder_class = ModelFolder, TextEncoder
    transformer_class, vae_class = PackedTransformer, AutoencoderKLHunyuanVideo15
    lora_targets = (
        "to_q",
        "to_k",
        "to_v",
        "to_out.0",
        "add_q_proj",
        "add_k_proj",
        "add_v_proj",
        "to_add_out",
    )
    max_tokens = MAX_TEXT_TOKENS

    @property
    def rollout_size(self) -> tuple[int, int, int]:
        return ROLLOUT.get(super().rollout_size, super().rollout_size)

    def num_tokens(self, cond: TextConditioning) -> int:
        return len(cond.text)

    def branch(self, x: Tensor, sigma: Tensor | float, cond: TextConditioning) -> Tensor:
        """Velocity under one conditioning."""
        cond = cond.to(x.device, self.dtype)
        batch, channels, *grid = x.shape
        blank = x.new_zeros(
            batch, self.transformer.config.in_channels - channels, *grid, dtype=self.dtype
        )
        timestep = TIMESTEPS * torch.as_tensor(sigma, dtype=torch.float32, device=x.device).reshape(
            -1
        )
        tokens = (part if part.ndim == 3 else part[None] for part in cond.tokens)
        inputs = torch.cat([x.to(self.dtype), self.condition(blank, cond)], dim=1)
        return at_least_fp32(self.transformer(inputs, timestep, *tokens))

    def condition(self, blank: Tensor, cond: TextConditioning) -> Tensor:
        """Condition latents and their mask (B, C + 1, T, y, x); in text-to-video they are all zero."""
        return blank

    def scaling(self) -> tuple[float, float]:
        return 0.0, self.vae.config.scaling_factor

    @cached_property
    def vae(self) -> AutoencoderKLHunyuanVideo15:
        model = allow_batches(super().vae)
        if self.device.type == "cpu":
            return fast_on_cpu(model)
        return fuse_decoder(model) if self.compiled else model

    def awaits(self, name: str, seen: Sequence[TextConditioning]) -> str:
        waits = name.startswith("context_embedder_2.") and not any(len(cond.glyph) for cond in seen)
        return "of the glyph embedder wait for a prompt that quotes text" if waits else ""
