"""A kernel that adds a few more keys to finished attention: one pass over queries and output.

Triton ships with torch for CUDA; elsewhere this module can be imported but not used.
"""

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

ROWS = 64  # queries per program


def add_keys(query: Tensor, key: Tensor, value: Tensor, out: Tensor, normalizer: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log-denominator over all keys, given those over the keys before these R.

    query (B, H, S, E), key and value (B, H, R, E) with R at most 128, out (B, H, S, E), which is overwritten, and
    normalizer (B, H, S), fp32.
    """
    (batch, heads, rows, width), extra = query.shape, key.shape[2]
    query, key, value = (x if x.stride(3) == 1 else x.contiguous() for x in (query, key, value))
    normalizer, total = normalizer.contiguous(), torch.empty_like(normalizer, memory_format=torch.contiguous_format)
    strides = [x.stride()[:3] for x in (query, key, value, out)]
    columns = max(16, triton.next_power_of_2(extra))
    _add_keys[triton.cdiv(rows, ROWS), batch * heads](
        query, key, value, out, normalizer, total, *(n for three in strides for n in three),
        heads, rows, extra, width**-0.5, width, ROWS, columns,
    )  # fmt: skip
    return out, total


if triton is not None:

    @triton.jit
    def _add_keys(
        query, key, value, out, normalizer, total, qb, qh, qs, kb, kh, ks, vb, vh, vs, ob, oh, os,
        heads, rows, extra, scale, width: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    ):  # fmt: skip
        pair = tl.program_id(1).to(tl.int64)  # index of (clip, head)
        b, h = pair // heads, pair % heads
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64)
        column, feature = tl.arange(0, COLUMNS), tl.arange(0, width)
        here, there = row < rows, column < extra
        q = tl.load(query + b * qb + h * qh + row[:, None] * qs + feature, mask=here[:, None], other=0.0)
        k = tl.load(key + b * kb + h * kh + column[:, None] * ks + feature, mask=there[:, None], other=0.0)
        v = tl.load(value + b * vb + h * vh + column[:, None] * vs + feature, mask=there[:, None], other=0.0)
        place = out + b * ob + h * oh + row[:, None] * os + feature
        before = tl.load(place, mask=here[:, None], other=0.0).to(tl.float32)
        known = tl.load(normalizer + pair * rows + row, mask=here, other=0.0)
        scores = tl.where(there, tl.dot(q, tl.trans(k)) * scale, -float("inf"))
        top = tl.maximum(known, tl.max(scores, 1))
        weights, old = tl.exp(scores - top[:, None]), tl.exp(known - top)
        denominator = old + tl.sum(weights, 1)
        after = before * old[:, None] + tl.dot(weights.to(v.dtype), v)
        tl.store(place, (after / denominator[:, None]).to(q.dtype), mask=here[:, None])
        tl.store(total + pair * rows + row, top + tl.log(denominator), mask=here)
