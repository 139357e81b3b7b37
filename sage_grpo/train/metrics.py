"""Metrics of an iteration: of its update by denoising step, of its rewards, and the duration of each phase."""

import math
import resource
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from sage_grpo.algo.grpo import Advantages
from sage_grpo.parallel.ranks import Ranks
from sage_grpo.rewards.base import Scores

# the names of `policy_metrics`
POLICY = (
    "ratio_mean",
    "log_ratio_mean",
    "approx_kl",
    "clip_fraction",
    "clip_low",
    "clip_high",
)
SUMS = ("pairs", "loss", "objective", "kl_anchor", "kl_rollout", "grad_v", *POLICY)


class UpdateStats:
    """Sums over (rollout, step) pairs per denoising step; they add up over micro-batches, updates and ranks."""

    def __init__(self, num_steps: int, device: torch.device) -> None:
        self.sums = torch.zeros(len(SUMS), num_steps, dtype=torch.float64, device=device)
        self.max_deviation = torch.zeros_like(self.sums[0])  # (T,) largest |ratio - 1|

    def add(self, steps: Tensor, pair_metrics: Mapping[str, Tensor]) -> None:
        """Add metrics of pairs, (P,) each, to the pairs' denoising `steps` (P,)."""
        rows = [pair_metrics[name].double() for name in SUMS[1:]]
        self.sums.index_add_(1, steps, torch.stack([torch.ones_like(rows[0]), *rows]))
        deviation = pair_metrics["log_ratio_mean"].double().expm1().abs()
        self.max_deviation.scatter_reduce_(0, steps, deviation, "amax")

    def __iadd__(self, other: "UpdateStats") -> "UpdateStats":
        self.sums = self.sums + other.sums
        self.max_deviation = self.max_deviation.maximum(other.max_deviation)
        return self

    def sum_over(self, ranks: Ranks) -> None:
        self.sums = ranks.sum(self.sums)
        self.max_deviation = ranks.gather(self.max_deviation[None]).amax(0)

    def mean(self, name: str) -> float:
        """Mean of one of SUMS over all pairs; NaN if there are none."""
        totals = self.sums.sum(1)
        return (totals[SUMS.index(name)] / totals[0]).item()

    def record(self) -> dict[str, Any]:
        """Metrics under their names in docs/metrics.md; NaN where there are no pairs."""
        pairs = self.sums[0]
        record: dict[str, Any] = {
            f"policy/{name}": self.mean(name) for name in ("loss", "objective", *POLICY)
        }
        record["kl/anchor"] = self.mean("kl_anchor")
        record["kl/rollout"] = self.mean("kl_rollout")
        record["policy/ratio_max_deviation"] = math.nan
        if pairs.any():
            record["policy/ratio_max_deviation"] = self.max_deviation.max().item()

        means = dict(zip(SUMS, (self.sums / pairs).tolist(), strict=True))
        per_step = {name: means[name] for name in ("kl_anchor", "kl_rollout", "grad_v", *POLICY)}
        deviation = torch.where(pairs > 0, self.max_deviation, torch.nan)
        per_step["ratio_max_deviation"] = deviation.tolist()
        per_step["count"] = pairs.tolist()
        record["per_step"] = per_step
        return record


class Stopwatch:
    """Seconds per phase of an iteration; `on_phase` is called before each one begins."""

    def __init__(
        self, device: torch.device, on_phase: Callable[[str], None] = lambda name: None
    ) -> None:
        self.device = device
        self.on_phase = on_phase
        self.seconds: dict[str, float] = {}
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
        record = {f"time/{name}": seconds for name, seconds in self.seconds.items()}
        record["time/total"] = self._now() - self.started
        return record

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def reward_record(scores: Scores, advantages: Advantages, group_size: int) -> dict[str, Any]:
    """Reward statistics of a batch: means, spread over the batch and within groups, and failures."""
    total = scores.total
    groups = total.view(-1, group_size)
    group_spread = (groups - groups.nanmean(1, keepdim=True)).square().nanmean(1).sqrt().nanmean()
    record: dict[str, Any] = {
        "reward/total": total.nanmean().item(),
        "reward/std": (total - total.nanmean()).square().nanmean().sqrt().item(),
        "reward/group_std": group_spread.item(),
    }
    for name, values in scores.named.items():
        record[f"reward/{name}"] = values.nanmean().item()
    record["signal/advantage_size"] = math.nan
    if advantages.trained.any():
        trained = advantages.values[advantages.trained]
        record["signal/advantage_size"] = trained.abs().mean().item()
    record["reward/failed"] = advantages.failed
    record["reward/starved_groups"] = advantages.starved_groups
    record["reward/flat_groups"] = advantages.flat_groups
    if scores.errors:
        record["reward/error"] = scores.errors[0]
    return record


def reward_part(record: Mapping[str, Any]) -> dict[str, Any]:
    """What an iteration knows of its rewards, among all of its metrics."""
    return {name: value for name, value in record.items() if name.startswith("reward/")}


def peak_memory() -> float:
    """Peak memory in GB of the GPU, or of the process if there is no GPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
