"""Rollouts: which clips a rank makes, how they are explored, and what training keeps of them.

Every clip belongs to one prompt, and clips of one forward share it (packed text). Training runs the same micro-batches
through the same function, which is why the first ratio is exactly 1.

Shapes: B clips of a micro-batch, T denoising steps, ... the latent shape (C, t, y, x).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sage_grpo import rng
from sage_grpo.algo.sde import Schedule
from sage_grpo.models.policy import Conditioning, Policy
from sage_grpo.models.sample import counter_noise, denoise


@dataclass(frozen=True)
class Piece:
    """Clips of one prompt that go through the model together."""

    prompt: int  # position in the prompt list
    samples: tuple[int, ...]  # number of each clip among all clips of this prompt in this iteration


@dataclass
class Trajectory:
    """A piece with its path from noise to latents, fp32."""

    piece: Piece
    cond: Conditioning
    x: Tensor  # (B, T + 1, ...)
    velocity: Tensor  # (B, T, ...) of the policy that made it
    log_prob: Tensor  # (B, T)
    sound: Tensor  # (B,) bool: every number of the path is finite
    order: Tensor  # (B, K) the steps to train, in the order of training
    anchor_velocity: Tensor | None = None  # (B, T, ...) at the steps to train

    @property
    def latents(self) -> Tensor:
        return self.x[:, -1]


@dataclass(frozen=True)
class Guidance:
    """What turns a conditioning into the policy's velocity."""

    scale: float
    negative: Conditioning

    def velocity(self, policy: Policy, x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
        return policy.velocity(x, sigma, cond, self.scale, self.negative)


def prompt_positions(step: int, per_step: int, count: int, seed: int) -> list[int]:
    """Positions of the prompts of iteration `step`: each epoch goes through all `count` prompts in a fresh order."""
    numbers = range(step * per_step, (step + 1) * per_step)
    orders = {
        epoch: rng.permutation(count, seed, "prompt_order", step=epoch) for epoch in {n // count for n in numbers}
    }
    return [int(orders[n // count][n % count]) for n in numbers]


def plan(
    positions: Sequence[int], group_size: int, batch_size: int, rank: int, micro_batch_size: int | None
) -> list[Piece]:
    """The pieces of one rank: its `batch_size` rows of the list of all clips, group after group.

    A prompt that comes twice in an iteration goes on counting its samples, so no noise is used twice.
    """
    rows, seen = [], dict.fromkeys(positions, 0)
    for prompt in positions:
        rows += [(prompt, seen[prompt] + number) for number in range(group_size)]
        seen[prompt] += group_size
    mine = rows[rank * batch_size : (rank + 1) * batch_size]
    size = micro_batch_size or min(batch_size, group_size)
    chunks = [mine[start : start + size] for start in range(0, len(mine), size)]
    return [Piece(chunk[0][0], tuple(sample for _, sample in chunk)) for chunk in chunks]


def exploring_steps(window: str, num_steps: int, step: int, seed: int) -> Tensor:
    """(T,) bool, the steps with noise in iteration `step`; the others run the ODE and are not trained.

    `all`; `all_but_last`; `random:SIZE`, a window drawn per iteration; `slide:SIZE:EVERY`, one that starts at the
    first step and moves on by one every EVERY (25) iterations, from the last place back to the first (MixGRPO).
    All ranks get the same.
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


def training_order(stochastic: Tensor, fraction: float, permute: bool, seed: int, step: int, piece: Piece) -> Tensor:
    """(B, K) denoising steps that each clip trains: a share of the stochastic ones, each clip in its own order."""
    steps = stochastic.nonzero().flatten().cpu()
    kept = num_trained(stochastic, fraction)
    if not permute:
        return steps[:kept].expand(len(piece.samples), -1)
    orders = [
        rng.permutation(len(steps), seed, "permutation", step=step, prompt=piece.prompt, sample=s)
        for s in piece.samples
    ]
    return torch.stack([steps[order[:kept]] for order in orders])


@torch.no_grad()
def roll_out(
    policy: Policy,
    schedule: Schedule,
    piece: Piece,
    cond: Conditioning,
    guidance: Guidance,
    shape: Sequence[int],
    seed: int,
    step: int,
    order: Tensor,
    init_samples: Sequence[int] | None = None,
) -> Trajectory:
    """Sample a piece with the exploration noise of iteration `step`.

    A path that left the finite numbers is emptied and marked: it must not turn the gradients of others into NaN.
    """
    device = schedule.sigmas.device
    x, noise = counter_noise(shape, seed, piece.samples, "rollout", piece.prompt, step, init_samples)
    transitions = list(denoise(policy, schedule, x.to(device), cond, guidance.scale, guidance.negative, noise))
    path = torch.stack([x.to(device), *(t.x_next for t in transitions)], 1)
    velocity = torch.stack([t.velocity for t in transitions], 1)
    sound = path.flatten(1).isfinite().all(1) & velocity.flatten(1).isfinite().all(1)
    for values in (path, velocity):
        values[~sound] = 0.0
    log_prob = torch.stack([t.log_prob for t in transitions], 1)
    return Trajectory(piece, cond, path, velocity, torch.where(sound[:, None], log_prob, 0.0), sound, order.to(device))


def at_steps(values: Tensor, steps: Tensor) -> Tensor:
    """Row b of `values` (B, S, ...) at its own step: (B, ...)."""
    return values[torch.arange(len(values), device=values.device), steps]
