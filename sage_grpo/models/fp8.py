"""Linear layers in 8 bits, for forwards on which no log-probability depends.

Both factors of a product are rounded to 8-bit floats with one scale per row, which the tensor cores of recent GPUs
multiply at twice the rate of bf16; elsewhere the same rounding runs in full precision. Weights are rounded when used,
so that sharded and trained ones work as well.

Shapes: S tokens, I and O features.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FORMAT = torch.float8_e4m3fn
MAX_VALUE = torch.finfo(FORMAT).max
CAPABILITY = (8, 9)  # the first that multiplies 8-bit floats
MULTIPLE = 16  # both sizes of a weight must be a multiple of this, for the tensor cores


class Switch:
    """The context in which the linear layers of blocks run in 8 bits; those of adapters are small and stay exact."""

    on = False

    def __init__(self, blocks: nn.Module) -> None:
        for name, layer in blocks.named_modules():
            if not isinstance(layer, nn.Linear) or "lora_" in name:
                continue
            if all(size % MULTIPLE == 0 for size in layer.weight.shape):
                layer.__class__ = Linear
                layer.switch = self

    def __enter__(self) -> None:
        self.on = True

    def __exit__(self, *_: object) -> None:
        self.on = False


class Linear(nn.Linear):
    """A linear layer that a switch can turn to 8 bits.

    It is a class, not a function per layer, so that blocks whose layers are alike share one compiled graph.
    """

    switch: Switch

    def forward(self, x: Tensor) -> Tensor:
        compute = linear if self.switch.on else F.linear
        return compute(x, self.weight, self.bias)


def check(device: torch.device) -> None:
    """Reject a GPU that is too old."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < CAPABILITY:
        raise ValueError(
            "outside_window is fp8, but this GPU cannot multiply 8-bit floats: set outside_window exact"
        )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(..., I) -> (..., O) for a weight (O, I), like F.linear."""
    tokens, token_scale = rounded(x.flatten(0, -2))
    rows, row_scale = rounded(weight)
    if x.is_cuda and x.dtype == torch.bfloat16:
        out = torch._scaled_mm(
            tokens, rows.T, token_scale, row_scale.T, bias, out_dtype=x.dtype, use_fast_accum=True
        )
    else:
        out = F.linear(tokens.to(x) * token_scale.to(x), rows.to(x) * row_scale.to(x), bias)
    return out.unflatten(0, x.shape[:-1])


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows (S, I) in 8 bits and their scales (S, 1) in fp32, whose product is x up to rounding."""
    scale = (x.abs().amax(1, keepdim=True).float() / MAX_VALUE).clamp_min(1e-12)
    return (x / scale).to(FORMAT), scale
