"""Rollouts: from noise to latents, and what training keeps of the way there.

All clips in one forward share a prompt (packed text), or have prompts of equal length. Training runs the same
micro-batches through the same function, which is why the first ratio is exactly 1.

Shapes: B clips of a micro-batch, W denoising steps of a window, K of them trained, ... the shape (C, t, y, x) of the
free elements of a clip's latents, which may differ between micro-batches.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sage_grpo import rng
from sage_grpo.algo.sde import Schedule, flow_sigmas
from sage_grpo.config.fields import Config
from sage_grpo.models.backbone import Backbone, Conditioning, Guidance
from sage_grpo.models.embeddings import shared_or_stacked
from sage_grpo.models.sample import Noise, counter_noise, integrate
from sage_grpo.train.batches import GroupId, MicroBatch, group_of
from sage_grpo.train.windows import Windows, num_trained


@dataclass
class RolloutData:
    """What a rollout keeps of a micro-batch, fp32; W is 0 for awm and nft, which noise the clips they train later."""

    x: Tensor  # (B, W, ...) states before the steps of the window
    # (B, W, ...) what has the log-probability: the next states, or the targets to match
    outcome: Tensor
    velocity: Tensor  # (B, W, ...) predicted by the policy that sampled
    log_prob: Tensor  # (B, W)
    latents: Tensor  # (B, ...) the clips

    @classmethod
    def of_latents(cls, latents: Tensor) -> "RolloutData":
        """Clips (B, ...) of which no step is kept."""
        no_states = latents.unsqueeze(1)[:, :0]
        return cls(
            x=no_states,
            outcome=no_states,
            velocity=no_states,
            log_prob=latents.new_zeros(len(latents), 0),
            latents=latents,
        )

    def split(self, sizes: Sequence[int]) -> list["RolloutData"]:
        """Consecutive parts of so many clips."""
        parts = {name: values.split(sizes) for name, values in vars(self).items()}
        return [
            RolloutData(**{name: split[number] for name, split in parts.items()})
            for number in range(len(sizes))
        ]

    def finite_rows(self) -> Tensor:
        """(B,) bool: whether everything of a clip is finite."""
        parts = [values.isfinite().flatten(1).all(1) for values in vars(self).values()]
        return torch.stack(parts).all(0)

    def clear(self, rows: Tensor) -> None:
        """Set clips, (B,) bool, to zero: a non-finite one would turn other clips' gradients into NaN."""
        for values in vars(self).values():
            values[rows] = 0.0


@dataclass
class Pairs:
    """One denoising step of each clip of a micro-batch: B (clip, step) pairs."""

    cond: Conditioning
    steps: Tensor  # (B,) denoising steps
    sigma: Tensor  # (B,) their noise levels
    x: Tensor  # (B, ...)
    outcome: Tensor  # (B, ...)
    old_velocity: Tensor  # (B, ...) of the policy that sampled
    old_log_prob: Tensor  # (B,)
    anchor_velocity: Tensor  # (B, ...)
    is_finite: Tensor  # (B,) bool


@dataclass
class Trajectory:
    """The trajectory of one micro-batch, fp32. Of the ODE outside the windows, only the end is kept."""

    micro_batch: MicroBatch
    cond: Conditioning
    steps: Tensor  # (B, W) the denoising steps of each clip's window, or those that it trains
    # (B, K) the positions in each clip's window that are trained, in training order
    trained_positions: Tensor
    data: RolloutData
    is_finite: Tensor  # (B,) bool: whether all data of a clip is finite; else it is zero
    # (B, W, ...); None while the anchor is the policy that sampled
    anchor_velocity: Tensor | None = None

    @property
    def size(self) -> int:
        """Number of clips."""
        return len(self.micro_batch)

    def pairs(self, positions: Tensor, sigmas: Tensor) -> Pairs:
        """The pairs at these positions (B,) in the windows, one per clip; `sigmas` (T+1,) are the sampler's levels."""
        data = self.data
        steps = at_positions(self.steps, positions)
        anchor_velocity = data.velocity if self.anchor_velocity is None else self.anchor_velocity
        return Pairs(
            cond=self.cond,
            steps=steps,
            sigma=sigmas[steps],
            x=at_positions(data.x, positions),
            outcome=at_positions(data.outcome, positions),
            old_velocity=at_positions(data.velocity, positions),
            old_log_prob=at_positions(data.log_prob, positions),
            anchor_velocity=at_positions(anchor_velocity, positions),
            is_finite=self.is_finite,
        )


def at_positions(values: Tensor, positions: Tensor) -> Tensor:
    """Row b of `values` (B, W, ...) at positions[b]: (B, ...)."""
    return values[torch.arange(len(values), device=values.device), positions]


