"""A run as the planner sees it: how many GPUs, clips, tokens and passes an iteration has."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from sage_grpo.algo.sde import flow_sigmas
from sage_grpo.config.fields import Config
from sage_grpo.config.rules import check
from sage_grpo.models.cost import Architecture, DecodeBytes
from sage_grpo.models.latent import trained_levels
from sage_grpo.parallel.ranks import check_layout
from sage_grpo.rewards.registry import ALIASES
from sage_grpo.tools.plan.calibration import ByMode, Calibration, calibrate
from sage_grpo.train.algorithms.registry import build_algorithm
from sage_grpo.train.windows import Windows, build_windows, num_trained

BYTES = {"fp32": 4, "bf16": 2}  # of one number
GRADIENT_BYTES = BYTES["fp32"]  # of one number while gradients are summed over ranks
# pixels per row and column of a latent position, of the VAE whose decoding was timed
MEASURED_SPATIAL = 16


@dataclass(frozen=True)
class TrainedParameters:
    """How many parameters a run trains."""

    total: int  # with LoRA, the adapter's
    matrices: int  # of these, in 2-D block weights


@dataclass(eq=False)
class Plan:
    """A resolved configuration on a number of GPUs. Building one rejects layouts that do not divide."""

    config: Config
    model: Architecture
    trained: TrainedParameters
    gpus: int
    text_tokens: int = 150
    rates: Calibration = field(default_factory=calibrate)

    def __post_init__(self) -> None:
        c = self.config
        check_layout(self.gpus, c.sp_size, c.enable_fsdp, c.dp_replicate)
        if self.model.heads % c.sp_size:
            raise ValueError(
                f"sp_size is {c.sp_size}; it must divide the model's {self.model.heads} heads"
            )
        check(c, self.gpus, self.model.experts)

        # Layout
        self.clips = c.batch_size * self.gpus // c.sp_size  # per iteration, over all ranks
        self.shards = self.gpus // c.dp_replicate if c.enable_fsdp else 1
        self.micro_batch_size = c.rollout_micro_batch
        self.micro_batches = c.batch_size // self.micro_batch_size  # per rank and iteration
        self.trained_clips = c.rank_trained  # per rank and iteration

        # One clip
        self.latent_positions = self.model.video_tokens(c.num_frames, c.height, c.width)
        self.tokens = self.model.sequence(self.latent_positions, self.text_tokens)
        known_rewards = self.rates.rewards
        names = [ALIASES.get(name, name) for name in c.reward_model]
        self.rewards = [known_rewards[name] for name in names if name in known_rewards]

        # Denoising steps, and forwards in each: two with classifier-free guidance
        self.algorithm = build_algorithm(c)
        schedule = self.algorithm.schedule()
        learns = trained_levels(schedule.sigmas[:-1], self.model.boundary, c.adapted_experts)
        self.windows = build_windows(c.window_form, schedule.stochastic & learns, c.seed)
        high = trained_levels(schedule.sigmas[:-1], self.model.boundary, "high")
        self.crossing = crossing_share(self.windows, high.tolist())
        self.trained_steps = num_trained(self.windows.size, c.timestep_fraction)
        scales = {c.guidance_scale}
        if c.guidance_scale_2 is not None:
            scales.add(c.guidance_scale_2)
        self.branches = 1 if all(math.isclose(scale, 1.0) for scale in scales) else 2
        self.trained_branches = self.branches if self.algorithm.explores else 1

        # Passes of a trained micro-batch per iteration and rank; the anchor, if it runs, has as many forwards
        trained_micro_batches = self.trained_clips // c.trained_micro_batch
        self.trained_micro_batches = trained_micro_batches
        self.training_passes = trained_micro_batches * self.trained_branches * self.trained_steps
        # Its clips, as a share of those in a micro-batch of the rollout
        self.trained_share = c.trained_micro_batch / self.micro_batch_size
        # Forwards of the policy that sampled: awm and nft noise the clips they train, grpo regroups them
        runs_old_policy = c.trains_in_new_batches or not self.algorithm.explores
        self.old_policy_passes = self.training_passes if runs_old_policy else 0
        self.recomputed = c.checkpointing_fraction if c.enable_gradient_checkpointing else 0.0

        # How often the weights of a sharded model are gathered: for each pass, or once for many in a row
        self.rollout_gathers = self.micro_batches if c.gather_for_rollout else self.rollout_passes
        self.anchor_gathers = 1 if c.gather_for_rollout else self.training_passes
        self.old_policy_gathers = self.old_policy_passes
        if runs_old_policy and c.gather_for_rollout:
            self.old_policy_gathers = trained_micro_batches

    def by_mode(self, figure: ByMode | DecodeBytes) -> float:
        """The value of a figure that applies to the run, compiled or eager."""
        return figure.compiled if self.config.compile else figure.eager

    @property
    def decode_seconds(self) -> float:
        """Seconds for the VAE to decode one clip, tiled if its memory exceeds `decode_gb`."""
        untiled_bytes = self.latent_positions * self.by_mode(self.model.untiled)
        # a VAE whose positions have more pixels takes longer for each
        positions = self.latent_positions * (self.model.spatial / MEASURED_SPATIAL) ** 2
        if untiled_bytes > self.config.decode_gb * 1e9:
            return positions * self.rates.decode_tiled
        return positions * self.by_mode(self.rates.decode_untiled)

    @property
    def window_starts(self) -> range:
        """Denoising steps at which a window may start, all equally likely."""
        return self.windows.starts

    @property
    def windows_at_once(self) -> int:
        """Independent windows among the micro-batches that the ranks run at the same time."""
        if not self.windows.form.per_group:
            return 1
        groups = self.clips // self.config.num_generations
        return min(groups, self.gpus // self.config.sp_size)

    @property
    def rollout_passes(self) -> float:
        """Forwards of a micro-batch per iteration and rank, with those for which it waits.

        Ranks meet after every micro-batch, so each lasts as long as the one with the costliest window.
        """
        return self.expected_rollout_passes(self.windows_at_once)

    @property
    def own_rollout_passes(self) -> float:
        """Forwards of a micro-batch per iteration and rank, averaged over ranks."""
        return self.expected_rollout_passes(windows_at_once=1)

    def expected_rollout_passes(self, windows_at_once: int) -> float:
        """Forwards of a micro-batch, each the expected maximum over so many independent windows."""
        c = self.config
        if not self.algorithm.explores:
            steps = min(c.tail_steps or c.num_sampling_steps, c.num_sampling_steps)
            low, high = c.guided_levels
            levels = flow_sigmas(steps, c.timestep_shift)[:-1]
            guided_steps = int(((levels >= low) & (levels <= high)).sum())
            return self.micro_batches * (steps + (self.branches - 1) * guided_steps)

        # Micro-batches that also run the steps before their window: all; or the first of each group, for one clip
        with_prefix = self.micro_batches
        prefix_share = 1.0
        if c.same_init_noise:
            with_prefix = math.ceil(c.batch_size / c.num_generations)
            prefix_share = 1 / self.micro_batch_size

        without = [self.steps_from(start) for start in self.window_starts]
        complete = [
            prefix_share * start + steps
            for start, steps in zip(self.window_starts, without, strict=True)
        ]
        passes = with_prefix * expected_maximum(complete, windows_at_once)
        passes += (self.micro_batches - with_prefix) * expected_maximum(without, windows_at_once)
        return self.branches * passes

    def steps_from(self, start: int) -> int:
        """Denoising steps of a clip in its window and after it."""
        c = self.config
        after = c.num_sampling_steps - start - self.windows.size
        if c.tail_steps:
            after = min(after, c.tail_steps)
        return self.windows.size + after

    @property
    def anchor_fraction(self) -> float:
        """Fraction of iterations that run the anchor: it is skipped while it equals the policy."""
        c = self.config
        anchor = c.trust_region.anchor
        if anchor is None:
            return 0.0
        if anchor != "moving" or c.samples_with_old_policy:
            return 1.0
        iterations_per_refresh = math.ceil(c.update_ref_model_step / c.updates_per_rollout)
        return 1 - 1 / iterations_per_refresh

    @property
    def reductions(self) -> float:
        """Passes per iteration that sum gradients over ranks."""
        c = self.config
        if not c.enable_fsdp:
            return c.updates_per_rollout / c.gradient_accumulation_steps
        if c.reduces_gradients_once:
            return c.updates_per_rollout * self.trained_branches
        return self.training_passes


def crossing_share(windows: Windows, is_high: Sequence[bool]) -> float:
    """Share of the windows with steps on both sides of the boundary between two transformers; is_high: by step."""
    sides = [set(is_high[start : start + windows.size]) for start in windows.starts]
    return sum(len(side) > 1 for side in sides) / len(sides)


def expected_maximum(values: Sequence[float], draws: int) -> float:
    """The mean of the largest of so many independent draws from equally likely values."""
    count = len(values)
    # P(all draws are among the `rank` smallest)
    below = [(rank / count) ** draws for rank in range(count + 1)]
    chances = [after - before for before, after in pairwise(below)]
    return sum(value * chance for value, chance in zip(sorted(values), chances, strict=True))
