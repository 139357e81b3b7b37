"""What awm and nft share: clips sampled without exploration, then noised again and matched (algo/matching.py)."""

import torch
from torch import Tensor

from sage_grpo.algo.matching import matching_schedule, noised
from sage_grpo.algo.sde import Schedule, flow_sigmas
from sage_grpo.models.backbone import Conditioning, Guidance
from sage_grpo.train.algorithms.base import Algorithm
from sage_grpo.train.batches import MicroBatch
from sage_grpo.train.rollout import RolloutData, RolloutSampler, Trajectory


class NoisedSampler(RolloutSampler):
    """Samples by the ODE, in `tail_steps` of `tail_solver` if given.

    Clips that are trained are noised to the levels that they train, where the policy that sampled predicts velocities.
    """

    def steps_and_positions(self, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Only the trained steps, in training order: of the others nothing is kept."""
        steps, positions = super().steps_and_positions(micro_batch)
        trained_steps = steps.gather(1, positions)
        return trained_steps, torch.arange(positions.shape[1]).expand_as(positions)

    def sample(self, micro_batch: MicroBatch, cond: Conditioning, steps: Tensor) -> RolloutData:
        x, _ = self.noise(micro_batch)
        x = x.to(self.schedule.sigmas.device)
        return RolloutData.of_latents(self.finish(x, torch.zeros_like(steps[:, 0]), cond))

    def training_data(self, trajectory: Trajectory) -> RolloutData:
        latents = trajectory.data.latents
        _, step_noise = self.noise(trajectory.micro_batch)

        states = []
        targets = []
        velocities = []
        log_probs = []
        for step in trajectory.steps.T:
            noise = step_noise(step).to(latents.device)
            sigma = self.schedule.sigmas[step]
            state, target = noised(latents, sigma, noise)
            velocity = self.backbone.velocity(state, sigma, trajectory.cond, Guidance())
            states.append(state)
            targets.append(target)
            velocities.append(velocity)
            log_probs.append(self.schedule.log_prob(step, state, velocity, target))

        return RolloutData(
            x=torch.stack(states, 1),
            outcome=torch.stack(targets, 1),
            velocity=torch.stack(velocities, 1),
            log_prob=torch.stack(log_probs, 1),
            latents=latents,
        )


class Matching(Algorithm):
    explores = False
    sampler = NoisedSampler
    independent_steps = False

    def schedule(self) -> Schedule:
        """Tables by which the log-probability of a target is minus the squared error of the velocity."""
        c = self.config
        return matching_schedule(flow_sigmas(c.num_sampling_steps, c.timestep_shift))

    def trained_guidance(self, guidance: Guidance) -> Guidance:
        """The unguided velocity is trained, as in both papers, even if clips were sampled with guidance."""
        return Guidance()
