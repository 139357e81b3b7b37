"""Stock diffusers' transformers, adapted to this package's LoRA and optimizer."""

import torch
from diffusers import HunyuanVideo15Transformer3DModel, WanTransformer3DModel

from sage_grpo.models.denoiser import Denoiser
from sage_grpo.models.hunyuan15.transformer import PackedTransformer


class StockTransformer(HunyuanVideo15Transformer3DModel, Denoiser):
    """The stock model with its stock forward; only the description of its layers is ours."""

    unseen = PackedTransformer.unseen
    never_trained = PackedTransformer.never_trained


class StockImageTransformer(StockTransformer):
    """The stock model of image to video."""

    unseen = ()


class StockWan(WanTransformer3DModel, Denoiser):
    """The stock Wan 2.1 with its stock forward."""

    block_list = "blocks"

    def with_tables(self, device: torch.device) -> "StockWan":
        """Make rotary tables on a device; a model made on the meta device has none."""
        c = self.config
        with torch.device("cpu"):
            tables = type(self.rope)(c.attention_head_dim, c.patch_size, c.rope_max_seq_len)
        self.rope = tables.to(device)
        return self
