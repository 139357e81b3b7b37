"""HunyuanVideo-1.5 text-to-video backbone, built on `PackedTransformer` and the stock VAE and text encoders.

Shapes: B clips of one prompt, F frames of (Y, X) pixels, C latent channels, (T, y, x) latent frames, rows, columns.
"""

from collections.abc import Sequence
from functools import cached_property

import torch
from diffusers import AutoencoderKLHunyuanVideo15
from torch import Tensor

from sage_grpo.models.backbone import Origin, at_least_fp32
from sage_grpo.models.hunyuan15.folder import ROLLOUT, ModelFolder
from sage_grpo.models.hunyuan15.text import MAX_TEXT_TOKENS, TextConditioning, TextEncoder
from sage_grpo.models.hunyuan15.transformer import PackedTransformer
from sage_grpo.models.hunyuan15.vae import allow_batches, fast_on_cpu, fuse_decoder
from sage_grpo.models.latent import LatentBackbone, model_timestep
from sage_grpo.models.versions import ANIMATE


class Hunyuan15(LatentBackbone):
    folder_class = ModelFolder
    encoder_class = TextEncoder
    transformer_class = PackedTransformer
    vae_class = AutoencoderKLHunyuanVideo15

    max_tokens = MAX_TEXT_TOKENS
    origin = Origin(
        base_model="tencent/HunyuanVideo-1.5",
        license="other",
        license_name="tencent-hunyuan-community",
        license_link="https://huggingface.co/tencent/HunyuanVideo-1.5/blob/main/LICENSE",
    )
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

    @property
    def rollout_size(self) -> tuple[int, int, int]:
        full_size = super().rollout_size
        return ROLLOUT.get(full_size, full_size)

    @property
    def image_versions(self) -> list[str]:
        if self.parts.is_tencent:
            return [version for version in self.parts.versions if "_i2v" in version]
        has_vision_model = (self.folder / "image_encoder").is_dir()
        return [ANIMATE] if has_vision_model else []

    def num_tokens(self, cond: TextConditioning) -> int:
        return len(cond.text)

    def branch(self, x: Tensor, sigma: Tensor | float, cond: TextConditioning) -> Tensor:
        """Velocity under one conditioning."""
        cond = cond.to(x.device, self.dtype)
        batch, channels, *grid = x.shape
        num_condition = self.transformer.config.in_channels - channels
        blank = x.new_zeros(batch, num_condition, *grid, dtype=self.dtype)
        inputs = torch.cat([x.to(self.dtype), self.condition(blank, cond)], dim=1)

        timestep = model_timestep(sigma, x.device)
        # one prompt for all clips has no batch dim yet
        tokens = [part[None] if part.ndim == 2 else part for part in cond.tokens]
        return at_least_fp32(self.transformer(inputs, timestep, *tokens))

    def condition(self, blank: Tensor, cond: TextConditioning) -> Tensor:
        """Condition latents and their mask, (B, C + 1, T, y, x), from `blank` zeros; text-to-video leaves it blank."""
        return blank

    def scaling(self) -> tuple[float, float]:
        return 0.0, self.vae.config.scaling_factor

    @cached_property
    def vae(self) -> AutoencoderKLHunyuanVideo15:
        model = allow_batches(super().vae)
        if self.device.type == "cpu":
            return fast_on_cpu(model)
        return fuse_decoder(model) if self.compiled else model

    def why_no_gradient(
        self, name: str, conditions: Sequence[TextConditioning], levels: Sequence[float]
    ) -> str:
        is_glyph = name.startswith("context_embedder_2.")
        if is_glyph and not any(len(cond.glyph) for cond in conditions):
            return "of the glyph embedder wait for a prompt that quotes text"
        return ""
