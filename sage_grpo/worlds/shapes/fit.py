"""Least-squares fit of a scene's continuous parameters to clips: batched, bounded Levenberg-Marquardt.

For fixed colors, the squared difference between a clip and a rendering is, up to a constant, the squared difference
between two one-channel images: the object's coverage, and the clip projected on the line between the two colors
(`target`). Bounds keep the fit on the manifold: radius and travel within their class, the entire path in the frame.

Shapes: N fits, F frames, H rows, W columns; P = 4 parameters in the order x, y, radius, travel.
"""

from dataclasses import replace

import torch
from torch import Tensor

from sage_grpo.worlds.shapes.geometry import coverage_slopes
from sage_grpo.worlds.shapes.scenes import (
    HEADING,
    RADIUS,
    TRAVEL,
    Scenes,
    path_margins,
    phases,
    table,
    unit_coordinates,
)


def parameters(scenes: Scenes) -> Tensor:
    """The continuous parameters of the scenes, (N,P)."""
    return torch.stack([scenes.x, scenes.y, scenes.radius, scenes.travel], dim=-1)


def with_parameters(scenes: Scenes, values: Tensor) -> Scenes:
    """Scenes of the same classes with the continuous parameters `values` (N,P)."""
    x, y, radius, travel = values.unbind(-1)
    return replace(scenes, x=x, y=y, radius=radius, travel=travel)


def bounds(scenes: Scenes) -> tuple[Tensor, Tensor]:
    """Lower and upper bounds, each (N,P); those of x and y depend on the scenes' current radius and travel."""
    radius = table(RADIUS, scenes.x)[scenes.size]
    travel = table(TRAVEL, scenes.x)[scenes.speed]
    margins = path_margins(scenes.direction, scenes.radius, scenes.travel)
    low = torch.cat([margins, radius[:, :1], travel[:, :1]], dim=-1)
    high = torch.cat([1 - margins, radius[:, 1:], travel[:, 1:]], dim=-1)
    return low, high


def project(scenes: Scenes) -> Scenes:
    """Clamp the continuous parameters to their bounds: sizes first, then the position, whose bounds depend on them."""
    for _ in range(2):
        low, high = bounds(scenes)
        scenes = with_parameters(scenes, parameters(scenes).clamp(low, high))
    return scenes


def normal_equations(scenes: Scenes, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Squared error (N,), half its gradient (N,P) and the Gauss-Newton matrix (N,P,P) of coverage against `target`.

    Coverage depends on the frame only through the center, so sums over pixels are taken for (column, row, radius,
    error), and the chain rule to x, y and travel is applied to these small matrices, frame by frame.
    """
    n, frames, height, width = target.shape
    u, v, pixels = unit_coordinates(scenes, frames, height, width)
    products = target.new_empty(n, frames, 4, 4)
    for shape in scenes.shape.unique().tolist():
        rows = (scenes.shape == shape).nonzero()[:, 0]
        mask, *slopes = coverage_slopes(shape, u[rows], v[rows], pixels[rows])
        error = mask - target[rows]
        columns = torch.stack([*slopes, error], dim=2).flatten(3)  # (n,F,4,H*W)
        products[rows] = columns @ columns.transpose(-1, -2)

    # with J the derivatives and e the error: e'e, J'e and J'J, summed over frames
    chain = _chain_rule(scenes, frames, height, width)
    total = (chain.transpose(-1, -2) @ products @ chain).sum(1)  # (N,5,5)
    squared_error = total[:, 4, 4]
    gradient = total[:, :4, 4]
    matrix = total[:, :4, :4]
    return squared_error, gradient, matrix


def _chain_rule(scenes: Scenes, frames: int, height: int, width: int) -> Tensor:
    """Derivative of (column, row, radius in pixels, error) with respect to (x, y, radius, travel, error), (N,F,4,5)."""
    heading = table(HEADING, scenes.x)[scenes.direction, None, :]
    steps = heading * phases(frames, scenes.x)[:, None]  # (N,F,2)
    chain = scenes.x.new_zeros(len(scenes), frames, 4, 5)
    # column = (x + travel * step_x) * width
    chain[:, :, 0, 0] = width
    chain[:, :, 0, 3] = steps[..., 0] * width
    # row = (y + travel * step_y) * height
    chain[:, :, 1, 1] = height
    chain[:, :, 1, 3] = steps[..., 1] * height
    # radius in pixels = radius * shorter side
    chain[:, :, 2, 2] = min(height, width)
    # the error stays
    chain[:, :, 3, 4] = 1
    return chain


def damped_step(
    gradient: Tensor, matrix: Tensor, damping: Tensor, free: Tensor | None = None
) -> Tensor:
    """What to subtract from the parameters (...,P): the solution of (A + damping diag(A)) step = gradient.

    gradient: half of it (...,P). matrix: Gauss-Newton's A (...,P,P). damping: (...). Parameters that are not `free`
    (...,P) have a step of 0.
    """
    if free is None:
        free = torch.ones_like(gradient, dtype=torch.bool)
    diagonal = matrix.diagonal(dim1=-2, dim2=-1)
    largest = diagonal.amax(-1, keepdim=True)
    # a parameter that affects no pixel has a zero diagonal: the small constants keep the system solvable
    ridge = damping[..., None] * diagonal + 1e-6 * largest + 1e-12
    # a fixed parameter has the equation 1 * step = 0
    ridge = torch.where(free, ridge, 1.0)
    both_free = free[..., :, None] & free[..., None, :]
    system = matrix * both_free + torch.diag_embed(ridge)
    return torch.linalg.solve(system, (gradient * free)[..., None])[..., 0]


def _step(scenes: Scenes, gradient: Tensor, matrix: Tensor, damping: Tensor) -> Scenes:
    """One damped Gauss-Newton step; parameters at a bound that the gradient pushes against stay fixed."""
    values = parameters(scenes)
    low, high = bounds(scenes)
    pushes_down = (values <= low) & (gradient > 0)
    pushes_up = (values >= high) & (gradient < 0)
    step = damped_step(gradient, matrix, damping, free=~(pushes_down | pushes_up))
    return project(with_parameters(scenes, values - step))


def fit(scenes: Scenes, target: Tensor, steps: int) -> tuple[Scenes, Tensor]:
    """Improve the scenes (N) against `target` (N,F,H,W) within their classes; also returns the squared error (N,)."""
    best = project(scenes)
    cost, gradient, matrix = normal_equations(best, target)
    damping = torch.full_like(cost, 1e-2)
    for _ in range(steps):
        trial = _step(best, gradient, matrix, damping)
        new_cost, new_gradient, new_matrix = normal_equations(trial, target)

        # each fit keeps its trial if that is better, and is damped less then, otherwise more
        better = new_cost < cost
        values = torch.where(better[:, None], parameters(trial), parameters(best))
        best = with_parameters(best, values)
        cost = torch.where(better, new_cost, cost)
        gradient = torch.where(better[:, None], new_gradient, gradient)
        matrix = torch.where(better[:, None, None], new_matrix, matrix)
        damping = torch.where(better, damping * 0.1, damping * 10).clamp(1e-7, 1e7)
    return best, cost
