"""Rollouts: which clips a rank samples, with what exploration noise, and what training keeps.

All clips in one forward share a prompt (packed text), or have prompts of equal length. Training runs the same
micro-batches through the same function, which is why the first ratio is exactly 1.

Shapes: B clips of a micro-batch, T denoising steps, ... the latent shape (C, t, y, x).
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sage_grpo import rng
from sage_grpo.algo.sde import Schedule
from sage_grpo.models.backbone import Backbone, Conditioning, Guidance
from sage_grpo.models.sample import counter_noise, denoise


@dataclass(frozen=True)
class MicroBatch:
    """Clips that run through the model together."""

    prompts: tuple[int, ...]  # of each clip, its position in the prompt list
    samples: tuple[int, ...]  # index of each clip among all clips of its prompt in this iteration


@dataclass
class Trajectory:
    """A micro-batch and its trajectory from noise to latents, fp32."""

    micro_batch: MicroBatch
    cond: Conditioning
    x: Tensor  # (B, T + 1, ...)
    velocity: Tensor  # (B, T, ...) predicted by the policy that sampled it
    log_prob: Tensor  # (B, T)
    is_finite: Tensor  # (B,) bool: the entire trajectory is finite
    order: Tensor  # (B, K) the steps to train, in training order
    anchor_velocity: Tensor | None = None  # (B, T, ...) at the steps to train

    @property
    def latents(self) -> Tensor:
        return self.x[:, -1]


def prompt_positions(step: int, per_step: int, count: int, seed: int) -> list[int]:
    """Prompt positions for iteration `step`: each epoch goes through all `count` prompts in a new order."""
    numbers = range(step * per_step, (step + 1) * per_step)
    orders = {
        epoch: rng.permutation(count, seed, "prompt_order", step=epoch) for epoch in {n // count for n in numbers}
    }
    return [int(orders[n // count][n % count]) for n in numbers]


def plan_micro_batches(
    positions: Sequence[int], group_size: int, batch_size: int, rank: int, micro_batch_size: int | None
) -> list[MicroBatch]:
    """The micro-batches of one rank: its `batch_size` rows of the list of all clips, group by group.

    If a prompt appears twice in an iteration, its sample numbers continue, so no noise is used twice.
    """
    rows, seen = [], dict.fromkeys(positions, 0)
    for prompt in positions:
        rows += [(prompt, seen[prompt] + number) for number in range(group_size)]
        seen[prompt] += group_size
    mine = rows[rank * batch_size : (rank + 1) * batch_size]
    size = micro_batch_size or min(batch_size, group_size)
    chunks = [mine[start : start + size] for start in range(0, len(mine), size)]
    return [MicroBatch(*zip(*chunk, strict=True)) for chunk in chunks]


def join_prompts(micro_batches: Sequence[MicroBatch], alike: Callable[[int], Hashable], most: int) -> list[MicroBatch]:
    """Join up to `most` micro-batches whose prompts are `alike`; clips of one prompt stay next to each other."""
    kinds: dict[Hashable, list[MicroBatch]] = {}
    for one in micro_batches:
        kinds.setdefault(alike(one.prompts[0]), []).append(one)
    parts = [ones[start : start + most] for ones in kinds.values() for start in range(0, len(ones), most)]
    clips = [[pair for one in part for pair in zip(one.prompts, one.samples, strict=True)] for part in parts]
    return [MicroBatch(*zip(*pairs, strict=True)) for pairs in clips]


def exploring_steps(window: str, num_steps: int, step: int, seed: int) -> Tensor:
    """(T,) bool: the steps that get noise in iteration `step`; the others run the ODE and are not trained.

    `all`; `all_but_last`; `random:SIZE`, a window drawn per iteration; `slide:SIZE:EVERY`, a window that starts at the
    first step, advances by one every EVERY (25) iterations and wraps around (MixGRPO). All ranks get the same steps.
    """
    inside = torch.zeros(num_steps, dtype=torch.bool)
    kind, *numbers = window.split(":")
    if not numbers and kind in ("all", "all_but_last"):
        inside[: num_steps - (kind == "all_but_last")] = True
        return inside
    if kind not in ("random", "slide") or not 1 <= len(numbers) <= 1 + (kind == "slide") or "" in numbers:
        raise ValueError(f"sde_window is {window!r}; write all, all_but_last, random:SIZE or slide:SIZE[:EVERY]")
    if not all(number.isdigit() and int(number) for number in numbers) or int(numbers[0]) > num_steps:
        raise ValueError(f"sde_window is {window!r}; its numbers must be whole, and SIZE at most {num_steps} steps")
    size, every = int(numbers[0]), int(numbers[1]) if len(numbers) > 1 else 25
    places = num_steps - size + 1
    start = rng.integer(places, seed, "window", step=step) if kind == "random" else (step // every) % places
    inside[start : start + size] = True
    return inside


def num_trained(stochastic: Tensor, fraction: float) -> int:
    """How many denoising steps each clip trains."""
    return max(1, round(fraction * int(stochastic.sum())))


def training_order(
    stochastic: Tensor, fraction: float, permute: bool, seed: int, step: int, micro_batch: MicroBatch
) -> Tensor:
    """(B, K) denoising steps that each clip trains: a subset of the stochastic ones, in a separate order per clip."""
    steps = stochastic.nonzero().flatten().cpu()
    kept = num_trained(stochastic, fraction)
    if not permute:
        return steps[:kept].expand(len(micro_batch.samples), -1)
    orders = [
        rng.permutation(len(steps), seed, "permutation", step=step, prompt=p, sample=s)
        for p, s in zip(micro_batch.prompts, micro_batch.samples, strict=True)
    ]
    return torch.stack([steps[order[:kept]] for order in orders])


@torch.no_grad()
def roll_out(
    backbone: Backbone,
    schedule: Schedule,
    micro_batch: MicroBatch,
    cond: Conditioning,
    guidance: Guidance,
    shape: Sequence[int],
    seed: int,
    step: int,
    order: Tensor,
    init_samples: Sequence[int] | None = None,
) -> Trajectory:
    """Sample a micro-batch with the exploration noise of iteration `step`.

    Non-finite trajectories are zeroed and flagged: they must not turn other clips' gradients into NaN.
    """
    device = schedule.sigmas.device
    x, noise = counter_noise(shape, seed, micro_batch.samples, "rollout", micro_batch.prompts, step, init_samples)
    transitions = list(denoise(backbone, schedule, x.to(device), cond, guidance, noise))
    path = torch.stack([x.to(device), *(t.x_next for t in transitions)], 1)
    velocity = torch.stack([t.velocity for t in transitions], 1)
    is_finite = path.flatten(1).isfinite().all(1) & velocity.flatten(1).isfinite().all(1)
    for values in (path, velocity):
        values[~is_finite] = 0.0
    log_prob = torch.stack([t.log_prob for t in transitions], 1)
    return Trajectory(
        micro_batch=micro_batch,
        cond=cond,
        x=path,
        velocity=velocity,
        log_prob=torch.where(is_finite[:, None], log_prob, 0.0),
        is_finite=is_finite,
        order=order.to(device),
    )


def at_steps(values: Tensor, steps: Tensor) -> Tensor:
    """Row b of `values` (B, S, ...) at steps[b]: (B, ...)."""
    return values[torch.arange(len(values), device=values.device), steps]
