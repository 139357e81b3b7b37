"""Clips of every quality, judged by the oracle: what annotators of the shapes world get to see.

Rendered, damaged, sent through the VAE, and sampled from the model at several numbers of steps and scales of guidance.

Shapes: N clips, F frames, H rows, W columns.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle

import torch
from torch import Tensor
from tqdm import tqdm

from embedded.quality import random_prompts, sample_clips
from embedded.shapes.damage import DAMAGES
from embedded.shapes.judge import judge
from embedded.shapes.scenes import ATTRIBUTES, render, sample_scenes
from embedded.shapes.world import as_uint8
from sage_grpo.algo.sde import build_schedule, flow_sigmas
from sage_grpo.models.backbone import Backbone

BATCH = 256
STRONGEST = {"noise": 0.3, "blur": 2.0, "jitter": 3.0, "fade": 1.0, "pulse": 0.3, "flicker": 0.2, "freeze": 1.0}
SAMPLERS = [
    (steps, guidance, sde) for steps in (2, 3, 5, 10) for guidance in (1.0, 2.0) for sde in ("ode", "sage_grpo")
]
ETA = 0.7


@dataclass(frozen=True)
class Pool:
    """N judged clips."""

    clips: Tensor  # (N,F,H,W,3) uint8
    VQ: Tensor  # (N,) as `judge` says
    MQ: Tensor
    attributes: Tensor  # (N,6) classes read, in the order of ATTRIBUTES
    source: Tensor  # (N,) index into SOURCES


def rendered(backbone: Backbone, count: int, generator: torch.Generator) -> Tensor:
    s = backbone.sampling
    return render(sample_scenes(count, generator), s.frames, s.height, s.width)


def damaged(backbone: Backbone, count: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Rendered clips with each kind of damage in turn, of a strength between nothing and STRONGEST."""
    for clip, (name, strongest) in zip(rendered(backbone, count, generator).split(1), cycle(STRONGEST.items())):
        yield DAMAGES[name](clip, strongest * torch.rand((), generator=generator).item(), generator)


def round_trips(backbone: Backbone, count: int, generator: torch.Generator) -> Iterator[Tensor]:
    for part in rendered(backbone, count, generator).split(BATCH):
        yield backbone.decode(backbone.encode_video(as_uint8(part))).cpu()


def samples(backbone: Backbone, count: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Clips of random prompts; each prompt and sampler in turn gives sixteen."""
    shift, each = backbone.sampling.shift, 16
    prompts = random_prompts(count // each, int(torch.randint(2**31, (), generator=generator)))
    for number, (steps, guidance, sde) in enumerate(SAMPLERS):
        schedule = build_schedule(sde, flow_sigmas(steps, shift), ETA).to(backbone.device)
        yield from sample_clips(backbone, schedule, prompts[number :: len(SAMPLERS)], each, guidance, seed=number)


SOURCES: dict[str, Callable[[Backbone, int, torch.Generator], Iterator[Tensor]]] = {
    "rendered": lambda *rest: iter(rendered(*rest).split(BATCH)),
    "damaged": damaged,
    "VAE": round_trips,
    "sampled": samples,
}


def build_pool(backbone: Backbone, counts: dict[str, int], seed: int, device: torch.device) -> Pool:
    """Judged clips; counts: how many of each source."""
    clips, source = [], []
    for number, (name, make) in enumerate(SOURCES.items()):
        generator = torch.Generator().manual_seed(seed * len(SOURCES) + number)
        found = [
            part if part.dtype == torch.uint8 else as_uint8(part) for part in make(backbone, counts[name], generator)
        ]
        clips += found
        source += [number] * sum(map(len, found))
    clips = torch.cat([part.cpu() for part in clips]).to(device)
    parts = [judge(part) for part in tqdm(clips.split(BATCH), "oracle", unit="batch", mininterval=5)]
    attributes = [torch.cat([part.attributes[name] for part in parts]) for name in ATTRIBUTES]
    scores = (torch.cat([getattr(part, name) for part in parts]) for name in ("VQ", "MQ"))
    return Pool(clips, *scores, torch.stack(attributes, 1), torch.tensor(source, device=device))
