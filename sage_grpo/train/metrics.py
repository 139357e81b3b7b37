"""Metrics of an update per denoising step, and the duration of each phase."""

import math
import resource
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sage_grpo.algo.grpo import Advantages
from sage_grpo.parallel.ranks import Ranks
from sage_grpo.rewards.base import Scores

POLICY = ("ratio_mean", "log_ratio_mean", "approx_kl", "clip_fraction", "clip_low", "clip_high")  # `policy_columns`
SUMS = ("pairs", "loss", "objective", "kl_anchor", "kl_rollout", "grad_v", *POLICY)


@dataclass
class UpdateStats:
    """Sums over (rollout, step) pairs per denoising step; they add up over micro-batches, updates and ranks."""

    sums: Tensor  # (len(SUMS), T) fp64
    max_deviation: Tensor  # (T,) largest |ratio - 1|

    @classmethod
    def empty(cls, num_steps: int, device: torch.device) -> "UpdateStats":
        sums = torch.zeros(len(SUMS), num_steps, dtype=torch.float64, device=device)
        return cls(sums, torch.zeros_like(sums[0]))

    def add(self, steps: Tensor, columns: Mapping[str, Tensor]) -> None:
        """Add the pairs (P,) of `columns` to their denoising `steps` (P,)."""
        rows = [columns[name].double() for name in SUMS[1:]]
        self.sums.index_add_(1, steps, torch.stack([torch.ones_like(rows[0]), *rows]))
        self.max_deviation.scatter_reduce_(0, steps, columns["log_ratio_mean"].double().expm1().abs(), "amax")

    def __add__(self, other: "UpdateStats") -> "UpdateStats":
        return UpdateStats(self.sums + other.sums, torch.maximum(self.max_deviation, other.max_deviation))

    def over(self, ranks: Ranks) -> "UpdateStats":
        """These statistics summed over all ranks."""
        return UpdateStats(ranks.sum(self.sums), ranks.max(self.max_deviation))

    def mean(self, name: str) -> float:
        """Mean of one of SUMS over all pairs; NaN if there are none."""
        totals = self.sums.sum(1)
        return (totals[SUMS.index(name)] / totals[0]).item()

    def record(self) -> dict[str, Any]:
        """Metrics under their names in docs/metrics.md; NaN where there are no pairs."""
        pairs, means = self.sums[0], dict(zip(SUMS, (self.sums / self.sums[0]).tolist(), strict=True))
        deviation = torch.where(pairs > 0, self.max_deviation, torch.nan)
        overall = {f"policy/{name}": self.mean(name) for name in ("loss", "objective", *POLICY)}
        largest = self.max_deviation.max().item() if pairs.any() else math.nan
        overall |= {"kl/anchor": self.mean("kl_anchor"), "kl/rollout": self.mean("kl_rollout")}
        steps = {name: means[name] for name in ("kl_anchor", "kl_rollout", "grad_v", *POLICY)}
        steps |= {"ratio_max_deviation": deviation.tolist(), "count": pairs.tolist()}
        return overall | {"policy/ratio_max_deviation": largest, "per_step": steps}


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
    found = {"total": total.nanmean(), "std": (total - total.nanmean()).square().nanmean().sqrt(), "group_std": spread}
    found |= {name: values.nanmean() for name, values in scores.named.items()}
    record = {f"reward/{name}": value.item() for name, value in found.items()}
    record |= {f"reward/{name}": getattr(advantages, name) for name in ("failed", "starved_groups", "flat_groups")}
    return record | ({"reward/error": scores.errors[0]} if scores.errors else {})


def peak_memory() -> float:
    """Peak memory in GB of the GPU, or of the process if there is no GPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
