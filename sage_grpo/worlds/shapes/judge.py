"""What a perfect judge says of a clip: VQ and MQ for the clip alone, TA against a prompt, all from the oracle.

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

# Bounds of the fit of each frame
MAX_OFFSET = 0.25  # distance from the path, as a fraction of the frame's shorter side
MIN_RADIUS = 0.5  # as fractions of the scene's radius
MAX_RADIUS = 1.6

# Defects that cost one log(2)
PICTURE = 0.02
WOBBLE = 0.01
SWELLING = 0.05


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
    """(B,) the share of the attributes in `named`, name -> class for each clip, that were read; 1 if there are none."""
    shares = []
    for i, classes in enumerate(named):
        correct = [int(attributes[name][i]) == index for name, index in classes.items()]
        shares.append(sum(correct) / len(correct) if correct else 1.0)
    return torch.tensor(shares)


@torch.no_grad()
def judge(clips: Tensor, scenes: Scenes | None = None) -> Judgement:
    """Judge uint8 clips (B,F,H,W,3) on their device. scenes: what they show, if it is known; else it is read."""
    parts = []
    for rows in torch.arange(len(clips), device=clips.device).split(CHUNK):
        if scenes is None:
            chunk_scenes = read(clips[rows], [""] * len(rows)).scenes
        else:
            chunk_scenes = scenes[rows]
        parts.append(_judge(clips[rows], chunk_scenes))
    return Judgement(
        VQ=torch.cat([part.VQ for part in parts]),
        MQ=torch.cat([part.MQ for part in parts]),
        attributes={
            name: torch.cat([part.attributes[name] for part in parts]) for name in ATTRIBUTES
        },
    )


def _judge(clips: Tensor, scenes: Scenes) -> Judgement:
    """Each defect costs the logarithm of 1 + its size."""
    picture, wobble, swelling = defects(clips.float() / 255, scenes)
    return Judgement(
        VQ=-torch.log1p(picture / PICTURE),
        MQ=-torch.log1p(wobble / WOBBLE) - 0.5 * torch.log1p(swelling / SWELLING),
        attributes={name: getattr(scenes, name) for name in ATTRIBUTES},
    )


def defects(clips: Tensor, scenes: Scenes) -> tuple[Tensor, Tensor, Tensor]:
    """Defects of clips in [0,1], given their nearest scenes, each (B,).

    picture: the RMS pixel difference that remains when each frame is fitted by itself. wobble: the RMS distance of the
    object from its path, as a fraction of the frame. swelling: the relative RMS deviation of its radius.
    """
    frames, height, width = clips.shape[1:4]
    side = min(height, width)
    target, length, rest = project_on_pair(clips, scenes.colour, scenes.background)

    # center and radius in each frame: on the scene's path, and fitted
    center_x, center_y = centers(scenes, frames, height, width)
    radius = (scenes.radius * side)[:, None].expand(-1, frames)
    on_path = torch.stack([center_x, center_y, radius], dim=-1)  # (B,F,3)
    fitted, error = fit_frames(scenes.shape, target, on_path, side)

    picture = ((rest + length * error.sum(1)) / clips[0].numel()).clamp_min(0).sqrt()
    deviation = (fitted - on_path).square().mean(1)  # (B,3)
    wobble = deviation[:, :2].sum(-1).sqrt() / side
    swelling = deviation[:, 2].sqrt() / on_path[:, 0, 2]
    return picture, wobble, swelling


def fit_frames(shapes: Tensor, target: Tensor, start: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """Center and radius in pixels of each frame's object (B,F,3), and the squared error (B,F).

    Fitted to the coverage `target` (B,F,H,W), from `start` (B,F,3) on; see `fit.py` for the method.
    """
    reach = start.new_tensor([MAX_OFFSET * side, MAX_OFFSET * side, 0.0])
    low = start - reach
    high = start + reach
    low[..., 2] = MIN_RADIUS * start[..., 2]
    high[..., 2] = MAX_RADIUS * start[..., 2]

    best = start
    damping = torch.full_like(start[..., 0], 1e-2)
    cost, gradient, matrix = _frame_equations(shapes, target, best)
    for _ in range(STEPS):
        trial = (best - damped_step(gradient, matrix, damping)).clamp(low, high)
        new_cost, new_gradient, new_matrix = _frame_equations(shapes, target, trial)
        better = new_cost < cost
        best = torch.where(better[..., None], trial, best)
        cost = torch.where(better, new_cost, cost)
        gradient = torch.where(better[..., None], new_gradient, gradient)
        matrix = torch.where(better[..., None, None], new_matrix, matrix)
        damping = torch.where(better, damping * 0.1, damping * 10)
    return best, cost


def _frame_equations(
    shapes: Tensor, target: Tensor, values: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Squared error (B,F), half its gradient (B,F,3) and the Gauss-Newton matrix (B,F,3,3)."""
    height, width = target.shape[2:]
    pixel_x = torch.arange(width, device=target.device) + 0.5
    pixel_y = torch.arange(height, device=target.device)[:, None] + 0.5
    products = target.new_empty(*target.shape[:2], 4, 4)
    for shape in shapes.unique().tolist():
        clips = (shapes == shape).nonzero()[:, 0]
        x, y, radius = (value[..., None, None] for value in values[clips].unbind(-1))
        u = (pixel_x - x) / radius
        v = (pixel_y - y) / radius
        mask, *slopes = coverage_slopes(shape, u, v, radius)
        error = mask - target[clips]
        columns = torch.stack([*slopes, error], dim=2).flatten(3)  # (n,F,4,H*W)
        products[clips] = columns @ columns.transpose(-1, -2)

    squared_error = products[..., 3, 3]
    gradient = products[..., :3, 3]
    matrix = products[..., :3, :3]
    return squared_error, gradient, matrix