@dataclass
class RolloutSampler(ABC):
    """Samples the micro-batches of one iteration on one rank, and prepares those that are trained.

    Subclasses define how clips are sampled and what training needs. With `same_init_noise` the clips of a group are
    identical up to their window, and the way there is computed once.
    """

    backbone: Backbone
    schedule: Schedule
    windows: Windows
    guidance: Guidance
    shape: Sequence[int]  # of one clip's latents, free or not
    config: Config
    iteration: int
    conditions: Mapping[int, Conditioning]  # by prompt index
    # the states in which groups enter their windows
    group_states: dict[GroupId, Tensor] = field(default_factory=dict)

    @abstractmethod
    def sample(self, micro_batch: MicroBatch, cond: Conditioning, steps: Tensor) -> RolloutData:
        """Sample clips whose windows have these `steps` (B, W)."""

    @abstractmethod
    def training_data(self, trajectory: Trajectory) -> RolloutData:
        """What training needs of clips that were sampled, computed by the policy that sampled them."""

    @torch.no_grad()
    def roll_out(self, micro_batch: MicroBatch) -> Trajectory:
        """Sample clips; non-finite ones are zeroed and flagged."""
        cond = self.conditioning([clip.prompt_index for clip in micro_batch])
        steps, _ = self.steps_and_positions(micro_batch)
        data = self.sample(micro_batch, cond, steps)
        is_finite = data.finite_rows()
        data.clear(~is_finite)
        return self.trajectory(micro_batch, data, is_finite)

    @torch.no_grad()
    def prepare_for_training(self, trajectory: Trajectory) -> Trajectory:
        """Add what training needs to a sampled trajectory; flag clips where it is non-finite."""
        data = self.training_data(trajectory)
        is_finite = trajectory.is_finite & data.finite_rows()
        data.clear(~is_finite)
        return self.trajectory(trajectory.micro_batch, data, is_finite)

    def trajectory(
        self, micro_batch: MicroBatch, data: RolloutData, is_finite: Tensor
    ) -> Trajectory:
        """The trajectory of clips whose data is known."""
        device = self.schedule.sigmas.device
        steps, trained_positions = self.steps_and_positions(micro_batch)
        return Trajectory(
            micro_batch=micro_batch,
            cond=self.conditioning([clip.prompt_index for clip in micro_batch]),
            steps=steps.to(device),
            trained_positions=trained_positions.to(device),
            data=data,
            is_finite=is_finite,
        )

    def steps_and_positions(self, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """A trajectory's `steps` (B, W) and `trained_positions` (B, K)."""
        c = self.config
        positions = torch.arange(self.windows.size)
        num_kept = num_trained(self.windows.size, c.timestep_fraction)
        groups = [group_of(clip, c.num_generations) for clip in micro_batch]
        starts = [self.windows.start(self.iteration, *group) for group in groups]
        steps = torch.tensor(starts)[:, None] + positions
        if not c.enable_timestep_permutation:
            return steps, positions[:num_kept].expand(len(micro_batch), -1)

        orders = [
            rng.permutation(
                self.windows.size,
                c.seed,
                "permutation",
                step=self.iteration,
                prompt=clip.prompt_index,
                sample=clip.sample,
            )
            for clip in micro_batch
        ]
        return steps, torch.stack([order[:num_kept] for order in orders])

    def noise(self, micro_batch: MicroBatch) -> tuple[Tensor, Noise]:
        """The clips' initial noise, and the noise of their steps."""
        c = self.config
        samples = [clip.sample for clip in micro_batch]
        init_samples = None
        if c.same_init_noise:
            init_samples = [sample - sample % c.num_generations for sample in samples]
        prompt_indices = [clip.prompt_index for clip in micro_batch]
        # equal for all: only conditionings of equal shapes are in one micro-batch
        shape = self.backbone.free_shape(self.shape, self.conditions[prompt_indices[0]])
        return counter_noise(
            shape,
            c.seed,
            samples,
            purpose="rollout",
            prompt=prompt_indices,
            iteration=self.iteration,
            init_samples=init_samples,
        )

    def conditioning(self, prompt_indices: Sequence[int]) -> Conditioning:
        return shared_or_stacked([self.conditions[index] for index in prompt_indices])

    def begin(
        self, x: Tensor, micro_batch: MicroBatch, start: Tensor, cond: Conditioning
    ) -> Tensor:
        """The states (B, ...) in which the clips enter their windows at `start` (B,), from the noise `x`."""
        if not self.config.same_init_noise:
            return self.integrate(self.levels_before(start), x, cond)

        groups = [group_of(clip, self.config.num_generations) for clip in micro_batch]
        # of groups that are not known from an earlier micro-batch
        first_rows: dict[GroupId, int] = {}
        for row, group in enumerate(groups):
            if group not in self.group_states:
                first_rows.setdefault(group, row)
        if first_rows:
            rows = list(first_rows.values())
            group_cond = self.conditioning([group.prompt_index for group in first_rows])
            states = self.integrate(self.levels_before(start[rows]), x[rows], group_cond)
            self.group_states.update(zip(first_rows, states, strict=True))
        return torch.stack([self.group_states[group] for group in groups])

    def finish(self, x: Tensor, end: Tensor, cond: Conditioning) -> Tensor:
        """Follow the ODE to the clips, from windows that end before step `end` (B,).

        With `tail_steps`, in that many steps of `tail_solver`, unless fewer remain (`algo/solver.py` says which of them
        are of first order).
        """
        tail_steps = self.config.tail_steps
        tail_solver = self.config.tail_solver
        sigmas = self.schedule.sigmas.cpu().double()
        levels = [sigmas[step:] for step in end.tolist()]
        if tail_steps:
            levels = [
                flow_sigmas(tail_steps, self.config.timestep_shift, level[0].item())
                if len(level) > tail_steps + 1
                else level
                for level in levels
            ]
        # short rows are padded with zeros: repeated levels give zero-length steps
        padded = pad_sequence(levels, batch_first=True)
        return self.integrate(padded, x, cond, solver=tail_solver if tail_steps else "euler")

    def integrate(
        self, sigmas: Tensor, x: Tensor, cond: Conditioning, solver: str = "euler"
    ) -> Tensor:
        """Follow the ODE outside the windows, where no log-probability is taken."""
        with self.backbone.transformer.lossy():
            return integrate(self.backbone, sigmas, x, cond, self.guidance, solver=solver)

    def levels_before(self, start: Tensor) -> Tensor:
        """Noise levels (B, n+1) up to the windows that begin at `start` (B,); short rows repeat their last level."""
        steps = torch.arange(int(start.max()) + 1).minimum(start[:, None])
        return self.schedule.sigmas.cpu()[steps]
