"""The loss of a rollout: Eq. 4, 10, 40 and 43 on stored trajectories.

Shapes: B clips of a micro-batch, one denoising step each: B pairs.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sage_grpo.algo.equalizer import equalizer
from sage_grpo.algo.grpo import normalized_log_ratio, objective, policy_columns
from sage_grpo.algo.sde import Schedule
from sage_grpo.algo.trust_region import rollout_kl
from sage_grpo.models.backbone import Backbone, Guidance
from sage_grpo.train.algorithms.base import Algorithm
from sage_grpo.train.metrics import UpdateStats
from sage_grpo.train.rollout import Pairs, Trajectory, at_places


class Terms(NamedTuple):
    """Loss terms of each pair; all but `velocity` are (B,)."""

    velocity: Tensor  # (B, ...)
    log_ratio: Tensor
    policy: Tensor  # the algorithm's loss
    to_anchor: Tensor  # closed-form KL
    to_rollout: Tensor  # closed-form KL
    kl: Tensor  # L_KL of Eq. 40, weighted by step


@dataclass(eq=False)
class Objective:
    """What one optimizer step minimizes."""

    backbone: Backbone
    algorithm: Algorithm
    guidance: Guidance  # of the trained velocities
    schedule: Schedule
    kl_coef: float
    num_pairs: int  # planned pairs of the full optimizer step, over all ranks

    def __post_init__(self) -> None:
        c = self.config = self.algorithm.config
        # factors of each step's policy loss and KL, (T,); the KL is N_t^2 |v - v'|^2 / 2, so that scaled by S_t^2 it
        # depends on velocities alone
        self.scale = equalizer(self.schedule, c.use_grad_balancing, c.ratio_norm)
        self.kl_scale = equalizer(self.schedule, c.use_kl_balancing).square()

    def backward(
        self, trajectory: Trajectory, places: Tensor, advantages: Tensor, stats: UpdateStats
    ) -> Tensor:
        """Accumulate the gradient of the pairs at `places` (B,) of the windows, with `advantages` (B,), one per clip.

        Returns (B,) bool: whether loss and gradient are finite.
        """
        pairs = trajectory.pairs(places, self.schedule.sigmas)
        terms = self.terms(pairs, advantages)
        scale = self.scale[pairs.steps]
        terms.velocity.retain_grad()
        objective(terms.policy, scale, terms.kl, self.kl_coef, self.num_pairs).backward()

        velocity_grad = terms.velocity.grad.flatten(1)
        with torch.no_grad():
            columns = policy_columns(terms.log_ratio, advantages, self.config.clip_range)
            columns["loss"] = terms.policy
            columns["objective"] = scale * terms.policy + self.kl_coef * terms.kl
            columns["kl_anchor"] = terms.to_anchor
            columns["kl_rollout"] = terms.to_rollout
            # gradient norm of each pair with respect to its velocity, without the division by num_pairs
            columns["grad_v"] = self.num_pairs * velocity_grad.norm(dim=1)
            finite_columns = {name: values[pairs.is_finite] for name, values in columns.items()}
            stats.add(pairs.steps[pairs.is_finite], finite_columns)
        return (terms.policy + terms.kl).isfinite() & velocity_grad.isfinite().all(1)

    def terms(self, pairs: Pairs, advantages: Tensor) -> Terms:
        """Rerun the rollout's forward with the current parameters and compute the loss terms."""
        c = self.config
        schedule = self.schedule
        steps = pairs.steps

        # 1. The policy's velocity, by the arithmetic of the rollout.
        velocity = self.backbone.velocity(pairs.x, pairs.sigma, pairs.cond, self.guidance)

        # 2. The log-ratio to the policy that sampled (Eq. 4).
        log_prob = schedule.log_prob(steps, pairs.x, velocity, pairs.outcome)
        log_ratio = log_prob - pairs.old_log_prob
        to_rollout = schedule.kl(steps, velocity, pairs.old_velocity)
        if c.ratio_norm:
            log_ratio = normalized_log_ratio(log_ratio, to_rollout, schedule.std[steps])

        # 3. The dual trust region (Eq. 40): position to the anchor, velocity to the policy that sampled.
        region = c.trust_region
        to_anchor = torch.zeros_like(to_rollout)
        if region.anchor:
            to_anchor = schedule.kl(steps, velocity, pairs.anchor_velocity)
        step_kl = rollout_kl(c.step_kl_estimator, to_rollout, log_prob, pairs.old_log_prob)
        kl = self.kl_scale[steps] * region.kl(to_anchor, step_kl)
        kl = torch.where(pairs.is_finite, kl, 0.0)

        # 4. The algorithm's own loss.
        policy = self.algorithm.policy_loss(pairs, velocity, log_ratio, advantages)
        return Terms(velocity, log_ratio, policy, to_anchor, to_rollout, kl)


@torch.no_grad()
def anchor_velocities(
    backbone: Backbone, guidance: Guidance, schedule: Schedule, trajectory: Trajectory
) -> Tensor:
    """The anchor's velocities (B, W, ...) along a trajectory at its trained steps, 0 elsewhere."""
    velocities = torch.zeros_like(trajectory.velocity)
    rows = torch.arange(trajectory.size, device=velocities.device)
    for places in trajectory.order.T:
        sigma = schedule.sigmas[at_places(trajectory.steps, places)]
        x = at_places(trajectory.x, places)
        velocities[rows, places] = backbone.velocity(x, sigma, trajectory.cond, guidance)
    return velocities
