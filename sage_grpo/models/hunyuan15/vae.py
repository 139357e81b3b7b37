"""Makes the stock HunyuanVideo-1.5 VAE accept a batch of clips."""

import torch
from diffusers import AutoencoderKLHunyuanVideo15
from diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15 import HunyuanVideo15AttnBlock
from torch import Tensor


def causal_frame_mask(
    n_frame: int, n_hw: int, dtype: torch.dtype, device: torch.device, batch_size: int | None = None
) -> Tensor:
    """Additive mask (1, 1, S, S), S = n_frame * n_hw: a token attends to its frame and to earlier frames.

    Same signature as the method it replaces; the mask broadcasts over batch and heads, so `batch_size` is unused.
    """
    frame = torch.arange(n_frame, device=device).repeat_interleave(n_hw)
    hidden = frame[None, :] > frame[:, None]
    return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill(hidden, float("-inf"))[None, None]


def allow_batches(vae: AutoencoderKLHunyuanVideo15) -> AutoencoderKLHunyuanVideo15:
    """Patch the attention mask in place: the stock one lacks the head axis, so any batch larger than 1 fails."""
    for module in vae.modules():
        if isinstance(module, HunyuanVideo15AttnBlock):
            module.prepare_causal_attention_mask = causal_frame_mask
    return vae
