"""The training reward of the shapes world: VQ, MQ and TA in VideoAlign's sense, from simple pixel statistics.

VQ judges frames (two clean colors, sharp edges, no flicker, contrast), MQ the object's track (straight, even, visible,
constant area), TA whether the clip shows each attribute that the prompt names. Each defect enters as a logarithm:
scores keep their spread for good and bad clips alike, and clips without defects score about 1.

It is only a proxy: it knows color averages, moments and areas but not the world's manifold, so clips that leave the
manifold can raise it. `oracle.py`, whose search and fit share no code with this file, measures how far they leave it.

Shapes: B clips, F frames, H rows, W columns.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from sage_grpo.rewards.base import Setup
from sage_grpo.rewards.video_frames import check_clips
from sage_grpo.worlds.shapes.geometry import NAMES, coverage
from sage_grpo.worlds.shapes.scenes import (
    BACKGROUNDS,
    HEADING,
    PALETTE,
    RADIUS,
    TRAVEL,
    parse,
    table,
)

EDGE = 0.25  # width of a clean anti-aliased edge: the integral of m (1 - m) across it, in pixels


@dataclass(frozen=True)
class Look:
    """Colors of a batch of clips, and the soft mask of everything that differs from the background."""

    back: Tensor  # (B,3) median of the frame's border
    front: Tensor  # (B,3) mean color of everything that differs from it
    mask: Tensor  # (B,F,H,W) position of each pixel on the line between the two, in [0,1]
    grain: Tensor  # (B,) RMS difference of the border from its median
    palette: Tensor  # (B,) RMS difference of all pixels from that line
    flicker: Tensor  # (B,) standard deviation over frames of the object's and the border's color


@dataclass(frozen=True)
class Track:
    """Motion and outline of the mask; length units as in `scenes.py`."""

    travel: Tensor  # (B,2) of the straight line fitted to the centroids
    wobble: Tensor  # (B,) RMS distance of the centroids from their line at constant speed
    swelling: Tensor  # (B,) standard deviation of the area over frames, relative
    area: Tensor  # (B,) mean, as a fraction of the squared shorter side
    moments: Tensor  # (B,13) scale-free central moments, mean over frames
    faintness: Tensor  # (B,) 1 for an empty mask, which has no outline; 0 for one with many pixels


class ShapesReward:
    """Scores clips of the shapes world. Stateless: a score depends only on the clip and its prompt."""

    names = ("VQ", "MQ", "TA")

    def check(self, prompts: Sequence[str]) -> None:
        """Reject prompts with words that the world does not know."""
        for prompt in prompts:
            parse(prompt)

    def score(
        self, clips: Tensor | Sequence[Tensor], prompts: Sequence[str], fps: float
    ) -> dict[str, Tensor]:
        """VQ, MQ and TA, each (B,), for uint8 clips (F,H,W,3), one prompt each.

        The world measures speed per clip, so fps does not change the scores; it is part of the common signature.
        """
        pixels = _as_floats(clips, prompts, fps)
        named = [parse(prompt) for prompt in prompts]
        look = measure_look(pixels)
        track = measure_track(look.mask)
        return {
            "VQ": visual_quality(look),
            "MQ": motion_quality(track),
            "TA": text_alignment(look, track, named),
        }


def _as_floats(clips: Tensor | Sequence[Tensor], prompts: Sequence[str], fps: float) -> Tensor:
    """(B,F,H,W,3) in [0,1]; rejects clips of several shapes or with too few frames."""
    check_clips(clips, prompts, fps)
    shapes = {tuple(clip.shape) for clip in clips}
    if len(shapes) > 1:
        raise ValueError(f"clips have shapes {sorted(shapes)}: score clips of one shape at a time")
    if len(clips[0]) < 5:
        raise ValueError(
            f"clips have {len(clips[0])} frames; motion can be judged from 5 frames on"
        )
    return torch.stack(list(clips)).float() / 255


def measure_look(clips: Tensor) -> Look:
    """Colors, mask and color defects of float clips (B,F,H,W,3)."""
    # background: the median of the border, (B,F,pixels,3)
    top, bottom = clips[:, :, 0], clips[:, :, -1]
    left, right = clips[:, :, 1:-1, 0], clips[:, :, 1:-1, -1]
    border = torch.cat([top, bottom, left, right], dim=2)
    back = border.flatten(1, 2).median(1).values
    offset = clips - back[:, None, None, None]

    # object color: a high power gives weight to the object's core, not to its edge or background noise
    weight = offset.square().sum(-1, keepdim=True) ** 3 + 1e-9
    axis = (weight * offset).sum((1, 2, 3)) / weight.sum((1, 2, 3))

    # mask = <offset, axis> / |axis|^2
    line = axis[:, None, None, None]
    mask = ((offset * line).sum(-1) / (line.square().sum(-1) + 1e-4)).clamp(0, 1)

    # color of the object and of the border in each frame
    core = mask.square()[..., None] + 1e-4
    object_color = (core * offset).sum((2, 3)) / core.sum((2, 3))  # (B,F,3)
    object_flicker = _rms(object_color - object_color.mean(1, keepdim=True))
    border_flicker = _rms(border.mean(2) - border.mean((1, 2))[:, None])
    return Look(
        back=back,
        front=back + axis,
        mask=mask,
        grain=_rms(border - back[:, None, None]),
        palette=_rms(offset - mask[..., None] * line),
        flicker=object_flicker + border_flicker,
    )


def _rms(values: Tensor) -> Tensor:
    """(B, ...) -> (B,)"""
    return values.square().flatten(1).mean(1).sqrt()


def measure_track(mask: Tensor) -> Track:
    """Centroids, areas and moments of a soft mask (B,F,H,W)."""
    frames, height, width = mask.shape[1:]
    # noise far from the object would dominate the higher moments: faint pixels get no weight, half-covered ones keep it
    solid = ((mask - 0.15) / 0.7).clamp(0, 1)
    solid = solid * solid * (3 - 2 * solid) + 1e-6

    # centroid of each frame, (B,F,2) in pixels
    x = (torch.arange(width, device=mask.device) + 0.5).expand(height, width)
    y = (torch.arange(height, device=mask.device) + 0.5)[:, None].expand(height, width)
    area = solid.sum((2, 3))
    sums = torch.stack([(solid * x).sum((2, 3)), (solid * y).sum((2, 3))], -1)
    center = sums / area[..., None]

    # least-squares line at constant speed: place = mean + travel * phase
    place = center / center.new_tensor([width, height])
    phase = torch.linspace(-0.5, 0.5, frames, device=mask.device)[:, None]
    travel = (place * phase).sum(1) / phase.square().sum()
    off_line = place - place.mean(1, keepdim=True) - travel[:, None] * phase

    moments = _moments(solid, x - center[..., 0, None, None], y - center[..., 1, None, None])
    covered = mask.sum((2, 3))  # (B,F) pixels
    return Track(
        travel=travel,
        wobble=off_line.square().sum(-1).mean(1).sqrt(),
        swelling=covered.std(1) / (covered.mean(1) + 1),
        area=area.mean(1) / min(height, width) ** 2,
        moments=(moments * area[..., None]).sum(1) / area.sum(1, keepdim=True),
        faintness=torch.exp(-area.mean(1) / 4),
    )


def _moments(mask: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Scale-free statistics of an outline, (..., 13), given pixel offsets from its centroid.

    Central moments of order 2 to 4 in units of the radius of gyration, sum(mask x^i y^j) / area; and compactness, the
    area relative to a disc with the same radius of gyration.
    """
    area = mask.sum((-2, -1))
    gyration = ((mask * (x.square() + y.square())).sum((-2, -1)) / area + 1e-2).sqrt()
    x = x / gyration[..., None, None]
    y = y / gyration[..., None, None]
    powers = [(i, order - i) for order in (2, 3, 4) for i in range(order + 1)]
    moments = [(mask * x**i * y**j).sum((-2, -1)) / area for i, j in powers]
    compactness = area / (2 * torch.pi * gyration.square())
    return torch.stack([*moments, compactness], -1)


