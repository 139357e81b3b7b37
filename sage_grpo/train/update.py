"""The loss of a rollout and its gradient: Eq. 4, 10, 40 and 43 on stored trajectories.

Shapes: B clips of a micro-batch, one denoising step each: B pairs.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from sage_grpo.algo.equalizer import equalizer
from sage_grpo.algo.grpo import normalised_log_ratio, objective, policy_loss, policy_stats
from sage_grpo.algo.sde import Schedule
from sage_grpo.algo.trust_region import velocity_kl
from sage_grpo.config import Config
from sage_grpo.models.policy import Policy
from sage_grpo.train.metrics import UpdateStats
from sage_grpo.train.rollout import Guidance, Trajectory, at_steps


class Terms(NamedTuple):
    """Of each pair; all but `velocity` (B,)."""

    velocity: Tensor  # (B, ...)
    log_ratio: Tensor
    policy: Tensor  # clipped policy loss
    to_anchor: Tensor  # closed-form KL
    to_rollout: Tensor  # closed-form KL
    kl: Tensor  # L_KL of Eq. 40, weighted by step


@dataclass(frozen=True)
class Objective:
    """What one optimizer step minimises."""

    policy: Policy
    guidance: Guidance
    schedule: Schedule
    config: Config
    kl_coef: float
    num_pairs: int  # planned pairs of the whole optimizer step, over all ranks

    @cached_property
    def scale(self) -> Tensor:
        """(T,), of the policy loss of each step."""
        return equalizer(self.schedule, self.config.use_grad_balancing, self.config.ratio_norm)

    @cached_property
    def kl_scale(self) -> Tensor:
        """(T,), of the KL of each step. It is N_t^2 |v - v'|^2 / 2, and with S_t^2 depends on the velocities alone."""
        return equalizer(self.schedule, self.config.use_kl_balancing).square()

    def backward(self, trajectory: Trajectory, steps: Tensor, advantages: Tensor, stats: UpdateStats) -> Tensor:
        """Add the gradient of these pairs: `steps` (B,) and `advantages` (B,), one of each clip.

        Returns (B,) bool: loss and gradient are finite.
        """
        terms = self.terms(trajectory, steps, advantages)
        terms.velocity.retain_grad()
        total = objective(terms.policy, self.scale[steps], terms.kl, self.kl_coef, self.num_pairs)
        total.backward()
        self._measure(stats, trajectory.sound, steps, advantages, terms)
        return (terms.policy + terms.kl).isfinite() & terms.velocity.grad.flatten(1).isfinite().all(1)

    def terms(self, trajectory: Trajectory, steps: Tensor, advantages: Tensor) -> Terms:
        """The forward that the rollout ran, at other parameters, and what the loss needs of it."""
        schedule, x = self.schedule, at_steps(trajectory.x, steps)
        velocity = self.guidance.velocity(self.policy, x, schedule.sigmas[steps], trajectory.cond)
        log_prob = schedule.log_prob(steps, x, velocity, at_steps(trajectory.x, steps + 1))
        old_velocity, old_log_prob = at_steps(trajectory.velocity, steps), at_steps(trajectory.log_prob, steps)
        to_rollout = schedule.kl(steps, velocity, old_velocity)
        log_ratio = log_prob - old_log_prob
        if self.config.ratio_norm:
            log_ratio = normalised_log_ratio(log_ratio, to_rollout, schedule.std[steps])
        region, to_anchor = self.config.trust_region, torch.zeros_like(to_rollout)
        if region.anchor:  # without velocities of its own the anchor is the policy that made the rollout
            anchor = trajectory.velocity if trajectory.anchor_velocity is None else trajectory.anchor_velocity
            to_anchor = schedule.kl(steps, velocity, at_steps(anchor, steps))
        estimator = self.config.step_kl_estimator
        step_kl = velocity_kl(estimator, schedule, steps, velocity, old_velocity, log_prob, old_log_prob)
        kl = torch.where(trajectory.sound, self.kl_scale[steps] * region.kl(to_anchor, step_kl), 0.0)
        return Terms(
            velocity, log_ratio, policy_loss(log_ratio, advantages, self.config.clip_range), to_anchor, to_rollout, kl
        )

    @torch.no_grad()
    def _measure(self, stats: UpdateStats, sound: Tensor, steps: Tensor, advantages: Tensor, terms: Terms) -> None:
        """`grad_v` is the norm of each pair's own gradient, as if it were the whole batch."""
        gradient = self.num_pairs * terms.velocity.grad.flatten(1).norm(dim=1)
        own = self.scale[steps] * terms.policy + self.kl_coef * terms.kl
        columns = {"loss": terms.policy, "objective": own, "kl_anchor": terms.to_anchor}
        columns |= {"kl_rollout": terms.to_rollout, "grad_v": gradient}
        stats.add(steps[sound], {name: values[sound] for name, values in columns.items()})
        seen = (terms.log_ratio[sound], advantages[sound], steps[sound])
        stats.policy += policy_stats(*seen, self.schedule.num_steps, self.config.clip_range)


@torch.no_grad()
def anchor_velocities(policy: Policy, guidance: Guidance, schedule: Schedule, trajectory: Trajectory) -> Tensor:
    """Velocities (B, T, ...) along a trajectory at the steps that it trains, 0 elsewhere."""
    found, rows = torch.zeros_like(trajectory.velocity), torch.arange(len(trajectory.x), device=trajectory.x.device)
    for steps in trajectory.order.T:
        x = at_steps(trajectory.x, steps)
        found[rows, steps] = guidance.velocity(policy, x, schedule.sigmas[steps], trajectory.cond)
    return found
