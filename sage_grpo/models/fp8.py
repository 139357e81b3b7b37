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
LARGEST = torch.finfo(FORMAT).max
CAPABILITY = (8, 9)  # the first that multiplies them
MULTIPLE = 16  # of both sizes of a weight, for the tensor cores


class Switch:
    """The context in which the linear layers of blocks run in 8 bits; those of adapters are small and stay exact."""

    on = False

    def __init__(self, blocks: nn.Module) -> None:
        for name, layer in blocks.named_modules():
            fits = isinstance(layer, nn.Linear) and not any(
                n % MULTIPLE for n in layer.weight.shape
            )
            if fits and "lora_" not in name:
                layer.__class__, layer.switch = Linear, self

    def __enter__(self) -> None:
        self.on = True

    def __exit__(self, *_: object) -> None:
        self.on = False


class Linear(nn.Linear):
    """A class, not a function for each layer: blocks whose layers are alike share one compiled graph."""

    switch: Switch

    def forward(self, x: Tensor) -> Tensor:
        return (linear if self.switch.on else F.linear)(x, self.weight, self.bias)


def check(device: torch.device) -> None:
    """Reject a GPU that is too old."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < CAPABILITY:
        raise ValueError(
            "outside_window is fp8, but this GPU cannot multiply 8-bit floats: set outside_window exact"
        )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(..., I) -> (..., O) for a weight (O, I), like F.linear."""
    (tokens, per_token), (rows, per_row) = rounded(x.flatten(0, -2)), rounded(weight)
    if x.is_cuda and x.dtype == torch.bfloat16:
        found = torch._scaled_mm(
            tokens, rows.T, per_token, per_row.T, bias, out_dtype=x.dtype, use_fast_accum=True
        )
    else:
        found = F.linear(tokens.to(x) * per_token.to(x), rows.to(x) * per_row.to(x), bias)
    return found.unflatten(0, x.shape[:-1])


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows (S, I) in 8 bits and their scales (S, 1) in fp32; times these they are x, nearly."""
    scale = (x.abs().amax(1, keepdim=True).float() / LARGEST).clamp_min(1e-12)
    return (x / scale).to(FORMAT), scale
