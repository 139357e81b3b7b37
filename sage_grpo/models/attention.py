"""Softmax attention without a mask, by the best kernel of the device.

On Hopper that is cuDNN's through SDPA, which takes keys in tiles of 128 and is 8 % slower where the last tile is not
full. So the keys of a long sequence are parted: the full tiles go to the kernel, the few that are left over to plain
products, and the two results are joined exactly by their normalisers, as flash attention joins its tiles.

Shapes: B clips, H heads of E, S tokens, of which R keys are left over.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sage_grpo.parallel.ulysses import Attend

TILE = 128
LONG = 32768  # tokens from which parting the keys pays, whatever is left over
aten = torch.ops.aten
KEPT = {  # attention kernels whose result selective checkpointing keeps
    getattr(aten, f"_scaled_dot_product_{name}").default
    for name in ("cudnn_attention", "flash_attention", "efficient_attention", "flash_attention_for_cpu")
}


def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """(B, S, H, E) each -> (B, S, H, E)."""
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (query, key, value))).transpose(1, 2)


def tiled_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The same for kernels that like full tiles of keys."""
    if key.shape[1] < LONG or key.shape[1] % TILE == 0:
        return attention(query, key, value)
    return parted_attention(query, key, value)


def parted_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The same in two parts; needs a full tile and something left over."""
    return _Parted.apply(*(x.transpose(1, 2) for x in (query, key, value))).transpose(1, 2)


def best_attention(x: Tensor) -> Attend:
    """The one of the two that is faster on the device and in the precision of `x`."""
    half = x.dtype in (torch.bfloat16, torch.float16)
    return tiled_attention if x.is_cuda and half and torch.cuda.get_device_capability(x.device)[0] == 9 else attention


class _Parted(torch.autograd.Function):
    """(B, H, S, E) each -> (B, H, S, E)."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        full = key.shape[2] // TILE * TILE
        out, normaliser, *state = _kernel(query, key[:, :, :full], value[:, :, :full])
        scores = _products(query, key[:, :, full:].mT) * query.shape[-1] ** -0.5  # (B, H, S, R)
        rest = scores.logsumexp(-1)
        total = torch.logaddexp(normaliser, rest)
        weights = (scores - total[..., None]).exp().to(query.dtype)
        tail = _products(weights, value[:, :, full:])
        out = (out * (normaliser - total).exp()[..., None] + tail).to(query.dtype)
        ctx.save_for_backward(query, key, value, out, total, *state)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, out, total, *state = ctx.saved_tensors
        full, scale = key.shape[2] // TILE * TILE, query.shape[-1] ** -0.5
        parted = (query, key[:, :, :full], value[:, :, :full], out, total)
        d_query, d_key, d_value = _kernel_backward(gradient, *parted, state)
        weights = (_products(query, key[:, :, full:].mT) * scale - total[..., None]).exp()
        d_weights = _products(gradient, value[:, :, full:].mT)
        mean = (gradient.to(total.dtype) * out).sum(-1, keepdim=True)
        d_scores = (scale * weights * (d_weights - mean)).to(query.dtype)
        d_query = d_query + _products(d_scores, key[:, :, full:])
        d_key = torch.cat([d_key, _products(d_scores.mT, query).to(key.dtype)], 2)
        d_value = torch.cat([d_value, _products(weights.to(value.dtype).mT, gradient).to(value.dtype)], 2)
        return d_query.to(query.dtype), d_key, d_value


def _products(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of half-precision tensors (B, H, ., .), with sums and result in fp32."""
    if a.dtype in (torch.float32, torch.float64):
        return a @ b
    return torch.bmm(a.flatten(0, 1), b.flatten(0, 1), out_dtype=torch.float32).unflatten(0, a.shape[:2])


def _kernel(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """Output (B, H, S, E), log of the softmax's denominator (B, H, S), and what the backward pass wants beside them."""
    if not query.is_cuda:
        return aten._scaled_dot_product_flash_attention_for_cpu(query, key, value)
    out, normaliser, _, _, _, _, seed, offset, _ = aten._scaled_dot_product_cudnn_attention(
        query, key, value, None, True
    )
    return out, normaliser.reshape(out.shape[:3]), seed, offset


def _kernel_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, total: Tensor, state: list[Tensor]
) -> tuple[Tensor, ...]:
    """Gradients of query, key and value, given the output and the denominator over ALL keys."""
    if not query.is_cuda:
        args = (gradient, query, key, value, out, total, 0.0, False)
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(*args)
    seed, offset = state
    return aten._scaled_dot_product_cudnn_attention_backward(
        gradient, query, key, value, out, total[..., None], seed, offset, None, None, None,
        query.shape[2], key.shape[2], 0.0, False,
    )  # fmt: skip