@cache
def outline_table() -> tuple[Tensor, Tensor, Tensor]:
    """Moments of the known outlines (7,13), their spread over outlines (13,), and their areas in squared radii (7,)."""
    side = 24  # pixels
    radius = 6.0
    points = (torch.arange(side) + 0.5 - side / 2) / radius
    masks = [
        coverage(shape, points, points[:, None], torch.tensor(radius))
        for shape in range(len(NAMES))
    ]
    track = measure_track(torch.stack(masks)[:, None].expand(-1, 5, -1, -1))
    spread = track.moments.std(0) + 0.02
    area = track.area * (side / radius) ** 2
    return track.moments, spread, area


def outline_distances(track: Track) -> Tensor:
    """Distance from each clip's moments to the known outlines' moments, (B,7), in units of the outlines' spread."""
    moments, spread, _ = (values.to(track.moments) for values in outline_table())
    distance = ((track.moments[:, None] - moments) / spread).square().mean(-1).sqrt()
    return distance + 3 * track.faintness[:, None]


def visual_quality(look: Look) -> Tensor:
    """VQ (B,)."""
    contrast = (look.front - look.back).norm(dim=-1)
    return (
        1
        - 0.5 * torch.log1p(look.palette / 0.02)
        - 0.25 * torch.log1p(look.grain / 0.02)
        - 0.5 * torch.log1p(look.flicker / 0.02)
        + 0.4 * torch.log(contrast + 0.02)
        - torch.log((edge_width(look.mask) + EDGE) / (2 * EDGE))
    )


