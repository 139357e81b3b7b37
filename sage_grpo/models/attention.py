"""Softmax attention without a mask, by the best kernel of the device.

On Hopper that is cuDNN's through SDPA, which takes keys in tiles of 128 and is 8 % slower where the last tile is not
full. So the keys of a long sequence are parted: the full tiles go to the kernel, the few that are left over to one of
our own (join.py), and the two results are joined exactly by their normalisers, as flash attention joins its tiles.

Shapes: B clips, H heads of E, S tokens, of which R keys are left over.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sage_grpo.models.join import add_keys, triton
from sage_grpo.parallel.ulysses import Attend

TILE = 128
LONG = 32768  # tokens from which parting the keys pays, whatever is left over
aten = torch.ops.aten


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
    return _parted(query, key, value)[0]


def best_attention(x: Tensor) -> Attend:
    """The one of the two that is faster on the device and in the precision of `x`."""
    half = x.dtype in (torch.bfloat16, torch.float16)
    hopper = x.is_cuda and torch.cuda.get_device_capability(x.device)[0] == 9
    return tiled_attention if half and hopper and triton else attention


# An operator of its own, which the compiler leaves as it is: given these lines, torch 2.11 wrote a kernel that read
# beyond its memory.
@torch.library.custom_op("sage_grpo::parted_attention", mutates_args=())
def _parted(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """(B, S, H, E) each -> output (B, S, H, E) and the log of the softmax's denominator (B, H, S)."""
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    full = key.shape[2] // TILE * TILE
    out, normaliser = _kernel(query, key[:, :, :full], value[:, :, :full])
    add = add_keys if query.is_cuda else _add_keys
    out, total = add(query, key[:, :, full:], value[:, :, full:], out, normaliser)
    return out.to(query.dtype).transpose(1, 2).contiguous(), total.contiguous()


def _add_keys(query: Tensor, key: Tensor, value: Tensor, out: Tensor, normaliser: Tensor) -> tuple[Tensor, Tensor]:
    """What `add_keys` of join.py says, in plain products."""
    scores = query @ key.mT * query.shape[-1] ** -0.5  # (B, H, S, R)
    total = torch.logaddexp(normaliser, scores.logsumexp(-1))
    weights = (scores - total[..., None]).exp()
    return out * (normaliser - total).exp()[..., None] + weights @ value, total


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
def _(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, total: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(x.new_empty(x.shape) for x in (query, key, value))


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Any, gradient: Tensor, _: Tensor | None) -> tuple[Tensor, ...]:
    return _parted_backward(gradient, *ctx.saved_tensors)


_parted.register_autograd(_gradients, setup_context=_keep)
KEPT = {  # what selective checkpointing keeps: the results of attention
    torch.ops.sage_grpo.parted_attention.default,
    *(
        getattr(aten, f"_scaled_dot_product_{name}").default
        for name in ("cudnn_attention", "flash_attention", "efficient_attention", "flash_attention_for_cpu")
    ),
}


def _products(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of half-precision tensors (B, H, ., .), with sums and result in fp32."""
    if a.dtype in (torch.float32, torch.float64):
        return a @ b
    return torch.bmm(a.flatten(0, 1), b.flatten(0, 1), out_dtype=torch.float32).unflatten(0, a.shape[:2])


def _kernel(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Output (B, H, S, E) and the log of the softmax's denominator (B, H, S)."""
    if not query.is_cuda:
        return aten._scaled_dot_product_flash_attention_for_cpu(query, key, value)
    out, normaliser, *_ = aten._scaled_dot_product_cudnn_attention(query, key, value, None, True)
    return out, normaliser.reshape(out.shape[:3])


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
