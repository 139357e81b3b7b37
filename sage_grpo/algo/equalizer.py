"""Temporal gradient equalizer (Eq. 8-9, 36-39): every denoising step pushes the policy equally hard.

log pi = -(x_next - a x - b v)^2 / (2 std^2), so the gradient with respect to v is b noise / std: its expected norm is
N_t = |b_t| / std_t up to a constant that all steps share. It spans a factor of 150 over the default schedule.
"""

import torch
from torch import Tensor

from sage_grpo.algo.sde import Schedule


def gradient_scale(schedule: Schedule, ratio_norm: bool = False) -> Tensor:
    """N_t (T,), Eq. 38; 0 at deterministic steps, which have no gradient.

    With `ratio_norm` the log-ratio is already multiplied by std_t, which leaves |b_t|.
    """
    scale = schedule.b.abs() * schedule.inv_std
    return scale * schedule.std if ratio_norm else scale


def equalizer(
    schedule: Schedule, enabled: bool = True, ratio_norm: bool = False, eps: float = 1e-8
) -> Tensor:
    """S_t (T,), Eq. 9: the factor of step t's policy loss (and, squared, of its KL if enabled).

    The median is over all stochastic steps of the schedule or window, whichever of them a rollout trains, so S_t is
    constant over the run. S_t = 0 at deterministic steps; if not `enabled`, 1 elsewhere.
    """
    trained = schedule.stochastic
    if not trained.any():
        raise ValueError(
            "the schedule has no stochastic step to train: choose an sde_type other than ode, or eta > 0"
        )
    scale = gradient_scale(schedule, ratio_norm)
    balanced = scale[trained].median() / (scale + eps) if enabled else torch.ones_like(scale)
    return torch.where(trained, balanced, 0.0)
