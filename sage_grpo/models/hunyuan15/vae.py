"""Adapts the stock HunyuanVideo-1.5 VAE in place: it accepts a batch of clips, and is fast on every CPU."""

from functools import partial

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLHunyuanVideo15
from diffusers.models.autoencoders import autoencoder_kl_hunyuanvideo15 as stock
from torch import Tensor

HALVES = (torch.float16, torch.bfloat16)


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
        if isinstance(module, stock.HunyuanVideo15AttnBlock):
            module.prepare_causal_attention_mask = causal_frame_mask
    return vae


def causal_convolution(layer: stock.HunyuanVideo15CausalConv3d, x: Tensor) -> Tensor:
    """The layer's forward as one 2-D convolution, in which each frame has the frames before it as further channels.

    torch has fast 2-D convolutions for every CPU, but 3-D ones for x86_64 alone. In half precision the fast ones sum in
    half precision too, and are not used.
    """
    padded, depth = F.pad(x, layer.time_causal_padding, mode=layer.pad_mode), layer.conv.kernel_size[0]
    if x.dtype in HALVES:
        return layer.conv(padded)
    frames = padded.transpose(1, 2)
    seen = torch.cat([frames[:, i : i + x.shape[2]] for i in range(depth)], dim=2).flatten(0, 1)
    found = F.conv2d(seen, layer.conv.weight.transpose(1, 2).flatten(1, 2), layer.conv.bias)
    return found.unflatten(0, (len(x), -1)).transpose(1, 2)


def normalize(layer: stock.HunyuanVideo15RMS_norm, x: Tensor) -> Tensor:
    """The layer's forward without torch's norm over a dimension that is not the last, which is slow on a CPU."""
    if x.dtype in HALVES:
        return type(layer).forward(layer, x)
    length = x.square().sum(1 if layer.channel_first else -1, keepdim=True).sqrt().clamp_min(1e-12)
    return x / length * layer.scale * layer.gamma + layer.bias


def fast_on_cpu(vae: AutoencoderKLHunyuanVideo15) -> AutoencoderKLHunyuanVideo15:
    """Replace the forward of all norms and causal convolutions; none of these has a stride."""
    replaced = {stock.HunyuanVideo15CausalConv3d: causal_convolution, stock.HunyuanVideo15RMS_norm: normalize}
    for module in vae.modules():
        if type(module) in replaced:
            module.forward = partial(replaced[type(module)], module)
    return vae
