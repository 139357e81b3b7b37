"""What a perfect judge says about a clip: VQ and MQ for the clip alone, TA against a prompt, all from the oracle.

The nearest scene explains a clip up to a residual. Fitting the object's place and radius in each frame by itself splits
that residual in two: what is left is a defect of the picture (VQ), what the frames gained is a defect of the motion
(MQ). TA is the share of the attributes named by the prompt that the oracle reads in the clip.

Shapes: B clips, F frames, H rows, W columns.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sage_grpo.worlds.shapes.fit import damped_step
from sage_grpo.worlds.shapes.geometry import coverage_slopes
from sage_grpo.worlds.shapes.oracle import read
from sage_grpo.worlds.shapes.scenes import ATTRIBUTES, Scenes, centers, parse
from sage_grpo.worlds.shapes.search import project_on_pair

CHUNK = 256  # clips judged at a time: limits memory
STEPS = 6  # of the fit of each frame
FARTHEST, LEAST, MOST = (
    0.25,
    0.5,
    1.6,
)  # of a frame's object: how far from the path, and its radius, both relative
PICTURE, WOBBLE, SWELLING = 0.02, 0.01, 0.05  # defects that cost one log(2)


@dataclass(frozen=True)
class Judgement:
    """VQ and MQ, 0 for a clip without defects, each (B,); and the attributes that were read, name -> (B,) classes."""

    VQ: Tensor
    MQ: Tensor
    attributes: dict[str, Tensor]

    def alignment(self, prompts: Sequence[str]) -> Tensor:
        """TA (B,): the share of the attributes in each prompt that the clip shows; 1 if it names none."""
        return alignment(self.attributes, [parse(prompt) for prompt in prompts])


def alignment(attributes: Mapping[str, Tensor], named: Sequence[Mapping[str, int]]) -> Tensor:
    rows = [
        [int(attributes[name][i]) == index for name, index in words.items()]
        for i, words in enumerate(named)
    ]
    return torch.tensor([sum(row) / len(row) if row else 1.0 for row in rows])


@torch.no_grad()
def judge(clips: Tensor, scenes: Scenes | None = None) -> Judgement:
    """Judge uint8 clips (B,F,H,W,3) on their device. scenes: what they are to show, if it is known; else it is read."""
    rows = torch.arange(len(clips), device=clips.device).split(CHUNK)
    parts = [_judge(clips[row], scenes and scenes[row]) for row in rows]
    attributes = {name: torch.cat([part.attributes[name] for part in parts]) for name in ATTRIBUTES}
    return Judgement(
        *(torch.cat([getattr(part, name) for part in parts]) for name in ("VQ", "MQ")), attributes
    )


def _judge(clips: Tensor, scenes: Scenes | None) -> Judgement:
    scenes = scenes or read(clips, [""] * len(clips)).scenes
    picture, wobble, swelling = defects(clips.float() / 255, scenes)
    motion = -torch.log1p(wobble / WOBBLE) - 0.5 * torch.log1p(swelling / SWELLING)
    attributes = {name: getattr(scenes, name) for name in ATTRIBUTES}
    return Judgement(-torch.log1p(picture / PICTURE), motion, attributes)


def defects(clips: Tensor, scenes: Scenes) -> tuple[Tensor, Tensor, Tensor]:
    """Defects of clips in [0,1], given their nearest scenes, each (B,).

    The RMS pixel difference that remains when each frame is fitted by itself; the RMS distance of the object from its
    path, as a fraction of the frame; the relative deviation of its radius.
    """
    frames, height, width = clips.shape[1:4]
    side = min(height, width)
    target, length, rest = project_on_pair(clips, scenes.colour, scenes.background)
    start = torch.stack(
        [*centers(scenes, frames, height, width), _radii(scenes, frames, side)], dim=-1
    )  # (B,F,3)
    found, error = fit_frames(scenes.shape, target, start, side)
    moved = (found - start).square().mean(1)
    picture = ((rest + length * error.sum(1)) / clips[0].numel()).clamp_min(0).sqrt()
    return picture, moved[:, :2].sum(-1).sqrt() / side, moved[:, 2].sqrt() / start[:, 0, 2]


def _radii(scenes: Scenes, frames: int, side: int) -> Tensor:
    return (scenes.radius * side)[:, None].expand(-1, frames)


def fit_frames(shapes: Tensor, target: Tensor, start: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """Center and radius in pixels of each frame's object (B,F,3), fitted to its coverage `target` (B,F,H,W) beginning
    at `start`; also the squared error (B,F)."""
    reach = start.new_tensor([FARTHEST * side, FARTHEST * side, 0.0])
    low, high = start - reach, start + reach
    low[..., 2], high[..., 2] = LEAST * start[..., 2], MOST * start[..., 2]
    best, damping = start, torch.full_like(start[..., 0], 1e-2)
    cost, gradient, matrix = _frame_equations(shapes, target, best)
    for _ in range(STEPS):
        trial = (best - damped_step(gradient, matrix, damping)).clamp(low, high)
        new = _frame_equations(shapes, target, trial)
        better = new[0] < cost
        best = torch.where(better[..., None], trial, best)
        gradient = torch.where(better[..., None], new[1], gradient)
        matrix = torch.where(better[..., None, None], new[2], matrix)
        cost, damping = (
            torch.where(better, new[0], cost),
            torch.where(better, damping * 0.1, damping * 10),
        )
    return best, cost


def _frame_equations(
    shapes: Tensor, target: Tensor, values: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Squared error (B,F), half its gradient (B,F,3) and the Gauss-Newton matrix (B,F,3,3)."""
    height, width = target.shape[2:]
    x, y, radius = (value[..., None, None] for value in values.unbind(-1))
    columns = torch.arange(width, device=target.device) + 0.5
    rows = torch.arange(height, device=target.device)[:, None] + 0.5
    products = target.new_empty(*target.shape[:2], 4, 4)
    for shape in shapes.unique().tolist():
        chosen = (shapes == shape).nonzero()[:, 0]
        at = [value[chosen] for value in (x, y, radius)]
        mask, *slopes = coverage_slopes(
            shape, (columns - at[0]) / at[2], (rows - at[1]) / at[2], at[2]
        )
        each = torch.stack([*slopes, mask - target[chosen]], dim=2).flatten(3)
        products[chosen] = each @ each.transpose(-1, -2)
    return products[..., 3, 3], products[..., :3, 3], products[..., :3, :3]
