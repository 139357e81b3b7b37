"""Stock diffusers' transformer, adapted to this package's LoRA and optimizer."""

from diffusers import HunyuanVideo15Transformer3DModel

from sage_grpo.models.denoiser import Denoiser
from sage_grpo.models.hunyuan15.transformer import PackedTransformer


class StockTransformer(HunyuanVideo15Transformer3DModel, Denoiser):
    """The stock model with its stock forward; only the description of its layers is ours."""

    never_trained = PackedTransformer.never_trained
