"""The algorithms behind `--algorithm`, and the loss of a rollout: Eq. 4, 10, 40 and 43 on stored trajectories.

Shapes: B clips of a micro-batch, one denoising step each: B pairs.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sage_grpo.algo.equalizer import equalizer
from sage_grpo.algo.grpo import normalized_log_ratio, objective, policy_columns, policy_loss
from sage_grpo.algo.matching import matching_schedule, nft_loss
from sage_grpo.algo.sde import Schedule, build_schedule, flow_sigmas
from sage_grpo.algo.trust_region import velocity_kl
from sage_grpo.config.fields import Config
from sage_grpo.models.backbone import Backbone, Guidance
from sage_grpo.plugins import resolved
from sage_grpo.train.metrics import UpdateStats
from sage_grpo.train.rollout import NoisedRollouts, Rollouts, Trajectory, at_steps


@dataclass(frozen=True)
class Algorithm:
    """What differs between algorithms."""

    rollouts: type[Rollouts]
    explores: (
        bool  # by the noise of an SDE, whose guided velocities it trains; else without guidance
    )


ALGORITHMS = {
    "grpo": Algorithm(Rollouts, explores=True),
    "awm": Algorithm(NoisedRollouts, explores=False),
    "nft": Algorithm(NoisedRollouts, explores=False),
}


def sampler_of(c: Config) -> Schedule:
    """The schedule of the algorithm's log-probabilities."""
    sigmas, explores = (
        flow_sigmas(c.num_sampling_steps, c.timestep_shift),
        ALGORITHMS[c.algorithm].explores,
    )
    return (
        build_schedule(resolved(c.sde_type), sigmas, c.eta)
        if explores
        else matching_schedule(sigmas)
    )


class Terms(NamedTuple):
    """Loss terms of each pair; all but `velocity` are (B,)."""

    velocity: Tensor  # (B, ...)
    log_ratio: Tensor
    policy: Tensor  # clipped policy loss
    to_anchor: Tensor  # closed-form KL
    to_rollout: Tensor  # closed-form KL
    kl: Tensor  # L_KL of Eq. 40, weighted by step


@dataclass(eq=False)
class Objective:
    """What one optimizer step minimizes."""

    backbone: Backbone
    guidance: Guidance
    schedule: Schedule
    config: Config
    kl_coef: float
    num_pairs: int  # planned pairs of the full optimizer step, over all ranks

    def __post_init__(self) -> None:
        """Factors of each step's policy loss and KL, (T,). The KL is N_t^2 |v - v'|^2 / 2; scaled by S_t^2 only
        velocities matter."""
        self.scale = equalizer(
            self.schedule, self.config.use_grad_balancing, self.config.ratio_norm
        )
        self.kl_scale = equalizer(self.schedule, self.config.use_kl_balancing).square()

    def backward(
        self, trajectory: Trajectory, places: Tensor, advantages: Tensor, stats: UpdateStats
    ) -> Tensor:
        """Accumulate the gradient of these pairs: `places` (B,) in the windows and `advantages` (B,), one per clip.

        Returns (B,) bool: whether loss and gradient are finite.
        """
        steps, terms = (
            at_steps(trajectory.steps, places),
            self.terms(trajectory, places, advantages),
        )
        terms.velocity.retain_grad()
        objective(
            terms.policy, self.scale[steps], terms.kl, self.kl_coef, self.num_pairs
        ).backward()
        with torch.no_grad():
            columns = policy_columns(terms.log_ratio, advantages, self.config.clip_range) | {
                "loss": terms.policy,
                "objective": self.scale[steps] * terms.policy + self.kl_coef * terms.kl,
                "kl_anchor": terms.to_anchor,
                "kl_rollout": terms.to_rollout,
                # the norm of each pair's gradient, as if it were the full batch
                "grad_v": self.num_pairs * terms.velocity.grad.flatten(1).norm(dim=1),
            }
            kept = trajectory.is_finite
            stats.add(steps[kept], {name: values[kept] for name, values in columns.items()})
        return (terms.policy + terms.kl).isfinite() & terms.velocity.grad.flatten(1).isfinite().all(
            1
        )

    def terms(self, trajectory: Trajectory, places: Tensor, advantages: Tensor) -> Terms:
        """Rerun the rollout's forward with the current parameters and compute the loss terms."""
        schedule, x, steps = (
            self.schedule,
            at_steps(trajectory.x, places),
            at_steps(trajectory.steps, places),
        )
        sigma, x_next = schedule.sigmas[steps], at_steps(trajectory.x_next, places)
        velocity = self.backbone.velocity(x, sigma, trajectory.cond, self.guidance)
        log_prob = schedule.log_prob(steps, x, velocity, x_next)
        old_velocity, old_log_prob = (
            at_steps(trajectory.velocity, places),
            at_steps(trajectory.log_prob, places),
        )
        to_rollout = schedule.kl(steps, velocity, old_velocity)
        log_ratio = log_prob - old_log_prob
        if self.config.ratio_norm:
            log_ratio = normalized_log_ratio(log_ratio, to_rollout, schedule.std[steps])
        region, to_anchor = self.config.trust_region, torch.zeros_like(to_rollout)
        if (
            region.anchor
        ):  # without stored velocities, the anchor is the policy that made the rollout
            anchor = (
                trajectory.velocity
                if trajectory.anchor_velocity is None
                else trajectory.anchor_velocity
            )
            to_anchor = schedule.kl(steps, velocity, at_steps(anchor, places))
        step_kl = velocity_kl(self.config.step_kl_estimator, to_rollout, log_prob, old_log_prob)
        kl = torch.where(
            trajectory.is_finite, self.kl_scale[steps] * region.kl(to_anchor, step_kl), 0.0
        )
        c, policy = self.config, policy_loss(log_ratio, advantages, self.config.clip_range)
        if c.algorithm == "nft":
            policy = nft_loss(
                velocity, old_velocity, x_next, sigma, advantages, c.nft_beta, c.adv_clip_max
            )
        return Terms(velocity, log_ratio, policy, to_anchor, to_rollout, kl)


@torch.no_grad()
def anchor_velocities(
    backbone: Backbone, guidance: Guidance, schedule: Schedule, trajectory: Trajectory
) -> Tensor:
    """The anchor's velocities (B, W, ...) along a trajectory at its trained steps, 0 elsewhere."""
    found, rows = (
        torch.zeros_like(trajectory.velocity),
        torch.arange(len(trajectory.x), device=trajectory.x.device),
    )
    for places in trajectory.order.T:
        sigma = schedule.sigmas[at_steps(trajectory.steps, places)]
        found[rows, places] = backbone.velocity(
            at_steps(trajectory.x, places), sigma, trajectory.cond, guidance
        )
    return found
