"""Softmax attention without a mask, using the device's best kernel.

On Hopper that is cuDNN through SDPA, which processes keys in tiles of 128 and is 8 % slower if the last tile is not
full. So the keys of a long sequence are split: full tiles go to that kernel, the remainder to a custom one,
and the two results are merged exactly by their normalizers, as flash attention merges its tiles.

Shapes: B clips, H heads of E, S tokens, R remainder keys.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sage_grpo.parallel.ulysses import Attend

try:  # ships with torch for CUDA
    import triton
    import triton.language as tl
except ImportError:
    triton = None

TILE = 128  # keys
ROWS = 64  # queries per program of the custom kernel
LONG = 32768  # tokens from which splitting the keys pays off, whatever the remainder
aten = torch.ops.aten


def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """(B, S, H, E) each -> (B, S, H, E)."""
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    return F.scaled_dot_product_attention(query, key, value).transpose(1, 2)


def tiled_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention for kernels that prefer full tiles of keys, (B, S, H, E) each -> (B, S, H, E)."""
    if key.shape[1] < LONG or key.shape[1] % TILE == 0:
        return attention(query, key, value)
    return parted_attention(query, key, value)[0]


def best_attention(x: Tensor) -> Attend:
    """The faster of `attention` and `tiled_attention` for the device and dtype of `x`."""
    is_half = x.dtype in (torch.bfloat16, torch.float16)
    is_hopper = x.is_cuda and torch.cuda.get_device_capability(x.device)[0] == 9
    return tiled_attention if is_half and is_hopper and triton else attention


# A custom operator, which the compiler treats as opaque: from these lines, torch 2.11 generated a kernel that read
# out of bounds.
@torch.library.custom_op("sage_grpo::parted_attention", mutates_args=())
def parted_attention(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Attention with the keys split in two; needs at least one full tile and a remainder.

    (B, S, H, E) each -> output (B, S, H, E) and log of the softmax denominator (B, H, S).
    """
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    full = key.shape[2] // TILE * TILE  # keys in full tiles

    out, normalizer = _kernel(query, key[:, :, :full], value[:, :, :full])
    out, total = _add_keys(query, key[:, :, full:], value[:, :, full:], out, normalizer)
    return out.to(query.dtype).transpose(1, 2).contiguous(), total.contiguous()


@parted_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    batch, tokens, heads, _ = query.shape
    wide = torch.promote_types(query.dtype, torch.float32)
    return query.new_empty(query.shape), query.new_empty(batch, heads, tokens, dtype=wide)


@torch.library.custom_op("sage_grpo::parted_attention_backward", mutates_args=())
def _parted_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, total: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, (B, S, H, E) each."""
    gradient, query, key, value, out = (
        x.transpose(1, 2) for x in (gradient, query, key, value, out)
    )
    full = key.shape[2] // TILE * TILE  # keys in full tiles
    last_keys = key[:, :, full:]
    last_values = value[:, :, full:]
    scale = query.shape[-1] ** -0.5

    # full tiles: the kernel's backward, with the denominator over all keys
    d_query, d_key, d_value = _kernel_backward(
        gradient, query, key[:, :, :full], value[:, :, :full], out, total
    )

    # the remainder: softmax weights (B, H, S, R) and their gradients
    weights = (_products(query, last_keys.mT) * scale - total[..., None]).exp()
    d_weights = _products(gradient, last_values.mT)
    mean = (gradient.to(total.dtype) * out).sum(-1, keepdim=True)
    d_scores = (scale * weights * (d_weights - mean)).to(query.dtype)
    d_last_keys = _products(d_scores.mT, query).to(key.dtype)
    d_last_values = _products(weights.to(value.dtype).mT, gradient).to(value.dtype)

    d_query = (d_query + _products(d_scores, last_keys)).to(query.dtype)
    d_key = torch.cat([d_key, d_last_keys], 2)
    d_value = torch.cat([d_value, d_last_values], 2)
    return tuple(x.transpose(1, 2).contiguous() for x in (d_query, d_key, d_value))


@_parted_backward.register_fake
def _(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *others: Tensor
) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (query, key, value))


