"""Lets the stock HunyuanVideo-1.5 VAE take a batch of clips."""

import torch
from diffusers import AutoencoderKLHunyuanVideo15
from diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15 import HunyuanVideo15AttnBlock
from torch import Tensor


def causal_frame_mask(
    n_frame: int, n_hw: int, dtype: torch.dtype, device: torch.device, batch_size: int | None = None
) -> Tensor:
    """Additive mask (1, 1, S, S), S = n_frame * n_hw: a token sees its own frame and the frames before it.

    Same signature as the method it replaces; one mask serves any batch and head, so `batch_size` is not needed.
    """
    frame = torch.arange(n_frame, device=device).repeat_interleave(n_hw)
    hidden = frame[None, :] > frame[:, None]
    return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill(hidden, float("-inf"))[None, None]


def allow_batches(vae: AutoencoderKLHunyuanVideo15) -> AutoencoderKLHunyuanVideo15:
    """Repair the attention mask in place: the stock one lacks the head axis, so any batch above 1 fails."""
    for module in vae.modules():
        if isinstance(module, HunyuanVideo15AttnBlock):
            module.prepare_causal_attention_mask = causal_frame_mask
    return vae
