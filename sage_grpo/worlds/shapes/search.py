"""Coarse search for the scenes that best explain a clip: every class at every position of the pixel grid.

First, pairs of object and background color are ranked by how far the averaged pixels are from the line between the two
colors. For the best pairs, every class of motion, shape and size is then tried at every position, each with a middle
radius and two values of travel. These are ranked by the squared error of a rendered scene, so hypotheses of all pairs
compete on one scale.

Shapes: B clips, F frames, H rows, W columns, N hypotheses; M motions (direction, speed, part of the speed class),
T templates (shape, size).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

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

# Values of travel within a speed class, as fractions of its range; from its middle alone, the ends of a fast path would
# miss thin strokes.
PARTS = (0.25, 0.75)
CLASSES = {name: len(ATTRIBUTES[name]) for name in ("direction", "speed", "shape", "size")}


def pair_errors(clips: Tensor) -> Tensor:
    """How badly each color pair explains the local averages of a clip, (B, colors * backgrounds).

    Most of a frame is background, so its color m is the median; the error is the squared distance from m to the pair's
    background plus the squared distance from the averages to the line from m to the object color. Averages of mixtures
    are mixtures, so a rendered clip has zero error under its pair; averages and median are robust to pixel noise.
    """
    pooled = adaptive_avg_pool2d(clips.movedim(-1, 2).flatten(0, 1), 8)
    averages = pooled.view(len(clips), -1, 3, 64).movedim(2, -1).flatten(1, 2)  # (B,F*64,3)
    median = averages.median(1, keepdim=True).values  # (B,1,3)

    # distance of each average from the line: offset - place * axis, with place = <offset, axis> / |axis|^2
    axis = (table(PALETTE, clips) - median)[:, :, None]  # (B,colors,1,3)
    offset = (averages - median)[:, None]  # (B,1,F*64,3)
    squared_length = axis.square().sum(-1, keepdim=True).clamp_min(1e-6)
    place = (offset * axis).sum(-1, keepdim=True) / squared_length
    line_error = (offset - place.clamp(0, 1) * axis).square().sum(-1).mean(-1)  # (B,colors)

    background_error = (median - table(BACKGROUNDS, clips)).square().sum(-1)  # (B,backgrounds)
    return (line_error[:, :, None] + background_error[:, None, :]).flatten(1)


def project_on_pair(
    clips: Tensor, colour: Tensor, background: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Project clips on the line from background (0) to object color (1): target (N,F,H,W), length (N,) and rest (N,).

    For every mask, |clip - rendering|^2 = rest + length * |target - mask|^2.
    """
    back = table(BACKGROUNDS, clips)[background]
    axis = table(PALETTE, clips)[colour] - back
    length = axis.square().sum(-1)
    offset = clips - back[:, None, None, None]
    # target = <offset, axis> / |axis|^2
    projection = (axis / length[:, None])[:, :, None]
    target = (offset.flatten(1, 3) @ projection).view(clips.shape[:4])
    # rest = |offset|^2 - |axis|^2 |target|^2
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
    cells = _cells(like)
    num_templates = CLASSES["shape"] * CLASSES["size"]
    num_motions = len(cells) // num_templates

    # templates: the middle one of five frames, where the object is at the center of its path
    masks = object_mask(cells[:num_templates], 5, height, width)[:, 2]

    # positions, in the order of the correlation: the first is the middle of the frame, as for a shift of 0
    x = (torch.arange(width, device=like.device) / width + 0.5) % 1
    y = (torch.arange(height, device=like.device) / height + 0.5) % 1
    room = 0.5 - path_margins(cells.direction, cells.radius, cells.travel)
    outside_x = (x - 0.5).abs() > room[:, :1]
    outside_y = (y - 0.5).abs() > room[:, 1:]
    return Grid(
        cells=cells,
        templates=torch.fft.rfft2(masks).conj(),
        motions=_undo_motion(cells[::num_templates], frames, height, width),
        energy=frames * masks.square().sum((1, 2)).repeat(num_motions),
        outside=outside_x[:, None, :] | outside_y[:, :, None],
        x=x.to(like),
        y=y.to(like),
    )


