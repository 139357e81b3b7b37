"""Coarse search for the scenes that best explain a clip: every class at every position of the pixel grid.

First, pairs of object and background color are ranked by how far the averaged pixels are from the line between the two
colors. For the best pairs, every class of motion, shape and size is then tried at every position, each with a middle
radius and two values of travel. These are ranked by the squared error of a rendered scene, so hypotheses of all pairs
compete on one scale.

Shapes: B clips, F frames, H rows, W columns, N hypotheses; M motions (direction, speed, part of the speed class),
T templates (shape, size).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from sage_grpo.worlds.shapes.scenes import (
    ATTRIBUTES,
    BACKGROUNDS,
    HEADING,
    PALETTE,
    RADIUS,
    TRAVEL,
    Scenes,
    object_mask,
    path_margins,
    phases,
    table,
)

PARTS = (
    0.25,
    0.75,
)  # fractions of a speed class: from its middle, a fast path's ends would miss thin strokes
CLASSES = {name: len(ATTRIBUTES[name]) for name in ("direction", "speed", "shape", "size")}


def pair_errors(clips: Tensor) -> Tensor:
    """How badly each color pair explains the local averages of a clip, (B, colors * backgrounds).

    Most of a frame is background, so its color m is the median; the error is the squared distance from m to the pair's
    background plus the squared distance from the averages to the line from m to the object color. Averages of mixtures
    are mixtures, so a rendered clip has zero error under its pair; averages and median are robust to pixel noise.
    """
    pooled = adaptive_avg_pool2d(clips.movedim(-1, 2).flatten(0, 1), 8)
    pixels = pooled.view(len(clips), -1, 3, 64).movedim(2, -1).flatten(1, 2)  # (B,F*64,3)
    median = pixels.median(1, keepdim=True).values
    axis = (table(PALETTE, clips) - median)[:, :, None]  # (B,colors,1,3)
    offset = (pixels - median)[:, None]
    place = (offset * axis).sum(-1, keepdim=True) / axis.square().sum(-1, keepdim=True).clamp_min(
        1e-6
    )
    line = (offset - place.clamp(0, 1) * axis).square().sum(-1).mean(-1)
    back = (median - table(BACKGROUNDS, clips)).square().sum(-1)
    return (line[:, :, None] + back[:, None, :]).flatten(1)


def project_on_pair(
    clips: Tensor, colour: Tensor, background: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Project clips on the line from background (0) to object color (1), (N,F,H,W); also the residual squared error.

    |clip - rendering|^2 = rest + length * |target - mask|^2 for every mask, with rest and length (N,).
    """
    back = table(BACKGROUNDS, clips)[background]
    axis = table(PALETTE, clips)[colour] - back
    length = axis.square().sum(-1)
    offset = clips - back[:, None, None, None]
    target = (offset.flatten(1, 3) @ (axis / length[:, None])[:, :, None]).view(clips.shape[:4])
    rest = offset.square().flatten(1).sum(1) - length * target.square().flatten(1).sum(1)
    return target, length, rest


@dataclass(frozen=True)
class Grid:
    """The cells of the search (scenes centered in the frame) and their Fourier transforms."""

    cells: Scenes  # M*T of them, templates fastest
    templates: Tensor  # (T,H,W/2+1) conjugate spectra of the masks
    motions: Tensor  # (M,F,H,W/2+1) factors that undo the motion, frame by frame
    energy: Tensor  # (M*T,) squared norm of the mask over all frames
    outside: Tensor  # (M*T,H,W) positions at which the object would leave the frame
    x: Tensor  # (W,) center for a template shift of that many columns
    y: Tensor  # (H,)


