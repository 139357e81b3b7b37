"""Metrics for the diagnosis of a run (runs/diagnosis.py), read from training without changing it."""

import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sage_grpo.parallel.fsdp import local_shard
from sage_grpo.parallel.ranks import Ranks
from sage_grpo.rewards.base import Scores
from sage_grpo.train.state import TrainState

THUMBNAIL = (4, 16, 16)  # frames, rows and columns of a clip that its variety is measured on


class HalfGradient:
    """Tells signal from noise in the gradient g of an optimizer step, by that of half of its blocks.

    A fraction f of independent blocks has the squared norm f^2 |signal|^2 + f |noise|^2, so two fractions give both.
    Not known (None) with a single block, and where ranks hold no such part: with sequence parallelism, replicas of
    shards, or a sum that waits (reduce_once).
    """

    def __init__(
        self, parameters: Iterable[Tensor], ranks: Ranks, reduces_gradients_once: bool
    ) -> None:
        self.parameters = list(parameters)
        self.ranks = ranks
        self.sharded = ranks.shard_mesh is not None
        has_part = not (self.sharded and (reduces_gradients_once or ranks.shard_mesh.ndim > 1))
        self.is_known = ranks.sp_size == 1 and has_part
        self.fraction = 1.0  # of the blocks that the squared norm is of; 1: none was recorded
        self.square = 0.0  # squared norm of that fraction's gradient on this rank
        self.signal_fraction: float | None = None  # of signal in |g|^2

    def record_if_half(self, done: int, total: int) -> None:
        """Called after each of the `total` blocks of an optimizer step on this rank."""
        is_half = 2 * done in (total, total + 1)
        if self.is_known and is_half and total > 1:
            self.fraction = done / total
            if not self.sharded:
                self.fraction /= self.ranks.dp_size
            gradients = [p.grad for p in self.parameters if p.grad is not None]
            self.square = sum_of_squares(local_shard(gradient) for gradient in gradients)

    def estimate_signal(self, grad_norm: float) -> None:
        """Set `signal_fraction`, given the norm |g|; by chance it can be negative. All ranks must call."""
        square = self.ranks.sum(torch.tensor(self.square, dtype=torch.float64)).item()
        if not self.sharded:
            square /= self.ranks.dp_size
        f = self.fraction
        self.signal_fraction = None
        if self.is_known and f < 1 and grad_norm > 0:
            self.signal_fraction = (f - square / grad_norm**2) / (f - f**2)
        self.fraction = 1.0


@torch.no_grad()
def diagnosis_metrics(
    state: TrainState,
    ranks: Ranks,
    clips: Sequence[Tensor | None],
    scores: Scores,
    group_size: int,
    signal_fraction: float | None,
    start: str,
) -> dict[str, Any]:
    """The group `signal/` of an iteration's metrics, before the anchor is refreshed. All ranks must call.

    signal_fraction: of `HalfGradient`. start: what this rank was started with, which all ranks must share.
    """
    weights = {name: local_shard(p) for name, p in state.optimization.parameters.items()}
    count = max(1, sum(weight.numel() for weight in weights.values()))
    square = sum_of_squares(weights.values())
    thumbnails = ranks.gather(torch.stack([thumbnail(clip) for clip in clips]))
    record = {
        "signal/gradient": signal_fraction,
        "signal/weight_rms": math.sqrt(square / count),
        "signal/anchor_moved": math.sqrt(_anchor_distance(state, weights) / count),
        "signal/variety": variety(thumbnails, group_size),
        "signal/same_reward": same_reward(scores.total),
    }
    if ranks.dp_size > 1:
        # replicas must agree on the weights; shards differ by nature
        replica_square = 0.0 if ranks.shard_mesh else square
        row = [[zlib.crc32(start.encode()), replica_square]]
        all_ranks = ranks.gather(torch.tensor(row, dtype=torch.float64))
        spread = (all_ranks.amax(0) - all_ranks.amin(0)).tolist()
        record["signal/rank_prompts"] = spread[0]
        record["signal/rank_weights"] = spread[1]
    return record


def _anchor_distance(state: TrainState, weights: Mapping[str, Tensor]) -> float:
    """Squared distance from this rank's weights to the anchor; NaN without one, or if it is in host memory."""
    if not state.anchor or not state.anchor.values:
        return math.nan
    anchor = {name: local_shard(value) for name, value in state.anchor.values.items()}
    if any(anchor[name].device != weights[name].device for name in anchor):
        return math.nan
    return sum_of_squares(weights[name] - value for name, value in anchor.items())


def sum_of_squares(tensors: Iterable[Tensor]) -> float:
    tensors = [tensor.detach() for tensor in tensors]
    if not tensors:
        return 0.0
    norms = torch._foreach_norm(tensors, dtype=torch.float64)
    return torch.stack(norms).square().sum().item()


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
    _, counts = rewards[rewards.isfinite()].unique(return_counts=True)
    repeated = (counts > 1).sum()
    return counts.max().item() / len(rewards) if repeated == 1 else 0.0
