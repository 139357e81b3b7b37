"""The algorithms behind `--algorithm`: how each samples clips, and what its log-probabilities are of.

Losses are in `algo/`, and chosen in `update.py`.
"""

from dataclasses import dataclass

import torch

from sage_grpo.algo.matching import matching_schedule, noised
from sage_grpo.algo.sde import Schedule, build_schedule, flow_sigmas
from sage_grpo.config import Config
from sage_grpo.models.backbone import Guidance
from sage_grpo.plugins import resolved
from sage_grpo.train.rollout import MicroBatch, Rollouts, Trajectory


class NoisedRollouts(Rollouts):
    """Samples by the ODE, in `tail_steps` of second order if given, and noises the clips again, as matching needs it.

    Of the noise levels in the window, each clip gets those that it trains.
    """

    @torch.no_grad()
    def __call__(self, micro_batch: MicroBatch) -> Trajectory:
        device, (_, start) = self.sampler.sigmas.device, self.groups(micro_batch)
        cond, order = self.conditioning([prompt for prompt, _ in micro_batch]), self.order(micro_batch)
        x, noise = self.noise(micro_batch)
        latents = self.finish(x.to(device), torch.zeros_like(start), cond)
        steps = start[:, None] + torch.arange(self.windows.size)
        states, targets, velocities = (latents.new_zeros(*steps.shape, *latents.shape[1:]) for _ in range(3))
        log_probs, rows = latents.new_zeros(steps.shape), torch.arange(len(steps))
        for places in order.T:
            i = steps[rows, places]
            at = i.to(device)
            state, target = noised(latents, self.sampler.sigmas[at], noise(i).to(device))
            velocity = self.backbone.velocity(state, self.sampler.sigmas[at], cond, Guidance())
            states[rows, places], targets[rows, places], velocities[rows, places] = state, target, velocity
            log_probs[rows, places] = self.sampler.log_prob(at, state, velocity, target)
        return self.trajectory(micro_batch, cond, steps, states, targets, velocities, log_probs, latents)


@dataclass(frozen=True)
class Algorithm:
    """What differs between algorithms."""

    rollouts: type[Rollouts]
    explores: bool  # by the noise of an SDE, whose guided velocities it trains; else without guidance
    lagging: bool = False  # the rollout's policy is the average of the trained ones


ALGORITHMS = {
    "grpo": Algorithm(Rollouts, explores=True),
    "awm": Algorithm(NoisedRollouts, explores=False),
    "nft": Algorithm(NoisedRollouts, explores=False, lagging=True),
}


def sampler_of(c: Config) -> Schedule:
    """The schedule of the algorithm's log-probabilities."""
    sigmas, explores = flow_sigmas(c.num_sampling_steps, c.timestep_shift), ALGORITHMS[c.algorithm].explores
    return build_schedule(resolved(c.sde_type), sigmas, c.eta) if explores else matching_schedule(sigmas)
