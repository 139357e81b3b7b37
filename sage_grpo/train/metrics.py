"""Metrics of an iteration: of its update per denoising step, of its rewards, the duration of each phase, and signals.

Signals are numbers for the diagnosis of a run (runs/diagnosis.py), read from the state of training without changing it.
"""

import math
import resource
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sage_grpo.algo.grpo import Advantages
from sage_grpo.parallel.fsdp import local_shard
from sage_grpo.parallel.ranks import Ranks
from sage_grpo.rewards.base import Scores

if TYPE_CHECKING:
    from sage_grpo.train.trainer import Trainer

THUMBNAIL = (4, 16, 16)  # frames, rows and columns of a clip that its variety is measured on
POLICY = (
    "ratio_mean",
    "log_ratio_mean",
    "approx_kl",
    "clip_fraction",
    "clip_low",
    "clip_high",
)  # `policy_columns`
SUMS = ("pairs", "loss", "objective", "kl_anchor", "kl_rollout", "grad_v", *POLICY)


class UpdateStats:
    """Sums over (rollout, step) pairs per denoising step; they add up over micro-batches, updates and ranks."""

    def __init__(self, num_steps: int, device: torch.device) -> None:
        self.sums = torch.zeros(len(SUMS), num_steps, dtype=torch.float64, device=device)
        self.max_deviation = torch.zeros_like(self.sums[0])  # (T,) largest |ratio - 1|

    def add(self, steps: Tensor, columns: Mapping[str, Tensor]) -> None:
        """Add the pairs (P,) of `columns` to their denoising `steps` (P,)."""
        rows = [columns[name].double() for name in SUMS[1:]]
        self.sums.index_add_(1, steps, torch.stack([torch.ones_like(rows[0]), *rows]))
        self.max_deviation.scatter_reduce_(
            0, steps, columns["log_ratio_mean"].double().expm1().abs(), "amax"
        )

    def __iadd__(self, other: "UpdateStats") -> "UpdateStats":
        self.sums, self.max_deviation = (
            self.sums + other.sums,
            self.max_deviation.maximum(other.max_deviation),
        )
        return self

    def sum_over(self, ranks: Ranks) -> None:
        self.sums, self.max_deviation = (
            ranks.sum(self.sums),
            ranks.gather(self.max_deviation[None]).amax(0),
        )

    def mean(self, name: str) -> float:
        """Mean of one of SUMS over all pairs; NaN if there are none."""
        totals = self.sums.sum(1)
        return (totals[SUMS.index(name)] / totals[0]).item()

    def record(self) -> dict[str, Any]:
        """Metrics under their names in docs/metrics.md; NaN where there are no pairs."""
        pairs, means = (
            self.sums[0],
            dict(zip(SUMS, (self.sums / self.sums[0]).tolist(), strict=True)),
        )
        deviation = torch.where(pairs > 0, self.max_deviation, torch.nan)
        overall = {f"policy/{name}": self.mean(name) for name in ("loss", "objective", *POLICY)}
        largest = self.max_deviation.max().item() if pairs.any() else math.nan
        overall |= {"kl/anchor": self.mean("kl_anchor"), "kl/rollout": self.mean("kl_rollout")}
        steps = {name: means[name] for name in ("kl_anchor", "kl_rollout", "grad_v", *POLICY)}
        steps |= {"ratio_max_deviation": deviation.tolist(), "count": pairs.tolist()}
        return overall | {"policy/ratio_max_deviation": largest, "per_step": steps}


class Stopwatch:
    """Seconds per phase of an iteration; `on_phase` is called before each one begins."""

    def __init__(
        self, device: torch.device, on_phase: Callable[[str], None] = lambda name: None
    ) -> None:
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
        return {f"time/{name}": s for name, s in self.seconds.items()} | {
            "time/total": self._now() - self.started
        }

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def reward_record(scores: Scores, advantages: Advantages, group_size: int) -> dict[str, Any]:
    """Reward statistics of a batch: means, spread over the batch and within groups, and failures."""
    total = scores.total
    groups = total.view(-1, group_size)
    spread = (groups - groups.nanmean(1, keepdim=True)).square().nanmean(1).sqrt().nanmean()
    found = {
        "total": total.nanmean(),
        "std": (total - total.nanmean()).square().nanmean().sqrt(),
        "group_std": spread,
    }
    found |= {name: values.nanmean() for name, values in scores.named.items()}
    record = {f"reward/{name}": value.item() for name, value in found.items()}
    record |= {
        f"reward/{name}": getattr(advantages, name)
        for name in ("failed", "starved_groups", "flat_groups")
    }
    return record | ({"reward/error": scores.errors[0]} if scores.errors else {})