def _save_for_backward(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    _, total = output
    ctx.save_for_backward(*inputs, *output)
    ctx.mark_non_differentiable(total)


parted_attention.register_autograd(
    lambda ctx, d_out, _: _parted_backward(d_out, *ctx.saved_tensors),
    setup_context=_save_for_backward,
)

# The operators of attention, whose outputs selective checkpointing keeps.
KEPT = [
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.sage_grpo.parted_attention.default,
]


def _products(a: Tensor, b: Tensor) -> Tensor:
    """a @ b for half-precision tensors (B, H, ., .), with fp32 accumulation and result."""
    products = torch.bmm(a.flatten(0, 1), b.flatten(0, 1), out_dtype=torch.float32)
    return products.unflatten(0, a.shape[:2])


def _kernel(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Output (B, H, S, E) and log of the softmax denominator (B, H, S)."""
    out, normalizer, *_ = aten._scaled_dot_product_cudnn_attention(query, key, value, None, True)
    return out, normalizer.reshape(out.shape[:3])


def _kernel_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, total: Tensor
) -> tuple[Tensor, ...]:
    """Gradients of query, key and value, given the output and the denominator over ALL keys."""
    no_dropout = torch.zeros((), dtype=torch.int64, device=query.device)
    return aten._scaled_dot_product_cudnn_attention_backward(
        gradient, query, key, value, out, total[..., None], no_dropout, no_dropout, None, None, None,
        query.shape[2], key.shape[2], 0.0, False,
    )  # fmt: skip


def _add_keys(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, normalizer: Tensor
) -> tuple[Tensor, Tensor]:
    """Output (B, H, S, E) and log-denominator (B, H, S) over all keys, given those over the keys before these R.

    One pass over queries and output, for R of at most 128. `out` is overwritten; `normalizer` is fp32.
    """
    batch, heads, rows, width = query.shape
    extra = key.shape[2]
    query, key, value = (x if x.stride(3) == 1 else x.contiguous() for x in (query, key, value))
    normalizer = normalizer.contiguous()
    total = torch.empty_like(normalizer)

    grid = (triton.cdiv(rows, ROWS), batch * heads)
    _add_keys_kernel[grid](
        query, key, value, out, normalizer, total,
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *out.stride()[:3],
        heads, rows, extra, width**-0.5, width, ROWS, max(16, triton.next_power_of_2(extra)),
    )  # fmt: skip
    return out, total


if triton is not None:
    # A program handles ROWS queries of one (clip, head). Strides are named after tensor and axis: qb is that of the
    # query's batch, then h for heads and s for the sequence.
    @triton.jit
    def _add_keys_kernel(
        query, key, value, out, normalizer, total,
        qb, qh, qs, kb, kh, ks, vb, vh, vs, ob, oh, os,
        heads, rows, extra, scale, width: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    ):  # fmt: skip
        pair = tl.program_id(1).to(tl.int64)  # index of (clip, head)
        b = pair // heads
        h = pair % heads
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64)
        column = tl.arange(0, COLUMNS)
        feature = tl.arange(0, width)
        row_mask = row < rows
        column_mask = column < extra

        query_at = query + b * qb + h * qh + row[:, None] * qs + feature
        key_at = key + b * kb + h * kh + column[:, None] * ks + feature
        value_at = value + b * vb + h * vh + column[:, None] * vs + feature
        out_at = out + b * ob + h * oh + row[:, None] * os + feature
        q = tl.load(query_at, mask=row_mask[:, None], other=0.0)
        k = tl.load(key_at, mask=column_mask[:, None], other=0.0)
        v = tl.load(value_at, mask=column_mask[:, None], other=0.0)
        before = tl.load(out_at, mask=row_mask[:, None], other=0.0).to(tl.float32)
        known = tl.load(normalizer + pair * rows + row, mask=row_mask, other=0.0)

        # merge the softmax over these keys with the one before, both relative to the larger maximum
        scores = tl.where(column_mask, tl.dot(q, tl.trans(k)) * scale, -float("inf"))
        top = tl.maximum(known, tl.max(scores, 1))
        weights = tl.exp(scores - top[:, None])
        old = tl.exp(known - top)
        denominator = old + tl.sum(weights, 1)
        after = before * old[:, None] + tl.dot(weights.to(v.dtype), v)

        tl.store(out_at, (after / denominator[:, None]).to(q.dtype), mask=row_mask[:, None])
        tl.store(total + pair * rows + row, top + tl.log(denominator), mask=row_mask)
