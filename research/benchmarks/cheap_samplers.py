"""What a cheaper sampler costs in the clips themselves: gold match of the embedded model, before any training.

    python -m research.benchmarks.cheap_samplers               8 minutes of a CPU core
    python -m research.benchmarks.cheap_samplers --prompts 16

awm and nft train on whatever clips their rollouts sample, so any solver, number of steps and guidance is allowed. Each
row samples the same prompts from the same noise. A clip costs one forward per step, and two per guided step.
Intervals are those of 95 % over prompts; differences are to the first row of each table, prompt by prompt. What a row
costs in the trained model takes training, and is not measured here.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sage_grpo.algo.sde import flow_sigmas
from sage_grpo.config.parse import from_values
from sage_grpo.data.requests import Request
from sage_grpo.intervals import Interval, interval
from sage_grpo.models.backbone import Backbone, Guidance
from sage_grpo.models.embeddings import alike, shared_or_stacked
from sage_grpo.models.sample import counter_noise, integrate
from sage_grpo.train.build import open_model
from sage_grpo.train.inputs import train_requests
from sage_grpo.worlds.registry import World, world_of

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "assets" / "tiny"
SEED = 4
MAX_TOGETHER = 16  # clips per forward


@dataclass(frozen=True)
class Way:
    """One way to sample."""

    solver: str
    steps: int
    scale: float = 1.0  # of the guidance
    interval: tuple[float, float] = (0.0, 1.0)  # noise levels that are guided

    def sigmas(self, shift: float) -> Tensor:
        return flow_sigmas(self.steps, shift)

    def forwards(self, shift: float) -> int:
        """Forwards per clip."""
        if self.scale == 1:
            return self.steps
        low, high = self.interval
        guided = [low <= level <= high for level in self.sigmas(shift)[:-1].tolist()]
        return self.steps + sum(guided)

    def __str__(self) -> str:
        text = f"{self.solver}, {self.steps} steps"
        if self.scale != 1 and self.interval != (0.0, 1.0):
            low, high = self.interval
            text += f", guided from noise level {high:g} to {low:g}"
        return text


# The first of each is what the others are compared with. From pure noise, dpm and dpm3 with 3 steps are Euler's.
UNGUIDED = (
    Way("euler", 10),
    Way("euler", 5),
    Way("euler", 3),
    Way("dpm", 10),
    Way("dpm", 5),
    Way("dpm3", 5),
    Way("unipc", 5),
    Way("unipc", 3),
)
GUIDED = (
    Way("dpm", 10, 2.0),
    Way("dpm", 5, 2.0),
    Way("unipc", 5, 2.0),
    Way("dpm", 5, 2.0, (0.8, 1.0)),
    Way("dpm", 5, 2.0, (0.5, 0.9)),
    Way("dpm", 5, 2.0, (0.0, 0.8)),
)
TABLES = {"without guidance": UNGUIDED, "guidance 2": GUIDED}


@torch.no_grad()
def matches(
    backbone: Backbone, world: World, requests: Sequence[Request], way: Way, clips: int
) -> list[float]:
    """The share of each prompt's `clips` clips that show what it says."""
    sampling = backbone.sampling
    shape = backbone.latent_shape(sampling.frames, sampling.height, sampling.width)
    negative = backbone.encode([Request("")])[0]
    guidance = Guidance(way.scale, negative, way.interval)
    conditions = backbone.encode(requests)

    shares = [0.0] * len(requests)
    for batch in alike(conditions, max(1, MAX_TOGETHER // clips)):
        rows = [row for row in batch for _ in range(clips)]
        noise = [
            counter_noise(shape, SEED, range(clips), prompt=requests[row].index)[0] for row in batch
        ]
        cond = shared_or_stacked([conditions[row] for row in rows])
        latents = integrate(
            backbone, way.sigmas(sampling.shift), torch.cat(noise), cond, guidance, way.solver
        )
        shown = world.gold(backbone.decode(latents), [requests[row] for row in rows])["match"]
        for row, match in zip(rows, shown.tolist(), strict=True):
            shares[row] += match / clips
    return shares


def told(value: Interval, sign: str = "") -> str:
    return f"{value.mean:{sign}.3f} ± {value.half:.3f}"


def table_row(
    way: Way, forwards: int, shares: Sequence[float], reference: Sequence[float] | None
) -> str:
    difference = ""
    if reference is not None:
        pairs = zip(shares, reference, strict=True)
        difference = told(interval(share - other for share, other in pairs), "+")
    return f"| {way} | {forwards} | {told(interval(shares))} | {difference} |"


def main(
    arguments: Sequence[str] | None = None, tables: Mapping[str, Sequence[Way]] = TABLES
) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=100, help="training prompts, from the first")
    parser.add_argument("--clips", type=int, default=1, help="clips of each prompt")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)

    values = {"pretrained_model_root": str(MODEL), "dtype": "fp32"}
    backbone, config = open_model(from_values(values), torch.device("cpu"))
    world = world_of(MODEL)
    requests = train_requests(config)[: options.prompts]

    for title, ways in tables.items():
        print(f"\n| {title} | forwards per clip | gold match | difference |\n|---|---|---|---|")
        reference = None
        for way in ways:
            shares = matches(backbone, world, requests, way, options.clips)
            forwards = way.forwards(backbone.sampling.shift)
            print(table_row(way, forwards, shares, reference), flush=True)
            if reference is None:
                reference = shares


if __name__ == "__main__":
    main()
