"""Numbers for the diagnosis of a run (runs/diagnosis.py), read from the state of training without changing it."""

import math
import zlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sage_grpo.parallel.fsdp import local_shard
from sage_grpo.parallel.ranks import Ranks
from sage_grpo.rewards.base import Scores

if TYPE_CHECKING:
    from sage_grpo.train.trainer import Trainer

THUMBNAIL = (4, 16, 16)  # frames, rows and columns of a clip that its variety is measured on


class HalfGradient:
    """Tells signal from noise in the gradient g of an optimizer step, by that of half of its pairs.

    A share f of the pairs has the squared norm f^2 |signal|^2 + f |noise|^2, so two shares give both. Not known (None)
    where ranks hold no such share: with sequence parallelism, replicas of shards, or a sum that waits (reduce_once).
    """

    def __init__(self, parameters: Iterable[Tensor], ranks: Ranks, reduces_once: bool) -> None:
        self.parameters, self.ranks, self.sharded = list(parameters), ranks, ranks.shards is not None
        self.known = ranks.sp_size == 1 and not (self.sharded and (reduces_once or ranks.shards.ndim > 1))
        self.share, self.square, self.signal = 1.0, 0.0, None

    def observe(self, done: int, total: int) -> None:
        """Called after each of the `total` backwards of an optimizer step."""
        if self.known and 2 * done in (total, total + 1):
            self.share = done / total / (1 if self.sharded else self.ranks.count)
            self.square = sum_of_squares(local_shard(p.grad) for p in self.parameters if p.grad is not None)

    def compare(self, grad_norm: float) -> None:
        """Set `signal`, the share of signal in |g|^2; by chance it can be negative. All ranks must call."""
        total, f = self.ranks.sum(torch.tensor(self.square, dtype=torch.float64)).item(), self.share
        square = total if self.sharded else total / self.ranks.count
        known = self.known and f < 1 and grad_norm > 0
        self.signal = (f - square / grad_norm**2) / (f - f**2) if known else None


@torch.no_grad()
def signals(trainer: "Trainer", clips: Sequence[Tensor | None], scores: Scores) -> dict[str, float | None]:
    """Metrics of an iteration, before the anchor is refreshed. All ranks must call."""
    ranks, weights = trainer.ranks, {n: local_shard(p) for n, p in trainer.optimization.parameters.items()}
    count, square = max(1, sum(w.numel() for w in weights.values())), sum_of_squares(weights.values())
    anchor = trainer.anchor.values if trainer.anchor else {}
    near = anchor and next(iter(anchor.values())).device == next(iter(weights.values())).device  # else in host memory
    moved = sum_of_squares(weights[name] - local_shard(value) for name, value in anchor.items()) if near else math.nan
    found = {
        "gradient": trainer.half.signal,
        "weight_rms": math.sqrt(square / count),
        "anchor_moved": math.sqrt(moved / count),
        "variety": variety(ranks.gather(torch.stack([*map(thumbnail, clips)])), trainer.config.num_generations),
        "same_reward": same_reward(scores.total),
    }
    if ranks.count > 1:
        prompts = zlib.crc32(f"{trainer.fingerprints}, seed {trainer.config.seed}".encode())
        mine = torch.tensor([prompts, 0.0 if ranks.shards else square], dtype=torch.float64)
        both = ranks.max(torch.stack([mine, -mine])).sum(0).tolist()  # largest minus smallest
        found |= dict(zip(("rank_prompts", "rank_weights"), both, strict=True))
    return {f"signal/{name}": value for name, value in found.items()}


def sum_of_squares(tensors: Iterable[Tensor]) -> float:
    norms = [torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64) for tensor in tensors]
    return torch.stack(norms).square().sum().item() if norms else 0.0


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