def _cells(like: Tensor) -> Scenes:
    """All classes of motion (slowest) and template (fastest), centered, in the first color on the first background."""
    counts = (CLASSES["direction"], CLASSES["speed"], len(PARTS), CLASSES["shape"], CLASSES["size"])
    ranges = [torch.arange(count, device=like.device) for count in counts]
    indices = [index.flatten() for index in torch.meshgrid(*ranges, indexing="ij")]
    direction, speed, part, shape, size = indices

    radius = table(RADIUS, like).mean(1)[size]
    slowest, fastest = table(TRAVEL, like)[speed].unbind(-1)
    travel = slowest + (fastest - slowest) * like.new_tensor(PARTS)[part]
    return Scenes(
        colour=torch.zeros_like(shape),
        shape=shape,
        size=size,
        direction=direction,
        speed=speed,
        background=torch.zeros_like(shape),
        x=torch.full_like(radius, 0.5),
        y=torch.full_like(radius, 0.5),
        radius=radius,
        travel=travel,
    )


def _undo_motion(motions: Scenes, frames: int, height: int, width: int) -> Tensor:
    """Fourier factors (M,F,H,W/2+1) that move each frame's object back to the middle of its path.

    A shift by a fraction s of the frame multiplies the frequency f, in cycles per frame, by exp(2 pi i f s).
    """
    step = table(HEADING, motions.x)[motions.direction] * motions.travel[:, None]
    fx = torch.fft.rfftfreq(width, device=step.device).to(step) * width
    fy = torch.fft.fftfreq(height, device=step.device).to(step)[:, None] * height
    turns = step[:, 0, None, None] * fx + step[:, 1, None, None] * fy
    return torch.exp(2j * torch.pi * turns[:, None] * phases(frames, step)[:, None, None])


def grid_errors(grid: Grid, target: Tensor, length: Tensor, rest: Tensor) -> tuple[Tensor, Tensor]:
    """Squared error of each cell at its best position, (B,M*T), and that position as a flat pixel index.

    error = rest + length (|target|^2 - 2 <target, mask> + |mask|^2). Frames are first shifted back along the motion
    and summed, so that one correlation with the template covers all of them.
    """
    aligned = torch.einsum("bfhw,mfhw->bmhw", torch.fft.rfft2(target), grid.motions)
    correlation = torch.fft.irfft2(aligned[:, :, None] * grid.templates, s=target.shape[2:])
    correlation = correlation.flatten(1, 2).masked_fill_(grid.outside, -torch.inf)  # (B,M*T,H,W)
    overlap, place = correlation.flatten(2).max(-1)
    energy = target.square().flatten(1).sum(1, keepdim=True)
    error = rest[:, None] + length[:, None] * (energy - 2 * overlap + grid.energy)
    return error, place


def shortlist(
    clips: Tensor, allowed: Mapping[str, Tensor], pairs: int, count: int
) -> tuple[Tensor, Scenes]:
    """The `count` best hypotheses of each clip within the allowed classes (name -> (B, classes) bool).

    Returns the clip index of each, (N,) ascending, and the scenes: grid cells at their best positions.
    """
    frames, height, width = clips.shape[1:4]
    grid = make_grid(frames, height, width, clips)

    # 1. the best color pairs
    pair_allowed = (allowed["colour"][:, :, None] & allowed["background"][:, None, :]).flatten(1)
    pair_error = pair_errors(clips).masked_fill(~pair_allowed, torch.inf)
    best_error, best_pair = pair_error.topk(pairs, dim=1, largest=False)  # (B,pairs)
    colour = best_pair // len(BACKGROUNDS)
    background = best_pair % len(BACKGROUNDS)

    # 2. the error of every cell for each of these pairs, at its best place
    pair_results = []
    for k in range(pairs):
        target, length, rest = project_on_pair(clips, colour[:, k], background[:, k])
        pair_results.append(grid_errors(grid, target, length, rest))
    errors = torch.stack([error for error, _ in pair_results], 1)  # (B,pairs,M*T)
    places = torch.stack([place for _, place in pair_results], 1)
    cell_allowed = [allowed[name][:, getattr(grid.cells, name)] for name in CLASSES]
    cell_allowed = torch.stack(cell_allowed).all(0)  # (B,M*T)
    pair_missing = best_error.isinf()[:, :, None]  # fewer pairs are allowed than are searched
    errors = errors.masked_fill(~cell_allowed[:, None] | pair_missing, torch.inf)

    # 3. the best cells of all pairs
    least_error, index = errors.flatten(1).topk(count, dim=1, largest=False)  # (B,count)
    owner, rank = least_error.isfinite().nonzero(as_tuple=True)
    pair = index[owner, rank] // len(grid.cells)
    cell = index[owner, rank] % len(grid.cells)
    place = places[owner, pair, cell]
    scenes = replace(
        grid.cells[cell],
        x=grid.x[place % width],
        y=grid.y[place // width],
        colour=colour[owner, pair],
        background=background[owner, pair],
    )
    return owner, scenes
