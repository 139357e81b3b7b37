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
from typing import NamedTuple

import torch
from torch import Tensor

THICKNESS = 0.22  # half the stroke width of a letter, in radii
SHARPNESS = 4.0  # sigmoid(-4 d) has slope -1 at d = 0
SOFTENING = 0.0025  # squared radii under the root of a stroke's distance

NAMES = ("circle", "square", "triangle", "L", "T", "X", "H")

_SLANT = 1 / math.sqrt(5)
# half-planes (a, b, c): a u + b v <= c, with a^2 + b^2 = 1
_PLANES: dict[str, tuple[tuple[float, float, float], ...]] = {
    "square": ((1, 0, 0.88), (-1, 0, 0.88), (0, 1, 0.88), (0, -1, 0.88)),
    "triangle": ((0, 1, 0.95), (2 * _SLANT, -_SLANT, _SLANT), (-2 * _SLANT, -_SLANT, _SLANT)),
}
# strokes (u0, v0, u1, v1): from (u0, v0) to (u1, v1)
_STROKES: dict[str, tuple[tuple[float, float, float, float], ...]] = {
    "circle": ((0, 0, 0, 0),),
    "L": ((-0.5, -0.78, -0.5, 0.78), (-0.5, 0.78, 0.65, 0.78)),
    "T": ((-0.75, -0.78, 0.75, -0.78), (0, -0.78, 0, 0.78)),
    "X": ((-0.68, -0.78, 0.68, 0.78), (0.68, -0.78, -0.68, 0.78)),
    "H": ((-0.62, -0.78, -0.62, 0.78), (0.62, -0.78, 0.62, 0.78), (-0.62, 0, 0.62, 0)),
}


class Primitive(NamedTuple):
    """A half-plane or a stroke at each pixel."""

    distance: Tensor  # signed, in radii, negative inside
    d_du: Tensor | float  # its derivative in u
    d_dv: Tensor | float


def _combine(u: Tensor, v: Tensor, a: float, b: float) -> Tensor:
    """a u + b v, kept one-dimensional if a coefficient is zero: most planes and strokes are axis-aligned."""
    if a and b:
        return a * u + b * v
    return a * u if a else b * v


def _stroke(
    u: Tensor, v: Tensor, u0: float, v0: float, u1: float, v1: float, half: float
) -> Primitive:
    """Signed distance to a round-ended stroke, and its gradient; smoothed at the axis, where a norm has a kink."""
    du = u1 - u0
    dv = v1 - v0
    u = u - u0
    v = v - v0
    if du or dv:
        # subtract the nearest point of the axis; along: where it is, 0 at the start and 1 at the end
        along = (_combine(u, v, du, dv) / (du * du + dv * dv)).clamp(0, 1)
        if du:
            u = u - along * du
        if dv:
            v = v - along * dv
    distance = (u.square() + v.square() + SOFTENING).sqrt()
    edge = math.sqrt(half * half + SOFTENING)
    return Primitive(distance - edge, u / distance, v / distance)


def _primitives(shape: int, u: Tensor, v: Tensor) -> tuple[list[Primitive], bool]:
    """The primitives of a shape, and whether they combine by union (else by intersection)."""
    name = NAMES[shape]
    if name in _PLANES:
        planes = [Primitive(_combine(u, v, a, b) - c, a, b) for a, b, c in _PLANES[name]]
        return planes, False
    half = 1.0 if name == "circle" else THICKNESS
    return [_stroke(u, v, u0, v0, u1, v1, half) for u0, v0, u1, v1 in _STROKES[name]], True


def coverage(shape: int, u: Tensor, v: Tensor, pixels: Tensor) -> Tensor:
    """Covered fraction of each pixel, (..., H, W) in [0,1]; `pixels` is the radius in pixels, broadcast to u and v."""
    primitives, is_union = _primitives(shape, u, v)
    # An intersection is the product of the indicators of "inside", a union 1 - the product of those of "outside".
    sign = SHARPNESS if is_union else -SHARPNESS
    product = reduce(mul, [torch.sigmoid(sign * pixels * p.distance) for p in primitives])
    return 1 - product if is_union else product


def coverage_slopes(
    shape: int, u: Tensor, v: Tensor, pixels: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Coverage and its derivatives with respect to the object's center (column, row) and radius, all in pixels.

    With P the product of indicators s_i = sigmoid(k R d_i): dP/d(k R d_i) = P (1 - s_i). The radius enters twice,
    through R itself and through u = (column - center) / R.
    """
    primitives, is_union = _primitives(shape, u, v)
    gain = (SHARPNESS if is_union else -SHARPNESS) * pixels
    indicators = [torch.sigmoid(gain * p.distance) for p in primitives]
    product = reduce(mul, indicators)

    # sums over the primitives of (1 - s_i) times d_i, its u-derivative and its v-derivative
    pairs = list(zip(indicators, primitives, strict=True))
    by_distance = reduce(add, [(1 - s) * p.distance for s, p in pairs])
    by_u = reduce(add, [(1 - s) * p.d_du for s, p in pairs])
    by_v = reduce(add, [(1 - s) * p.d_dv for s, p in pairs])

    slope = SHARPNESS * product  # same sign for both: the union is 1 - P of the mirrored distances
    mask = 1 - product if is_union else product
    radius_slope = slope * (u * by_u + v * by_v - by_distance)
    return mask, slope * by_u, slope * by_v, radius_slope
