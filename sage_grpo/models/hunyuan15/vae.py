"""Adapts the stock HunyuanVideo-1.5 VAE in place: it accepts batches of clips, and is fast on CPUs and GPUs.

Shapes: x and h are feature maps (B, C, T, Y, X).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLHunyuanVideo15
from diffusers.models.autoencoders import autoencoder_kl_hunyuanvideo15 as stock
from torch import Tensor

from sage_grpo.models.backbone import at_least_fp32

HALVES = (torch.float16, torch.bfloat16)
LAST = {"memory_format": torch.channels_last_3d}  # the layout of the fastest convolutions on GPUs


def causal_frame_mask(
    n_frame: int, n_hw: int, dtype: torch.dtype, device: torch.device, batch_size: int | None = None
) -> Tensor:
    """Additive mask (1, 1, S, S), S = n_frame * n_hw: a token attends to its frame and to earlier frames.

    Same signature as the method it replaces; the mask broadcasts over batch and heads, so `batch_size` is unused.
    """
    frame = torch.arange(n_frame, device=device).repeat_interleave(n_hw)
    is_later = frame[None, :] > frame[:, None]
    mask = torch.zeros(is_later.shape, dtype=dtype, device=device)
    return mask.masked_fill(is_later, float("-inf"))[None, None]


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
    frames = F.pad(x, layer.time_causal_padding, mode=layer.pad_mode)
    if x.dtype in HALVES:
        return layer.conv(frames)

    frames = frames.transpose(1, 2)  # (B, T + depth - 1, C, Y, X)
    depth = layer.conv.kernel_size[0]
    shifted = [frames[:, i : i + x.shape[2]] for i in range(depth)]
    stacked = torch.cat(shifted, dim=2).flatten(0, 1)  # (B * T, depth * C, Y, X)
    weight = layer.conv.weight.transpose(1, 2).flatten(1, 2)
    out = F.conv2d(stacked, weight, layer.conv.bias)
    return out.unflatten(0, (len(x), -1)).transpose(1, 2)


def normalize(layer: stock.HunyuanVideo15RMS_norm, x: Tensor) -> Tensor:
    """The layer's forward without torch's norm over a dimension that is not the last, which is slow on a CPU."""
    if x.dtype in HALVES:
        return type(layer).forward(layer, x)
    dim = 1 if layer.channel_first else -1
    length = x.square().sum(dim, keepdim=True).sqrt().clamp_min(1e-12)
    return x / length * layer.scale * layer.gamma + layer.bias


def fast_on_cpu(vae: AutoencoderKLHunyuanVideo15) -> AutoencoderKLHunyuanVideo15:
    """Replace the forward of all norms and causal convolutions; none of these has a stride."""
    forwards = {
        stock.HunyuanVideo15CausalConv3d: causal_convolution,
        stock.HunyuanVideo15RMS_norm: normalize,
    }
    for module in vae.modules():
        if type(module) in forwards:
            module.forward = partial(forwards[type(module)], module)
    return vae


def padded(x: Tensor, padding: Sequence[int]) -> Tensor:
    return F.pad(x, padding, mode="replicate").contiguous(**LAST)


def activated(
    x: Tensor, bias: Tensor | float, gamma: Tensor, scale: float, padding: Sequence[int]
) -> Tensor:
    """A convolution's input: x with the bias of the layer before, normalized over channels, through SiLU, padded."""
    wide = at_least_fp32(x) + bias
    length = wide.square().sum(1, keepdim=True).sqrt().clamp_min(1e-12)
    return padded(F.silu(wide / length * scale * gamma).to(x.dtype), padding)


def unpacked(x: Tensor, h: Tensor, bias: Tensor, repeats: int, doubles_frames: bool) -> Tensor:
    """Upsampling, given its input x and its convolution's output h: channels become pixels and frames."""
    spread = stock.HunyuanVideo15Upsample._dcae_upsample_rearrange
    h = h + bias
    if not doubles_frames:
        return spread(h + x.repeat_interleave(repeats, 1)).contiguous(**LAST)

    # the first frame stays one frame, so half of its channels are unused
    first, _ = spread(h[:, :, :1]).chunk(2, 1)
    first = first + spread(x[:, :, :1]).repeat_interleave(repeats // 2, 1)
    later = spread(h[:, :, 1:], 2) + spread(x[:, :, 1:], 2).repeat_interleave(repeats, 1)
    return torch.cat([first, later], 2).contiguous(**LAST)


def fuse_decoder(vae: AutoencoderKLHunyuanVideo15) -> AutoencoderKLHunyuanVideo15:
    """Replace the decoder's forwards: everything between two convolutions is compiled into one or two kernels.

    Run eagerly, it takes two thirds of the time. Convolutions stay cuDNN's, without bias, which would be one more pass.
    Tiles stay eager: they come in several sizes, each with graphs of its own, which take longer to compile than they
    save.
    """
    torch._dynamo.config.recompile_limit = 64  # a graph for each size and number of channels

    def fused(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
        compiled = torch.compile(call, dynamic=False)

        def either(*args: Any) -> Tensor:
            return call(*args) if vae.use_tiling else compiled(*args)

        return either

    pad = fused(padded)
    activate = fused(activated)
    unpack = fused(unpacked)
    add = fused(lambda h, bias, x: h + bias + x)

    def bias(layer: stock.HunyuanVideo15CausalConv3d) -> Tensor:
        return layer.conv.bias[:, None, None, None]

    def convolve(
        layer: stock.HunyuanVideo15CausalConv3d,
        norm: stock.HunyuanVideo15RMS_norm,
        x: Tensor,
        previous_bias: Tensor | float,
    ) -> Tensor:
        """Norm, SiLU and convolution without its bias; `previous_bias` is still missing from x."""
        inputs = activate(x, previous_bias, norm.gamma, norm.scale, layer.time_causal_padding)
        return F.conv3d(inputs, layer.conv.weight)

    def residual(block: stock.HunyuanVideo15ResnetBlock, x: Tensor) -> Tensor:
        h = convolve(block.conv1, block.norm1, x, 0.0)
        h = convolve(block.conv2, block.norm2, h, bias(block.conv1))
        shortcut = x if block.conv_shortcut is None else block.conv_shortcut(x)
        return add(h, bias(block.conv2), shortcut)

    def upsample(layer: stock.HunyuanVideo15Upsample, x: Tensor) -> Tensor:
        h = F.conv3d(pad(x, layer.conv.time_causal_padding), layer.conv.conv.weight)
        return unpack(x, h, bias(layer.conv), layer.repeats, bool(layer.add_temporal_upsample))

    forwards = {stock.HunyuanVideo15ResnetBlock: residual, stock.HunyuanVideo15Upsample: upsample}
    for module in vae.decoder.modules():
        if isinstance(module, torch.nn.Conv3d):
            module.to(**LAST)
        if type(module) in forwards:
            module.forward = partial(forwards[type(module)], module)

    # the last convolution does its norm and activation itself
    last = vae.decoder.conv_out
    norm = vae.decoder.norm_out
    last.forward = lambda x: convolve(last, norm, x, 0.0) + bias(last)
    norm.forward = lambda x: x
    vae.decoder.conv_act.forward = lambda x: x
    return vae
