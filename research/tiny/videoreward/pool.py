"""Clips of every quality, judged by the oracle: what annotators of the shapes world get to see.

Rendered, damaged, sent through the VAE, and sampled from the model at several numbers of steps and scales of guidance.

Shapes: N clips, F frames, H rows, W columns.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle, islice, product

import torch
from torch import Tensor
from tqdm import tqdm

from research.tiny.quality import random_prompts, sample_clips
from sage_grpo.algo.sde import build_schedule, flow_sigmas
from sage_grpo.models.backbone import Backbone
from sage_grpo.worlds.shapes.damage import DAMAGES
from sage_grpo.worlds.shapes.judge import judge
from sage_grpo.worlds.shapes.scenes import ATTRIBUTES, Scenes, render, sample_scenes
from sage_grpo.worlds.shapes.world import as_uint8

BATCH = 256
STRONGEST = {
    "noise": 0.3,
    "blur": 2.0,
    "jitter": 3.0,
    "fade": 1.0,
    "pulse": 0.3,
    "flicker": 0.2,
    "freeze": 1.0,
}
SAMPLERS = list(product((2, 3, 5, 10), (1.0, 2.0), ("ode", "sage_grpo")))  # steps, guidance, SDE
ETA = 0.7
PER_PROMPT = 16  # clips sampled for each prompt


@dataclass(frozen=True)
class Pool:
    """N judged clips."""

    clips: Tensor  # (N,F,H,W,3) uint8
    VQ: Tensor  # (N,) as `judge` says
    MQ: Tensor
    attributes: Tensor  # (N,6) classes read, in the order of ATTRIBUTES
    source: Tensor  # (N,) index into SOURCES


# uint8 clips (N,F,H,W,3) and what they are to show, if it is known
Made = tuple[Tensor, Scenes | None]


def rendered(backbone: Backbone, count: int, generator: torch.Generator) -> Iterator[Made]:
    """Perfect clips."""
    s = backbone.sampling
    for start in range(0, count, BATCH):
        scenes = sample_scenes(min(BATCH, count - start), generator)
        clips = render(scenes.to(backbone.device), s.frames, s.height, s.width)
        yield as_uint8(clips).cpu(), scenes


def damaged(backbone: Backbone, count: int, generator: torch.Generator) -> Iterator[Made]:
    """Rendered clips with each kind of damage in turn, of a strength between nothing and STRONGEST."""
    for clips, scenes in rendered(backbone, count, generator):
        parts = []
        for clip, (name, strongest) in zip(clips.split(1), cycle(STRONGEST.items()), strict=False):
            strength = strongest * torch.rand((), generator=generator).item()
            parts.append(DAMAGES[name](clip / 255, strength, generator))
        yield as_uint8(torch.cat(parts)), scenes


def round_trips(backbone: Backbone, count: int, generator: torch.Generator) -> Iterator[Made]:
    """Rendered clips, sent through the VAE."""
    for clips, scenes in rendered(backbone, count, generator):
        yield backbone.decode(backbone.encode_video(clips)), scenes


def samples(backbone: Backbone, count: int, generator: torch.Generator) -> Iterator[Made]:
    """Clips of random prompts; the samplers take turns."""
    shift = backbone.sampling.shift
    seed = int(torch.randint(2**31, (), generator=generator))
    prompts = random_prompts(count // PER_PROMPT, seed)
    for number, (steps, guidance, sde) in enumerate(SAMPLERS):
        schedule = build_schedule(sde, flow_sigmas(steps, shift), ETA).to(backbone.device)
        chosen = prompts[number :: len(SAMPLERS)]
        sampled = sample_clips(backbone, schedule, chosen, PER_PROMPT, guidance, seed=number)
        while clips := list(islice(sampled, BATCH // PER_PROMPT)):
            yield torch.cat(clips), None


SOURCES: dict[str, Callable[[Backbone, int, torch.Generator], Iterator[Made]]] = {
    "rendered": rendered,
    "damaged": damaged,
    "VAE": round_trips,
    "sampled": samples,
}


def build_pool(backbone: Backbone, counts: dict[str, int], seed: int, device: torch.device) -> Pool:
    """Judged clips; counts: how many of each source."""
    clips = []
    judged = []
    source = []
    for number, (name, make) in enumerate(SOURCES.items()):
        generator = torch.Generator().manual_seed(seed * len(SOURCES) + number)
        batches = make(backbone, counts[name], generator)
        for batch, scenes in tqdm(batches, name, unit="batch", mininterval=5):
            batch = batch.to(device)
            clips.append(batch)
            judged.append(judge(batch, None if scenes is None else scenes.to(device)))
            source += [number] * len(batch)
    attributes = [torch.cat([part.attributes[name] for part in judged]) for name in ATTRIBUTES]
    return Pool(
        clips=torch.cat(clips),
        VQ=torch.cat([part.VQ for part in judged]),
        MQ=torch.cat([part.MQ for part in judged]),
        attributes=torch.stack(attributes, 1),
        source=torch.tensor(source, device=device),
    )
