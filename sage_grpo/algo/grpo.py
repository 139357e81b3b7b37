"""GRPO (Eq. 4, 10, 33-35): group-relative advantages, the clipped loss, and training diagnostics.

Differences from textbook GRPO: a log-probability is the mean over the elements of a video, hence the tiny clip range;
a reward may fail, and then stays NaN; the reference model is in trust_region.py.
Shapes: N rollouts, P (rollout, step) pairs, T denoising steps.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

ADVANTAGE_STDS = ("group", "batch", "none")


@dataclass(frozen=True)
class Advantages:
    values: Tensor  # (N,), 0 where not trained
    trained: Tensor  # (N,) bool
    failed: int  # rollouts whose reward is not finite
    starved_groups: int  # groups with fewer than two finite rewards
    flat_groups: int  # groups whose finite rewards are all equal

    def at(self, rows: Tensor) -> "Advantages":
        """The advantages of these rows; the counts remain those of all rollouts."""
        return replace(self, values=self.values[rows], trained=self.trained[rows])


def centered(advantages: Advantages, group_size: int) -> Advantages:
    """Subtract from each advantage the mean of its group of `group_size`; those without an advantage stay 0.

    For the best and the worst of a larger group, whose advantages need not add up to 0. What all clips pull at, such as
    the guidance that they were sampled with, then cancels as it does in a full group.
    """
    values = advantages.values.view(-1, group_size)
    trained = advantages.trained.view(-1, group_size)
    means = values.sum(dim=1, keepdim=True) / trained.sum(dim=1, keepdim=True).clamp(min=1)
    values = torch.where(trained, values - means, 0.0)
    return replace(advantages, values=values.flatten())


def group_advantages(
    rewards: Tensor,
    groups: Tensor,
    advantage_std: str = "group",
    adv_clip_max: float = 5.0,
    eps: float = 1e-6,
) -> Advantages:
    """A_i = (r_i - mean) / (std + eps) over the finite rewards of i's group, population std, clipped (Eq. 10).

    `rewards` (N,) of the full batch, gathered over ranks; `groups` (N,) any integer per prompt. A NaN reward has
    failed: its rollout is excluded from the statistics. `advantage_std`: `group`; `batch`, one std over all finite
    rewards; `none`, no division.
    """
    if advantage_std not in ADVANTAGE_STDS:
        raise ValueError(
            f"advantage_std is {advantage_std!r}; choose one of {', '.join(ADVANTAGE_STDS)}"
        )
    if rewards.ndim != 1 or groups.shape != rewards.shape:
        raise ValueError(
            f"rewards {tuple(rewards.shape)} and groups {tuple(groups.shape)} must be two equal lists"
        )
    if not rewards.is_floating_point():
        raise ValueError(
            f"rewards are {rewards.dtype}; pass floating-point numbers, advantages are fractions"
        )
    names, group_of = torch.unique(groups, return_inverse=True)
    finite = rewards.isfinite()
    r = rewards[finite].double()
    group_of_r = group_of[finite]

    def per_group(values: Tensor, reduce: str) -> Tensor:
        zeros = values.new_zeros(len(names))
        return zeros.scatter_reduce(0, group_of_r, values, reduce, include_self=False)

    count = per_group(torch.ones_like(r), "sum")
    flat = per_group(r, "amax") == per_group(r, "amin")

    scaled = r - per_group(r, "mean")[group_of_r]
    if advantage_std == "group":
        group_std = per_group(scaled.square(), "mean").sqrt()
        scaled = scaled / (group_std[group_of_r] + eps)
    elif advantage_std == "batch":
        scaled = scaled / (r.std(correction=0) + eps)

    values = torch.zeros_like(rewards)
    values[finite] = scaled.clamp(-adv_clip_max, adv_clip_max).to(rewards.dtype)
    trained = finite & ((count >= 2) & ~flat)[group_of]
    return Advantages(
        values=torch.where(trained, values, 0.0),
        trained=trained,
        failed=int((~finite).sum()),
        starved_groups=int((count < 2).sum()),
        flat_groups=int((flat & (count >= 2)).sum()),
    )


def score_advantages(
    scores: Mapping[str, Tensor],
    weights: Mapping[str, float],
    groups: Tensor,
    advantage_std: str,
    adv_clip_max: float,
) -> Advantages:
    """A_i = sum_k w_k A_ki / sum_k |w_k|, where A_k are the advantages of score k alone; then clipped.

    So scores of a large scale do not drown the others. Without division (`none`) it is the advantage of the weighted
    sum. `scores` (N,) each; a rollout that lacks one has failed. A group is flat if all of its scores are.
    """
    used = {name: weight for name, weight in weights.items() if weight}
    failed = torch.stack([~scores[name].isfinite() for name in used]).any(0)
    by_score = {
        name: group_advantages(
            scores[name].masked_fill(failed, math.nan), groups, advantage_std, math.inf
        )
        for name in used
    }

    scale = 1.0 if advantage_std == "none" else sum(map(abs, used.values()))
    values = torch.stack([used[name] / scale * by_score[name].values for name in used]).sum(0)
    trained = torch.stack([alone.trained for alone in by_score.values()]).any(0)

    first = next(iter(by_score.values()))  # which rollouts failed is the same for all scores
    num_groups = len(torch.unique(groups))
    num_trained_groups = len(torch.unique(groups[trained]))
    return replace(
        first,
        values=values.clamp(-adv_clip_max, adv_clip_max),
        trained=trained,
        flat_groups=num_groups - first.starved_groups - num_trained_groups,
    )


def normalized_log_ratio(log_ratio: Tensor, kl_to_rollout: Tensor, std: Tensor) -> Tensor:
    """`ratio_norm` (GRPO-Guard, arXiv 2510.22319): center and rescale the log-ratio of each step.

    Over the rollout's noise the log-ratio has mean -KL, so a clip range around 1 catches only bad samples once the KL
    exceeds it. Adding the closed-form KL (P,) removes the mean; times std (P,), the spread no longer grows as 1/std.
    """
    return std * (log_ratio + kl_to_rollout)


def policy_loss(log_ratio: Tensor, advantages: Tensor, clip_range: float = 1e-4) -> Tensor:
    """max(-A ratio, -A clip(ratio, 1 +- clip_range)) for each (rollout, step) pair: (P,).

    A pair with zero advantage, such as one from a failed rollout, adds exactly 0, even if its ratio is not finite.
    """
    ratio = torch.where(advantages != 0, log_ratio, 0.0).exp()
    return torch.maximum(
        -advantages * ratio, -advantages * ratio.clamp(1 - clip_range, 1 + clip_range)
    )


def objective(
    policy: Tensor, scale: Tensor, kl: Tensor | float, kl_lambda: float, num_pairs: int
) -> Tensor:
    """Eq. 43, with a plus: sum over these pairs of S_t policy_t + lambda L_KL, divided by the planned number of pairs.

    `num_pairs` counts all pairs of the update on all ranks, trained or failed, so that micro-batches add up.
    """
    return (scale * policy + kl_lambda * kl).sum() / num_pairs


def policy_metrics(log_ratio: Tensor, advantages: Tensor, clip_range: float) -> dict[str, Tensor]:
    """The usual PPO diagnostics of each (rollout, step) pair, (P,) fp64; their means are the metrics.

    approx_kl is Schulman's non-negative estimator ratio - 1 - log ratio. clip_fraction counts |ratio - 1| beyond the
    range; clip_high and clip_low, the pairs where that removes the gradient (A > 0 above, A < 0 below).
    """
    log_ratio = log_ratio.double()
    deviation = log_ratio.expm1()
    above = deviation > clip_range
    below = deviation < -clip_range
    return {
        "ratio_mean": 1 + deviation,
        "log_ratio_mean": log_ratio,
        "approx_kl": deviation - log_ratio,
        "clip_fraction": (above | below).double(),
        "clip_low": (below & (advantages < 0)).double(),
        "clip_high": (above & (advantages > 0)).double(),
    }
