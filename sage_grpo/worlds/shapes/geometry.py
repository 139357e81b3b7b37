"""Outlines of the world's shapes and letters as smooth pixel coverage with exact derivatives.

A filled shape is an intersection of half-planes, a letter a union of round-ended strokes, a circle a stroke of zero
length. Each primitive's signed distance d (negative inside, in radii) becomes a soft indicator sigmoid(-4 R d), with R
the radius in pixels: slope 1 per pixel at the edge, like area coverage. Products of indicators combine the primitives,
which keeps the coverage smooth where a minimum of distances would have kinks.

Shapes: u and v broadcast to (..., H, W): pixel centers relative to the object's center, in radii, v pointing down.
"""

import math
from functools import reduce
from operator import add, mul

import torch
from torch import Tensor

THICKNESS = 0.22  # half the stroke width of a letter, in radii
SHARPNESS = 4.0  # slope of sigmoid(-4 d) at d = 0 is 1

_SLANT = 1 / math.sqrt(5)
_PLANES: dict[str, tuple[tuple[float, float, float], ...]] = {  # a u + b v <= c, with a^2 + b^2 = 1
    "square": ((1, 0, 0.88), (-1, 0, 0.88), (0, 1, 0.88), (0, -1, 0.88)),
    "triangle": ((0, 1, 0.95), (2 * _SLANT, -_SLANT, _SLANT), (-2 * _SLANT, -_SLANT, _SLANT)),
}
_STROKES: dict[str, tuple[tuple[float, float, float, float], ...]] = {  # from (u, v) to (u, v)
    "circle": ((0, 0, 0, 0),),
    "L": ((-0.5, -0.78, -0.5, 0.78), (-0.5, 0.78, 0.65, 0.78)),
    "T": ((-0.75, -0.78, 0.75, -0.78), (0, -0.78, 0, 0.78)),
    "X": ((-0.68, -0.78, 0.68, 0.78), (0.68, -0.78, -0.68, 0.78)),
    "H": ((-0.62, -0.78, -0.62, 0.78), (0.62, -0.78, 0.62, 0.78), (-0.62, 0, 0.62, 0)),
}
Primitive = tuple[
    Tensor, Tensor | float, Tensor | float
]  # signed distance in radii, and its gradient in u and v
NAMES = ("circle", "square", "triangle", "L", "T", "X", "H")


def _combine(u: Tensor, v: Tensor, a: float, b: float) -> Tensor:
    """a u + b v, kept one-dimensional if a coefficient is zero: most planes and strokes are axis-aligned."""
    if a and b:
        return a * u + b * v
    return a * u if a else b * v


def _stroke(
    u: Tensor, v: Tensor, u0: float, v0: float, u1: float, v1: float, half: float
) -> Primitive:
    """Signed distance to a round-ended stroke, and its gradient; smoothed at the axis, where a norm has a kink."""
    du, dv, soft = u1 - u0, v1 - v0, 0.0025
    u, v = u - u0, v - v0
    if du or dv:
        along = (_combine(u, v, du, dv) / (du * du + dv * dv)).clamp(0, 1)
        u, v = (u - along * du if du else u), (v - along * dv if dv else v)
    distance = (u.square() + v.square() + soft).sqrt()
    return distance - math.sqrt(half * half + soft), u / distance, v / distance


def _primitives(shape: int, u: Tensor, v: Tensor) -> tuple[list[Primitive], bool]:
    """(distance, d/du, d/dv) of each primitive, and whether they combine by union (else by intersection)."""
    name = NAMES[shape]
    if name in _PLANES:
        return [(_combine(u, v, a, b) - c, a, b) for a, b, c in _PLANES[name]], False
    half = 1.0 if name == "circle" else THICKNESS
    return [_stroke(u, v, *stroke, half) for stroke in _STROKES[name]], True


def coverage(shape: int, u: Tensor, v: Tensor, pixels: Tensor) -> Tensor:
    """Covered fraction of each pixel, (..., H, W) in [0,1]; `pixels` is the radius in pixels, broadcast to u and v."""
    parts, union = _primitives(shape, u, v)
    sign = SHARPNESS if union else -SHARPNESS
    product = reduce(mul, [torch.sigmoid(sign * pixels * d) for d, _, _ in parts])
    return 1 - product if union else product


def coverage_slopes(
    shape: int, u: Tensor, v: Tensor, pixels: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Coverage and its derivatives with respect to the object's center (column, row) and radius, all in pixels.

    With P the product of indicators s_i = sigmoid(k R d_i): dP/d(k R d_i) = P (1 - s_i). The radius enters twice,
    through R itself and through u = (column - center) / R.
    """
    parts, union = _primitives(shape, u, v)
    gain = (SHARPNESS if union else -SHARPNESS) * pixels
    factors = [torch.sigmoid(gain * d) for d, _, _ in parts]
    product = reduce(mul, factors)
    terms = [
        [(1 - factor) * value for value in part]
        for factor, part in zip(factors, parts, strict=True)
    ]
    by_d, by_u, by_v = (reduce(add, column) for column in zip(*terms, strict=True))
    slope = SHARPNESS * product  # same sign for both: the union is 1 - P of the mirrored distances
    return (
        (1 - product if union else product),
        slope * by_u,
        slope * by_v,
        slope * (u * by_u + v * by_v - by_d),
    )