def edge_width(mask: Tensor) -> Tensor:
    """Mean width of the mask's edges in pixels, (B,): the sum of m (1 - m) over the sum of gradients; 1 if none."""
    down = mask[:, :, 1:, :-1] - mask[:, :, :-1, :-1]
    right = mask[:, :, :-1, 1:] - mask[:, :, :-1, :-1]
    gradients = (down.square() + right.square() + 1e-8).sqrt().sum((1, 2, 3))
    softness = (mask * (1 - mask)).sum((1, 2, 3))
    return (softness + 1) / (gradients + 1)


def motion_quality(track: Track) -> Tensor:
    """MQ (B,)."""
    visible = 0.4 * torch.log((track.travel.norm(dim=-1) + 0.02) / 0.15) - track.faintness
    return (
        1
        + visible
        - 0.8 * torch.log1p(track.wobble / 0.01)
        - 0.5 * torch.log1p(track.swelling / 0.05)
    )


def text_alignment(look: Look, track: Track, named: Sequence[Mapping[str, int]]) -> Tensor:
    """TA (B,): 1 minus twice the mean defect over the attributes that the prompt names; 0 if it names none."""
    defects = attribute_defects(look, track, named)
    scores = []
    for i, classes in enumerate(named):
        if classes:
            clip_defects = [defects[name][i, index] for name, index in classes.items()]
            scores.append(1 - 2 * torch.stack(clip_defects).mean())
        else:
            scores.append(look.back.new_zeros(()))
    return torch.stack(scores)


def attribute_defects(
    look: Look, track: Track, named: Sequence[Mapping[str, int]]
) -> dict[str, Tensor]:
    """How badly each class of each attribute matches the clips, name -> (B, classes), 0 being perfect."""
    front = (look.front[:, None] - table(PALETTE, look.front)).norm(dim=-1)
    back = (look.back[:, None] - table(BACKGROUNDS, look.back)).norm(dim=-1)
    outline = outline_distances(track)
    radius = _radius(track, outline, named)
    speed = track.travel.norm(dim=-1, keepdim=True)
    cosine = track.travel @ table(HEADING, speed).T / (speed + 0.005)
    return {
        "colour": torch.log1p(front / 0.2),
        "background": torch.log1p(back / 0.2),
        "shape": torch.log1p(outline / 0.3),
        "direction": torch.log1p((1 - cosine) / 0.25),
        "speed": torch.log1p(_outside(speed, table(TRAVEL, speed)) / 0.03),
        "size": torch.log1p(_outside(radius, table(RADIUS, speed)) / 0.015),
    }


def _outside(value: Tensor, ranges: Tensor) -> Tensor:
    """How far `value` (B,1) is outside each of the ranges (C,2): (B,C)."""
    return (ranges[:, 0] - value).clamp_min(0) + (value - ranges[:, 1]).clamp_min(0)


def _radius(track: Track, distances: Tensor, named: Sequence[Mapping[str, int]]) -> Tensor:
    """Radius that explains the area, (B,1): for the outline that the prompt names, else for similar outlines."""
    weights = torch.softmax(-10 * distances, dim=-1)
    for i, classes in enumerate(named):
        if "shape" in classes:
            weights[i] = 0
            weights[i, classes["shape"]] = 1
    _, _, areas = outline_table()
    unit_area = weights @ areas.to(weights)
    return (track.area / unit_area).sqrt()[:, None]


def build(setup: Setup) -> ShapesReward:
    """The reward of the registry; there is nothing to load."""
    return ShapesReward()
