"""GRPO (Eq. 4, 10): explore by an SDE, and make the steps of good clips more likely than those of bad ones."""

from dataclasses import replace

import torch
from torch import Tensor

from sage_grpo.algo.grpo import policy_loss
from sage_grpo.algo.sde import Schedule, flow_sigmas
from sage_grpo.models.backbone import Conditioning, Guidance
from sage_grpo.models.sample import schedule_of
from sage_grpo.train.algorithms.base import Algorithm
from sage_grpo.train.batches import MicroBatch
from sage_grpo.train.rollout import Pairs, RolloutData, RolloutSampler, Trajectory, at_positions


class ExploringSampler(RolloutSampler):
    """The ODE up to the window, noise at each of its steps, the ODE again."""

    def sample(self, micro_batch: MicroBatch, cond: Conditioning, steps: Tensor) -> RolloutData:
        device = self.schedule.sigmas.device
        x, step_noise = self.noise(micro_batch)
        x = self.begin(x.to(device), micro_batch, steps[:, 0], cond)

        states = [x]
        velocities = []
        log_probs = []
        for host_step in steps.T:
            noise = step_noise(host_step).to(device)
            step = host_step.to(device)
            velocity = self.backbone.velocity(x, self.schedule.sigmas[step], cond, self.guidance)
            x, log_prob = self.schedule.step(step, x, velocity, noise)
            states.append(x)
            velocities.append(velocity)
            log_probs.append(log_prob)

        stacked = torch.stack(states, 1)
        velocity = torch.stack(velocities, 1)
        log_prob = torch.stack(log_probs, 1)
        return RolloutData(
            x=stacked[:, :-1],
            outcome=stacked[:, 1:],  # views of the same states, one step later
            velocity=velocity,
            log_prob=log_prob,
            latents=self.finish(x, steps[:, -1] + 1, cond),
        )

    def training_data(self, trajectory: Trajectory) -> RolloutData:
        """The rollout's data, with velocities from a forward of the shape that training uses.

        Needed only for clips that were sampled in other micro-batches: a forward of another shape rounds differently,
        and the first ratio must be exactly 1.
        """
        data = trajectory.data
        velocities = data.velocity.clone()
        log_probs = data.log_prob.clone()
        rows = torch.arange(trajectory.size, device=velocities.device)
        for positions in trajectory.trained_positions.T:
            step = at_positions(trajectory.steps, positions)
            x = at_positions(data.x, positions)
            sigma = self.schedule.sigmas[step]
            velocity = self.backbone.velocity(x, sigma, trajectory.cond, self.guidance)
            velocities[rows, positions] = velocity
            outcome = at_positions(data.outcome, positions)
            log_probs[rows, positions] = self.schedule.log_prob(step, x, velocity, outcome)
        return replace(data, velocity=velocities, log_prob=log_probs)


class Grpo(Algorithm):
    explores = True
    sampler = ExploringSampler
    independent_steps = True

    def schedule(self) -> Schedule:
        """The transition tables of `sde_type`."""
        c = self.config
        sigmas = flow_sigmas(c.num_sampling_steps, c.timestep_shift)
        return schedule_of(c.sde_type, sigmas, c.eta)

    def trained_guidance(self, guidance: Guidance) -> Guidance:
        """The guided velocity is the policy: the gradient flows through both branches."""
        return guidance

    def policy_loss(
        self, pairs: Pairs, velocity: Tensor, log_ratio: Tensor, advantages: Tensor
    ) -> Tensor:
        return policy_loss(log_ratio, advantages, self.config.clip_range)
