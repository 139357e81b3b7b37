"""The loss of a rollout: Eq. 4, 10, 40 and 43 on stored trajectories.

Shapes: B clips of a micro-batch, one denoising step each: B pairs.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sage_grpo.algo.equalizer import equalizer
from sage_grpo.algo.grpo import normalized_log_ratio, objective, policy_metrics
from sage_grpo.algo.sde import Schedule
from sage_grpo.algo.trust_region import rollout_kl
from sage_grpo.models.backbone import Backbone, Guidance
from sage_grpo.train.algorithms.base import Algorithm
from sage_grpo.train.metrics import UpdateStats
from sage_grpo.train.rollout import Pairs, Trajectory, at_positions


class Terms(NamedTuple):
    """Loss terms of each pair; all but `velocity` are (B,)."""

    velocity: Tensor  # (B, ...)
    log_ratio: Tensor
    policy_loss: Tensor  # of the algorithm
    kl_anchor: Tensor  # closed-form KL to the anchor
    kl_rollout: Tensor  # closed-form KL to the policy that sampled
    kl: Tensor  # L_KL of Eq. 40, weighted by step


@dataclass(eq=False)
class Objective:
    """What one optimizer step minimizes."""

    backbone: Backbone
    algorithm: Algorithm
    guidance: Guidance  # of the trained velocities
    schedule: Schedule
    kl_lambda: float  # of this optimizer step, from `KLController`
    num_pairs: int  # planned pairs of the full optimizer step, over all ranks

    def __post_init__(self) -> None:
        self.config = self.algorithm.config
        c = self.config
        # S_t of each step, (T,), for the policy loss
        self.policy_scale = equalizer(self.schedule, c.use_grad_balancing, c.ratio_norm)
        # S_t^2, for the KL: it cancels the N_t^2 in it (algo/equalizer.py)
        self.kl_scale = equalizer(self.schedule, c.use_kl_balancing).square()

    def backward(
        self, trajectory: Trajectory, positions: Tensor, advantages: Tensor, stats: UpdateStats
    ) -> Tensor:
        """Accumulate the gradient of the pairs at `positions` (B,) in the windows, one per clip.

        advantages: (B,), of the clips. Returns (B,) bool: whether loss and gradient are finite.
        """
        pairs = trajectory.pairs(positions, self.schedule.sigmas)
        terms = self.terms(pairs, advantages)
        scale = self.policy_scale[pairs.steps]
        terms.velocity.retain_grad()
        loss = objective(
            policy=terms.policy_loss,
            scale=scale,
            kl=terms.kl,
            kl_lambda=self.kl_lambda,
            num_pairs=self.num_pairs,
        )
        loss.backward()

        velocity_grad = terms.velocity.grad.flatten(1)
        with torch.no_grad():
            metrics = policy_metrics(terms.log_ratio, advantages, self.config.clip_range)
            metrics["loss"] = terms.policy_loss
            metrics["objective"] = scale * terms.policy_loss + self.kl_lambda * terms.kl
            metrics["kl_anchor"] = terms.kl_anchor
            metrics["kl_rollout"] = terms.kl_rollout
            # gradient norm of each pair with respect to its velocity, without the division by num_pairs
            metrics["grad_v"] = self.num_pairs * velocity_grad.norm(dim=1)
            finite_metrics = {name: values[pairs.is_finite] for name, values in metrics.items()}
            stats.add(pairs.steps[pairs.is_finite], finite_metrics)
        return (terms.policy_loss + terms.kl).isfinite() & velocity_grad.isfinite().all(1)

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
        kl_rollout = schedule.kl(steps, velocity, pairs.old_velocity)
        if c.ratio_norm:
            log_ratio = normalized_log_ratio(log_ratio, kl_rollout, schedule.std[steps])

        # 3. The dual trust region (Eq. 40): position to the anchor, velocity to the policy that sampled.
        region = c.trust_region
        kl_anchor = torch.zeros_like(kl_rollout)
        if region.anchor:
            kl_anchor = schedule.kl(steps, velocity, pairs.anchor_velocity)
        step_kl = rollout_kl(c.step_kl_estimator, kl_rollout, log_prob, pairs.old_log_prob)
        kl = self.kl_scale[steps] * region.kl(kl_anchor, step_kl)
        kl = torch.where(pairs.is_finite, kl, 0.0)

        # 4. The algorithm's own loss.
        return Terms(
            velocity=velocity,
            log_ratio=log_ratio,
            policy_loss=self.algorithm.policy_loss(pairs, velocity, log_ratio, advantages),
            kl_anchor=kl_anchor,
            kl_rollout=kl_rollout,
            kl=kl,
        )


@torch.no_grad()
def anchor_velocities(
    backbone: Backbone, guidance: Guidance, schedule: Schedule, trajectory: Trajectory
) -> Tensor:
    """The anchor's velocities (B, W, ...) along a trajectory at its trained steps, 0 elsewhere."""
    velocities = torch.zeros_like(trajectory.data.velocity)
    rows = torch.arange(trajectory.size, device=velocities.device)
    for positions in trajectory.trained_positions.T:
        sigma = schedule.sigmas[at_positions(trajectory.steps, positions)]
        x = at_positions(trajectory.data.x, positions)
        velocities[rows, positions] = backbone.velocity(x, sigma, trajectory.cond, guidance)
    return velocities
