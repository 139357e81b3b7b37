"""Metrics of an update per denoising step, and the duration of each phase."""

import resource
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sage_grpo.algo.grpo import Advantages, PolicyStats, policy_stats
from sage_grpo.parallel.ranks import Ranks
from sage_grpo.rewards.composite import Scores

SUMS = ("pairs", "loss", "objective", "kl_anchor", "kl_rollout", "grad_v")


@dataclass
class UpdateStats:
    """Sums over (rollout, step) pairs per denoising step; they add up over micro-batches, updates and ranks."""

    policy: PolicyStats
    sums: Tensor  # (len(SUMS), T) fp64

    @classmethod
    def empty(cls, num_steps: int, device: torch.device) -> "UpdateStats":
        none = torch.zeros(0, device=device)
        steps = torch.zeros(0, dtype=torch.long, device=device)
        sums = torch.zeros(len(SUMS), num_steps, dtype=torch.float64, device=device)
        return cls(policy_stats(none, none, steps, num_steps, 1.0), sums)

    def add(self, steps: Tensor, columns: Mapping[str, Tensor]) -> None:
        """Add the pairs (P,) of `columns` to their denoising `steps` (P,)."""
        rows = torch.stack(
            [torch.ones_like(steps, dtype=torch.float64), *(columns[name].double() for name in SUMS[1:])]
        )
        self.sums.index_add_(1, steps, rows)

    def __add__(self, other: "UpdateStats") -> "UpdateStats":
        return UpdateStats(self.policy + other.policy, self.sums + other.sums)

    def over(self, ranks: Ranks) -> "UpdateStats":
        """These statistics summed over all ranks."""
        policy = PolicyStats(ranks.sum(self.policy.sums), ranks.max(self.policy.max_deviation))
        return UpdateStats(policy, ranks.sum(self.sums))

    def mean(self, name: str) -> float:
        """Mean of one of SUMS over all pairs; NaN if there are none."""
        totals = self.sums.sum(1)
        return (totals[SUMS.index(name)] / totals[0]).item()

    def record(self) -> dict[str, Any]:
        """Metrics under their names in docs/metrics.md."""
        overall = {f"policy/{name}": value for name, value in self.policy.overall().items()}
        overall |= {"policy/loss": self.mean("loss"), "policy/objective": self.mean("objective")}
        overall |= {"kl/anchor": self.mean("kl_anchor"), "kl/rollout": self.mean("kl_rollout")}
        means = (self.sums / self.sums[0]).tolist()
        steps = self.policy.per_step() | {
            name: means[SUMS.index(name)] for name in ("kl_anchor", "kl_rollout", "grad_v")
        }
        return overall | {"per_step": steps | {"count": self.sums[0].tolist()}}


class Stopwatch:
    """Seconds per phase of an iteration; `on_phase` is called before each one begins."""

    def __init__(self, device: torch.device, on_phase: Callable[[str], None] = lambda name: None) -> None:
        self.device, self.on_phase, self.seconds = device, on_phase, {}
        self.started = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.on_phase(name)
        begun = self._now()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + self._now() - begun

    def record(self) -> dict[str, float]:
        return {f"time/{name}": s for name, s in self.seconds.items()} | {"time/total": self._now() - self.started}

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def reward_record(scores: Scores, advantages: Advantages, group_size: int) -> dict[str, Any]:
    """Reward statistics of a batch: means, spread over the batch and within groups, and failures."""
    total = scores.total
    groups = total.view(-1, group_size)
    spread = (groups - groups.nanmean(1, keepdim=True)).square().nanmean(1).sqrt().nanmean()
    record = {"reward/total": total.nanmean(), "reward/std": (total - total.nanmean()).square().nanmean().sqrt()}
    record |= {"reward/group_std": spread} | {f"reward/{n}": values.nanmean() for n, values in scores.named.items()}
    counts = {"failed": advantages.failed, "starved_groups": advantages.starved_groups}
    counts |= {"flat_groups": advantages.flat_groups}
    return (
        {name: value.item() for name, value in record.items()}
        | {f"reward/{name}": value for name, value in counts.items()}
        | ({"reward/error": scores.errors[0]} if scores.errors else {})
    )


def peak_memory() -> float:
    """Peak memory in GB of the GPU, or of the process if there is no GPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
