"""GRPO (Eq. 4, 10, 33-35): group-relative advantages, the clipped loss, and training diagnostics.

Differences from textbook GRPO: a log-probability is the mean over the elements of a video, hence the tiny clip range;
a reward may fail, and then stays NaN; the reference model is in trust_region.py.
Shapes: N rollouts, P (rollout, step) pairs, T denoising steps.
"""

from dataclasses import dataclass

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


def group_advantages(
    rewards: Tensor, groups: Tensor, advantage_std: str = "group", adv_clip_max: float = 5.0, eps: float = 1e-6
) -> Advantages:
    """A_i = (r_i - mean) / (std + eps) over the finite rewards of i's group, population std, clipped (Eq. 10).

    `rewards` (N,) of the full batch, gathered over ranks; `groups` (N,) any integer per prompt. A NaN reward has
    failed: its rollout is excluded from the statistics. `advantage_std`: `group`; `batch`, one std over all finite
    rewards; `none`, no division.
    """
    if advantage_std not in ADVANTAGE_STDS:
        raise ValueError(f"advantage_std is {advantage_std!r}; choose one of {', '.join(ADVANTAGE_STDS)}")
    if rewards.ndim != 1 or groups.shape != rewards.shape:
        raise ValueError(f"rewards {tuple(rewards.shape)} and groups {tuple(groups.shape)} must be two equal lists")
    if not rewards.is_floating_point():
        raise ValueError(f"rewards are {rewards.dtype}; pass floating-point numbers, advantages are fractions")
    names, group_of = torch.unique(groups, return_inverse=True)
    finite = rewards.isfinite()
    r, home = rewards[finite].double(), group_of[finite]  # finite rewards and their groups

    def per_group(values: Tensor, reduce: str) -> Tensor:
        return values.new_zeros(len(names)).scatter_reduce(0, home, values, reduce, include_self=False)

    count = per_group(torch.ones_like(r), "sum")
    flat = per_group(r, "amax") == per_group(r, "amin")
    scaled = r - per_group(r, "mean")[home]
    if advantage_std == "group":
        scaled = scaled / (per_group(scaled.square(), "mean").sqrt()[home] + eps)
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
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - clip_range, 1 + clip_range))


def objective(policy: Tensor, scale: Tensor, kl: Tensor | float, kl_coef: float, num_pairs: int) -> Tensor:
    """Eq. 43, with a plus: sum over these pairs of S_t policy_t + lambda L_KL, divided by the planned number of pairs.

    `num_pairs` counts all pairs of the update on all ranks, trained or failed, so that micro-batches add up.
    """
    return (scale * policy + kl_coef * kl).sum() / num_pairs


SUMS = ("count", "ratio_mean", "log_ratio_mean", "approx_kl", "clip_fraction", "clip_low", "clip_high")


@dataclass(frozen=True)
class PolicyStats:
    """Sums over pairs per denoising step. Micro-batches and ranks (sum and max) can be combined exactly."""

    sums: Tensor  # (len(SUMS), T) fp64
    max_deviation: Tensor  # (T,) largest |ratio - 1|

    def __add__(self, other: "PolicyStats") -> "PolicyStats":
        return PolicyStats(self.sums + other.sums, torch.maximum(self.max_deviation, other.max_deviation))

    def overall(self) -> dict[str, float]:
        """Each metric over all pairs; NaN if there are none."""
        total = self.sums.sum(1)
        means = (total[1:] / total[0]).tolist()
        deviation = self.max_deviation.max().item() if total[0] > 0 else float("nan")
        return dict(zip(SUMS[1:], means, strict=True)) | {"ratio_max_deviation": deviation}

    def per_step(self) -> dict[str, list[float]]:
        """Each metric for each denoising step; NaN at steps that were not trained."""
        means = (self.sums[1:] / self.sums[0]).tolist()
        deviation = torch.where(self.sums[0] > 0, self.max_deviation, torch.nan)
        return dict(zip(SUMS[1:], means, strict=True)) | {"ratio_max_deviation": deviation.tolist()}


@torch.no_grad()
def policy_stats(
    log_ratio: Tensor, advantages: Tensor, steps: Tensor, num_steps: int, clip_range: float
) -> PolicyStats:
    """The usual PPO diagnostics, by denoising step `steps` (P,).

    approx_kl is Schulman's non-negative estimator mean(ratio - 1 - log ratio). clip_fraction counts |ratio - 1| beyond
    the range; clip_high and clip_low, the pairs where that removes the gradient (A > 0 above, A < 0 below).
    """
    log_ratio = log_ratio.double()
    deviation = log_ratio.expm1()
    above, below = deviation > clip_range, deviation < -clip_range
    columns = (
        torch.ones_like(deviation),
        1 + deviation,
        log_ratio,
        deviation - log_ratio,
        (above | below).double(),
        (below & (advantages < 0)).double(),
        (above & (advantages > 0)).double(),
    )
    sums = torch.zeros(len(SUMS), num_steps, dtype=torch.float64, device=log_ratio.device)
    sums.index_add_(1, steps, torch.stack(columns))
    largest = torch.zeros_like(sums[0]).scatter_reduce(0, steps, deviation.abs(), "amax")
    return PolicyStats(sums, largest)