def peak_memory() -> float:
    """Peak memory in GB of the GPU, or of the process if there is no GPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


class HalfGradient:
    """Tells signal from noise in the gradient g of an optimizer step, by that of half of its pairs.

    A share f of the pairs has the squared norm f^2 |signal|^2 + f |noise|^2, so two shares give both. Not known (None)
    where ranks hold no such share: with sequence parallelism, replicas of shards, or a sum that waits (reduce_once).
    """

    def __init__(self, parameters: Iterable[Tensor], ranks: Ranks, reduces_once: bool) -> None:
        self.parameters, self.ranks, self.sharded = (
            list(parameters),
            ranks,
            ranks.shards is not None,
        )
        self.known = ranks.sp_size == 1 and not (
            self.sharded and (reduces_once or ranks.shards.ndim > 1)
        )
        self.share, self.square, self.signal = 1.0, 0.0, None

    def observe(self, done: int, total: int) -> None:
        """Called after each of the `total` backwards of an optimizer step."""
        if self.known and 2 * done in (total, total + 1):
            self.share = done / total / (1 if self.sharded else self.ranks.count)
            self.square = sum_of_squares(
                local_shard(p.grad) for p in self.parameters if p.grad is not None
            )

    def compare(self, grad_norm: float) -> None:
        """Set `signal`, the share of signal in |g|^2; by chance it can be negative. All ranks must call."""
        total, f = self.ranks.sum(torch.tensor(self.square, dtype=torch.float64)).item(), self.share
        square = total if self.sharded else total / self.ranks.count
        self.signal = (
            (f - square / grad_norm**2) / (f - f**2)
            if self.known and f < 1 and grad_norm > 0
            else None
        )


@torch.no_grad()
def signals(
    trainer: "Trainer", clips: Sequence[Tensor | None], scores: Scores
) -> dict[str, float | None]:
    """Metrics of an iteration, before the anchor is refreshed. All ranks must call."""
    ranks, weights = (
        trainer.ranks,
        {n: local_shard(p) for n, p in trainer.optimization.parameters.items()},
    )
    count, square = (
        max(1, sum(w.numel() for w in weights.values())),
        sum_of_squares(weights.values()),
    )
    anchor = trainer.anchor.values if trainer.anchor else {}
    near = (
        anchor and next(iter(anchor.values())).device == next(iter(weights.values())).device
    )  # else in host memory
    moved = (
        sum_of_squares(weights[name] - local_shard(value) for name, value in anchor.items())
        if near
        else math.nan
    )
    found = {
        "gradient": trainer.half.signal,
        "weight_rms": math.sqrt(square / count),
        "anchor_moved": math.sqrt(moved / count),
        "variety": variety(
            ranks.gather(torch.stack([*map(thumbnail, clips)])), trainer.config.num_generations
        ),
        "same_reward": same_reward(scores.total),
    }
    if ranks.count > 1:
        prompts = zlib.crc32(f"{trainer.fingerprints}, seed {trainer.config.seed}".encode())
        all_ranks = ranks.gather(
            torch.tensor([[prompts, 0.0 if ranks.shards else square]], dtype=torch.float64)
        )
        spread = (all_ranks.amax(0) - all_ranks.amin(0)).tolist()
        found |= dict(zip(("rank_prompts", "rank_weights"), spread, strict=True))
    return {f"signal/{name}": value for name, value in found.items()}


def sum_of_squares(tensors: Iterable[Tensor]) -> float:
    found = [tensor.detach() for tensor in tensors]
    return (
        torch.stack(torch._foreach_norm(found, dtype=torch.float64)).square().sum().item()
        if found
        else 0.0
    )


def thumbnail(clip: Tensor | None) -> Tensor:
    """A few pixels of a uint8 clip (F, H, W, 3), flat, in [0, 1]; NaN for a missing clip."""
    if clip is None:
        return torch.full((3 * math.prod(THUMBNAIL),), math.nan)
    for dim, count in enumerate(THUMBNAIL):
        clip = clip.index_select(dim, torch.linspace(0, clip.shape[dim] - 1, count).long())
    return clip.flatten().float() / 255


def variety(thumbnails: Tensor, group_size: int) -> float:
    """Standard deviation of a pixel over the clips of a group, RMS over pixels and groups; `thumbnails` (N, pixels)."""
    groups = thumbnails.view(-1, group_size, thumbnails.shape[1])
    return (groups - groups.nanmean(1, keepdim=True)).square().nanmean().sqrt().item()


def same_reward(rewards: Tensor) -> float:
    """Share of the rewards (N,) that have one and the same value, while all others differ from each other; else 0."""
    counts = rewards[rewards.isfinite()].unique(return_counts=True)[1]
    return counts.max().item() / len(rewards) if (counts > 1).sum() == 1 else 0.0
