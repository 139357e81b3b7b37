"""Softmax attention without a mask, using the device's best kernel.

On Hopper that is cuDNN through SDPA, which processes keys in tiles of 128 and is 8 % slower if the last tile is not
full. So the keys of a long sequence are split: full tiles go to that kernel, the remainder to a custom one (join.py),
and the two results are merged exactly by their normalizers, as flash attention merges its tiles.

Shapes: B clips, H heads of E, S tokens, R remainder keys.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sage_grpo.models.join import add_keys, triton
from sage_grpo.parallel.ulysses import Attend

TILE = 128
LONG = 32768  # tokens from which splitting the keys pays off, whatever the remainder
aten = torch.ops.aten


def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """(B, S, H, E) each -> (B, S, H, E)."""
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (query, key, value))).transpose(1, 2)


def tiled_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention for kernels that prefer full tiles of keys, (B, S, H, E) each -> (B, S, H, E)."""
    if key.shape[1] < LONG or key.shape[1] % TILE == 0:
        return attention(query, key, value)
    return parted_attention(query, key, value)


def parted_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention with the keys split in two; needs at least one full tile and a remainder."""
    return _parted(query, key, value)[0]


def best_attention(x: Tensor) -> Attend:
    """The faster of `attention` and `tiled_attention` for the device and dtype of `x`."""
    half = x.dtype in (torch.bfloat16, torch.float16)
    hopper = x.is_cuda and torch.cuda.get_device_capability(x.device)[0] == 9
    return tiled_attention if half and hopper and triton else attention


# A custom operator, which the compiler treats as opaque: from these lines, torch 2.11 generated a kernel that read
# out of bounds.
@torch.library.custom_op("sage_grpo::parted_attention", mutates_args=())
def _parted(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """(B, S, H, E) each -> output (B, S, H, E) and log of the softmax denominator (B, H, S)."""
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    full = key.shape[2] // TILE * TILE
    out, normalizer = _kernel(query, key[:, :, :full], value[:, :, :full])
    add = add_keys if query.is_cuda else _add_keys
    out, total = add(query, key[:, :, full:], value[:, :, full:], out, normalizer)
    return out.to(query.dtype).transpose(1, 2).contiguous(), total.contiguous()


def _add_keys(query: Tensor, key: Tensor, value: Tensor, out: Tensor, normalizer: Tensor) -> tuple[Tensor, Tensor]:
    """Reference implementation of `add_keys` in join.py, in plain matmuls."""
    scores = query @ key.mT * query.shape[-1] ** -0.5  # (B, H, S, R)
    total = torch.logaddexp(normalizer, scores.logsumexp(-1))
    weights = (scores - total[..., None]).exp()
    return out * (normalizer - total).exp()[..., None] + weights @ value, total


@_parted.register_fake
def _(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    batch, tokens, heads, _ = query.shape
    wide = torch.promote_types(query.dtype, torch.float32)
    return query.new_empty(query.shape), query.new_empty(batch, heads, tokens, dtype=wide)


@torch.library.custom_op("sage_grpo::parted_attention_backward", mutates_args=())
def _parted_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, total: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, (B, S, H, E) each."""
    gradient, query, key, value, out = (x.transpose(1, 2) for x in (gradient, query, key, value, out))
    full, scale = key.shape[2] // TILE * TILE, query.shape[-1] ** -0.5
    d_query, d_key, d_value = _kernel_backward(gradient, query, key[:, :, :full], value[:, :, :full], out, total)
    weights = (_products(query, key[:, :, full:].mT) * scale - total[..., None]).exp()
    d_weights = _products(gradient, value[:, :, full:].mT)
    mean = (gradient.to(total.dtype) * out).sum(-1, keepdim=True)
    d_scores = (scale * weights * (d_weights - mean)).to(query.dtype)
    d_query = (d_query + _products(d_scores, key[:, :, full:])).to(query.dtype)
    d_key = torch.cat([d_key, _products(d_scores.mT, query).to(key.dtype)], 2)
    d_value = torch.cat([d_value, _products(weights.to(value.dtype).mT, gradient).to(value.dtype)], 2)
    return tuple(x.transpose(1, 2).contiguous() for x in (d_query, d_key, d_value))


@_parted_backward.register_fake
def _(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (query, key, value))


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)
    ctx.mark_non_differentiable(output[1])


_parted.register_autograd(lambda ctx, out, _: _parted_backward(out, *ctx.saved_tensors), setup_context=_keep)
KERNELS = ("cudnn_attention", "flash_attention", "efficient_attention", "flash_attention_for_cpu")
# operators whose outputs selective checkpointing keeps: attention
KEPT = {getattr(aten, f"_scaled_dot_product_{name}").default for name in KERNELS}
KEPT.add(torch.ops.sage_grpo.parted_attention.default)


def _products(a: Tensor, b: Tensor) -> Tensor:
    """a @ b for half-precision tensors (B, H, ., .), with fp32 accumulation and result."""
    if a.dtype in (torch.float32, torch.float64):
        return a @ b
    return torch.bmm(a.flatten(0, 1), b.flatten(0, 1), out_dtype=torch.float32).unflatten(0, a.shape[:2])


def _kernel(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Output (B, H, S, E) and log of the softmax denominator (B, H, S)."""
    if not query.is_cuda:
        return aten._scaled_dot_product_flash_attention_for_cpu(query, key, value)
    out, normalizer, *_ = aten._scaled_dot_product_cudnn_attention(query, key, value, None, True)
    return out, normalizer.reshape(out.shape[:3])


def _kernel_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, total: Tensor
) -> tuple[Tensor, ...]:
    """Gradients of query, key and value, given the output and the denominator over ALL keys."""
    if not query.is_cuda:
        args = (gradient, query, key, value, out, total, 0.0, False)
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(*args)
    no_dropout = torch.zeros((), dtype=torch.int64, device=query.device)
    return aten._scaled_dot_product_cudnn_attention_backward(
        gradient, query, key, value, out, total[..., None], no_dropout, no_dropout, None, None, None,
        query.shape[2], key.shape[2], 0.0, False,
    )  # fmt: skip
