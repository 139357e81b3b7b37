"""Exact reading of clips by analysis-by-synthesis: the nearest clip of the world, and the nearest that a prompt allows.

Coarse to fine: `search.py` ranks all classes on the pixel grid, `fit.py` optimizes the continuous parameters of the
best ones through the renderer. A prompt only restricts which classes are tried.

This is the gold metric of the world, which training never sees: rewards must not import it.

Shapes: B clips, F frames, H rows, W columns; N candidate scenes, each owned by a clip.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from sage_grpo.worlds.shapes.fit import fit
from sage_grpo.worlds.shapes.scenes import ATTRIBUTES, Scenes, parse, render
from sage_grpo.worlds.shapes.search import project_on_pair, shortlist

CHUNK = 64  # clips read at a time: limits memory
PAIRS = 2  # color pairs searched per clip
CANDIDATES = 6  # hypotheses fitted per clip, with ROUGH_STEPS each
FINALISTS = 2  # of these, fitted to convergence
ROUGH_STEPS = 3
FINE_STEPS = 7
COARSE_SIDE = 32  # shorter side, in pixels, at which the search runs


@dataclass(frozen=True)
class Reading:
    """What the oracle finds in B clips.

    attributes: name -> (B,) class indices of the nearest scene. distance: (B,) RMS pixel difference to it, 1 being the
    full range. scenes: that scene. prompt_distance, prompt_scenes: the same among scenes that match the prompt; never
    below `distance`. match: (B,) whether everything the prompt names was read that way.
    """

    attributes: dict[str, Tensor]
    distance: Tensor
    scenes: Scenes
    prompt_distance: Tensor
    prompt_scenes: Scenes
    match: Tensor


@torch.no_grad()
def read(clips: Tensor, prompts: Sequence[str]) -> Reading:
    """Read clips (B,F,H,W,3), uint8 or float in [0,1], against one prompt each; an empty prompt allows everything."""
    clips = _checked(clips)
    if len(prompts) != len(clips):
        raise ValueError(
            f"{len(prompts)} prompts for {len(clips)} clips: give one prompt for each clip"
        )
    everything = _allowed([{}] * len(clips), clips.device)
    scenes, distance = _nearest(clips, everything)
    allowed = _allowed([parse(prompt) for prompt in prompts], clips.device)
    prompt_scenes, prompt_distance = _nearest_to_prompt(clips, allowed, scenes, distance)

    # scenes that match the prompt are scenes: where the narrower search did better, its result counts for both
    nearer = prompt_distance < distance
    better = {
        name: torch.where(nearer, getattr(prompt_scenes, name), value)
        for name, value in scenes.items()
    }
    scenes = Scenes(**better)
    return Reading(
        attributes={name: getattr(scenes, name) for name in ATTRIBUTES},
        distance=distance.minimum(prompt_distance),
        scenes=scenes,
        prompt_distance=prompt_distance,
        prompt_scenes=prompt_scenes,
        match=_agree(scenes, allowed),
    )


def _checked(clips: Tensor) -> Tensor:
    """Clips as float32; rejects clips that cannot be read correctly."""
    if clips.ndim != 5 or clips.shape[-1] != 3 or not len(clips):
        raise ValueError(
            f"clips have shape {tuple(clips.shape)}, but must be (B, F, H, W, 3) with B >= 1"
        )
    if clips.dtype == torch.uint8:
        return clips.float() / 255
    clips = clips.float()
    if not clips.isfinite().all():
        bad = (~clips.isfinite()).flatten(1).any(1).nonzero()[:, 0].tolist()
        raise ValueError(
            f"clips {bad} hold NaN or infinite pixels: find out where they arise, they cannot be read"
        )
    low, high = clips.min().item(), clips.max().item()
    if low < -0.01 or high > 1.01:
        raise ValueError(
            f"pixels lie in [{low:.3g}, {high:.3g}]: pass uint8, or floats clamped to [0, 1]"
        )
    return clips


def _allowed(named: Sequence[Mapping[str, int]], device: torch.device) -> dict[str, Tensor]:
    """Which classes each clip may take: name -> (B, classes) bool."""
    allowed = {}
    for name, words in ATTRIBUTES.items():
        wanted = torch.tensor([classes.get(name, -1) for classes in named], device=device)[:, None]
        allowed[name] = (wanted < 0) | (wanted == torch.arange(len(words), device=device))
    return allowed


def _nearest(clips: Tensor, allowed: Mapping[str, Tensor]) -> tuple[Scenes, Tensor]:
    """The nearest allowed scene for each clip, and its RMS pixel difference (B,)."""
    scenes = []
    distances = []
    for start in range(0, len(clips), CHUNK):
        rows = slice(start, start + CHUNK)
        chunk_allowed = {name: mask[rows] for name, mask in allowed.items()}
        chunk_scenes, chunk_distances = _nearest_chunk(clips[rows], chunk_allowed)
        scenes.append(chunk_scenes)
        distances.append(chunk_distances)
    values = {
        field.name: torch.cat([getattr(part, field.name) for part in scenes])
        for field in fields(Scenes)
    }
    return Scenes(**values), torch.cat(distances)


def _nearest_to_prompt(
    clips: Tensor, allowed: Mapping[str, Tensor], scenes: Scenes, distance: Tensor
) -> tuple[Scenes, Tensor]:
    """Like `_nearest`, given the nearest scenes overall: where the prompt allows these, no search is needed."""
    rows = (~_agree(scenes, allowed)).nonzero()[:, 0]
    if not len(rows):
        return scenes, distance
    rows_allowed = {name: mask[rows] for name, mask in allowed.items()}
    new_scenes, new_distance = _nearest(clips[rows], rows_allowed)
    values = {
        name: value.index_copy(0, rows, getattr(new_scenes, name)) for name, value in scenes.items()
    }
    return Scenes(**values), distance.index_copy(0, rows, new_distance)


def _agree(scenes: Scenes, allowed: Mapping[str, Tensor]) -> Tensor:
    """Whether every class of a scene is allowed, (B,)."""
    agreements = [
        mask.gather(1, getattr(scenes, name)[:, None])[:, 0] for name, mask in allowed.items()
    ]
    return torch.stack(agreements).all(0)


def _nearest_chunk(clips: Tensor, allowed: Mapping[str, Tensor]) -> tuple[Scenes, Tensor]:
    """`_nearest` for as many clips as fit into memory."""
    # 1. candidates: searched on a grid and roughly fitted, at low resolution
    small = _reduced(clips)
    owner, scenes = shortlist(small, allowed, PAIRS, CANDIDATES)
    scenes, error = _refine(small[owner], scenes, ROUGH_STEPS)

    # 2. finalists: fitted at full resolution
    finalists = _cheapest(owner, error, FINALISTS)
    owner = owner[finalists]
    scenes, _ = _refine(clips[owner], scenes[finalists], FINE_STEPS)

    # 3. the nearest. Rendered again: the fit's error is a difference of large sums, too coarse near zero
    frames, height, width = clips.shape[1:4]
    residual = render(scenes, frames, height, width) - clips[owner]
    distance = residual.square().flatten(1).mean(1).sqrt()
    nearest = _cheapest(owner, distance, 1)
    return scenes[nearest], distance[nearest]


def _reduced(clips: Tensor) -> Tensor:
    """Clips downsampled to a shorter side below 2 COARSE_SIDE.

    Edges are then wide enough for a rough initial guess, and the search costs the same for every frame size.
    """
    frames, height, width = clips.shape[1:4]
    factor = max(1, min(height, width) // COARSE_SIDE)
    if factor == 1:
        return clips
    size = (height // factor, width // factor)
    images = adaptive_avg_pool2d(clips.movedim(-1, 2).flatten(0, 1), size)
    return images.view(len(clips), frames, 3, *size).movedim(2, -1)


def _refine(clips: Tensor, scenes: Scenes, steps: int) -> tuple[Scenes, Tensor]:
    """Fit N scenes to N clips; also returns the squared error (N,), comparable across candidates of a clip."""
    target, length, rest = project_on_pair(clips, scenes.colour, scenes.background)
    scenes, error = fit(scenes, target, steps)
    return scenes, rest + length * error


def _cheapest(owner: Tensor, cost: Tensor, count: int) -> Tensor:
    """Indices of the `count` cheapest candidates per owner, ordered by owner, then by cost."""
    by_cost = cost.argsort(stable=True)
    order = by_cost[owner[by_cost].argsort(stable=True)]
    # rank among the candidates of the same owner: place minus the place of the owner's first
    place = torch.arange(len(order), device=owner.device)
    first = torch.searchsorted(owner[order], owner[order])
    return order[place - first < count]