def make_grid(frames: int, height: int, width: int, like: Tensor) -> Grid:
    """The grid for clips of one size."""
    counts = (CLASSES["direction"], CLASSES["speed"], len(PARTS), CLASSES["shape"], CLASSES["size"])
    ranges = [torch.arange(count, device=like.device) for count in counts]
    direction, speed, part, shape, size = (
        index.flatten() for index in torch.meshgrid(*ranges, indexing="ij")
    )
    slowest, fastest = table(TRAVEL, like)[speed].unbind(-1)
    radius, travel = (
        table(RADIUS, like).mean(1)[size],
        slowest + (fastest - slowest) * like.new_tensor(PARTS)[part],
    )
    none, middle = torch.zeros_like(shape), torch.full_like(radius, 0.5)
    cells = Scenes(none, shape, size, direction, speed, none, middle, middle, radius, travel)
    count = CLASSES["shape"] * CLASSES["size"]
    masks = object_mask(cells[:count], 5, height, width)[:, 2]
    x = (torch.arange(width, device=like.device) / width + 0.5) % 1
    y = (torch.arange(height, device=like.device) / height + 0.5) % 1
    room = 0.5 - path_margins(direction, radius, travel)
    outside_x = (x - 0.5).abs() > room[:, :1]
    outside_y = (y - 0.5).abs() > room[:, 1:]
    return Grid(
        cells=cells,
        templates=torch.fft.rfft2(masks).conj(),
        motions=_undo_motion(cells[::count], frames, height, width),
        energy=frames * masks.square().sum((1, 2)).repeat(len(cells) // count),
        outside=outside_x[:, None, :] | outside_y[:, :, None],
        x=x.to(like),
        y=y.to(like),
    )


def _undo_motion(motions: Scenes, frames: int, height: int, width: int) -> Tensor:
    """Fourier factors (M,F,H,W/2+1) that move each frame's object back to the middle of its path."""
    step = table(HEADING, motions.x)[motions.direction] * motions.travel[:, None]
    fx = torch.fft.rfftfreq(width, device=step.device).to(step) * width
    fy = torch.fft.fftfreq(height, device=step.device).to(step)[:, None] * height
    turns = step[:, 0, None, None] * fx + step[:, 1, None, None] * fy
    return torch.exp(2j * torch.pi * turns[:, None] * phases(frames, step)[:, None, None])


def grid_errors(grid: Grid, target: Tensor, length: Tensor, rest: Tensor) -> tuple[Tensor, Tensor]:
    """Squared error of each cell at its best position, (B,M*T), and that position as a flat pixel index.

    rest + length (|target|^2 - 2 <target, mask> + |mask|^2). Frames are first shifted back along the motion and
    summed, so that one correlation with the template covers all of them.
    """
    aligned = torch.einsum("bfhw,mfhw->bmhw", torch.fft.rfft2(target), grid.motions)
    overlap = torch.fft.irfft2(aligned[:, :, None] * grid.templates, s=target.shape[2:]).flatten(
        1, 2
    )
    overlap, place = overlap.masked_fill_(grid.outside, -torch.inf).flatten(2).max(-1)
    energy = target.square().flatten(1).sum(1, keepdim=True)
    return rest[:, None] + length[:, None] * (energy - 2 * overlap + grid.energy), place


def shortlist(
    clips: Tensor, allowed: Mapping[str, Tensor], pairs: int, count: int
) -> tuple[Tensor, Scenes]:
    """The `count` best hypotheses of each clip within the allowed classes (name -> (B, classes) bool).

    Returns the clip index of each, (N,) ascending, and the scenes: grid cells at their best positions.
    """
    frames, height, width = clips.shape[1:4]
    grid = make_grid(frames, height, width, clips)
    pair_ok = (allowed["colour"][:, :, None] & allowed["background"][:, None, :]).flatten(1)
    bound, chosen = (
        pair_errors(clips).masked_fill(~pair_ok, torch.inf).topk(pairs, dim=1, largest=False)
    )
    colour, background = chosen // len(BACKGROUNDS), chosen % len(BACKGROUNDS)
    found = [
        grid_errors(grid, *project_on_pair(clips, colour[:, k], background[:, k]))
        for k in range(pairs)
    ]
    errors, places = (
        torch.stack(values, 1) for values in zip(*found, strict=True)
    )  # (B,pairs,M*T)
    cell_ok = torch.stack([allowed[name][:, getattr(grid.cells, name)] for name in CLASSES]).all(0)
    errors = errors.masked_fill(~cell_ok[:, None] | bound.isinf()[:, :, None], torch.inf)
    best, index = errors.flatten(1).topk(count, dim=1, largest=False)
    owner, rank = best.isfinite().nonzero(as_tuple=True)
    pair, cell = index[owner, rank] // len(grid.cells), index[owner, rank] % len(grid.cells)
    place = places[owner, pair, cell]
    placed = {"x": grid.x[place % width], "y": grid.y[place // width]}
    coloured = {"colour": colour[owner, pair], "background": background[owner, pair]}
    return owner, Scenes(**{**dict(grid.cells[cell].items()), **placed, **coloured})
