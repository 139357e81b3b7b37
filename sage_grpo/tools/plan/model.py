"""A run as the planner sees it: how many GPUs, clips, tokens and passes an iteration has."""

import math
from dataclasses import dataclass, field

from sage_grpo.algo.sde import flow_sigmas
from sage_grpo.config.fields import Config
from sage_grpo.config.rules import check
from sage_grpo.models.cost import Architecture, DecodeBytes
from sage_grpo.parallel.ranks import check_layout
from sage_grpo.rewards.registry import ALIASES
from sage_grpo.tools.plan.calibration import ByMode, Calibration, calibrate
from sage_grpo.train.algorithms.registry import build_algorithm
from sage_grpo.train.windows import build_windows, num_trained

BYTES = {"fp32": 4, "bf16": 2}  # of one number
GRADIENT_BYTES = BYTES["fp32"]  # of one number while gradients are summed over ranks


@dataclass(frozen=True)
class Trained:
    """How many parameters a run trains."""

    total: int  # with LoRA, the adapter's
    matrices: int  # of these, in 2-D block weights


@dataclass(eq=False)
class Plan:
    """A resolved configuration on a number of GPUs. Building one rejects layouts that do not divide."""

    config: Config
    model: Architecture
    trained: Trained
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
        check(c, self.gpus)

        # Layout
        self.clips = c.batch_size * self.gpus // c.sp_size  # per iteration, over all ranks
        self.shards = self.gpus // c.dp_replicate if c.enable_fsdp else 1
        self.micro_batch_size = c.rollout_micro_batch
        self.micro_batches = c.batch_size // self.micro_batch_size  # per rank and iteration
        self.trained_clips = c.rank_trained  # per rank and iteration

        # One clip
        self.latents = self.model.video_tokens(c.num_frames, c.height, c.width)  # positions
        self.tokens = self.model.sequence(self.latents, self.text_tokens)
        known_rewards = self.rates.rewards
        names = [ALIASES.get(name, name) for name in c.reward_model]
        self.rewards = [known_rewards[name] for name in names if name in known_rewards]

        # Denoising steps, and forwards in each: two with classifier-free guidance
        self.algorithm = build_algorithm(c)
        self.windows = build_windows(c.window_form, self.algorithm.schedule().stochastic, c.seed)
        self.trained_steps = num_trained(self.windows.size, c.timestep_fraction)
        self.branches = 1 if math.isclose(c.guidance_scale, 1.0) else 2
        self.trained_branches = self.branches if self.algorithm.explores else 1

        # Passes of a trained micro-batch per iteration and rank; the anchor, if it runs, has as many forwards
        trained_micro_batches = self.trained_clips // c.trained_micro_batch
        self.training_passes = trained_micro_batches * self.trained_branches * self.trained_steps
        # Its clips, as a share of those in a micro-batch of the rollout
        self.trained_share = c.trained_micro_batch / self.micro_batch_size
        # Forwards of the policy that sampled: awm and nft noise the clips they train, grpo regroups them
        runs_old_policy = c.regroups or not self.algorithm.explores
        self.old_policy_passes = self.training_passes if runs_old_policy else 0
        self.recomputed = c.checkpointing_fraction if c.enable_gradient_checkpointing else 0.0
        self.rollout_gathers = self.micro_batches if c.gather_for_rollout else self.rollout_passes

    def by_mode(self, figure: ByMode | DecodeBytes) -> float:
        """The value of a figure that applies to the run, compiled or eager."""
        return figure.compiled if self.config.compile else figure.eager

    @property
    def decode_seconds(self) -> float:
        """Seconds for the VAE to decode one clip, tiled if its memory exceeds `decode_gb`."""
        untiled_bytes = self.latents * self.by_mode(self.model.untiled)
        if untiled_bytes > self.config.decode_gb * 1e9:
            return self.latents * self.rates.decode_tiled
        return self.latents * self.by_mode(self.rates.decode_untiled)

    @property
    def ode_steps(self) -> tuple[float, float]:
        """Denoising steps before and after the window, averaged over its places."""
        c = self.config
        windows = self.windows
        before = [windows.first + place for place in range(windows.places)]
        after = [c.num_sampling_steps - start - windows.size for start in before]
        if c.tail_steps:
            after = [min(steps, c.tail_steps) for steps in after]
        return sum(before) / windows.places, sum(after) / windows.places

    @property
    def rollout_passes(self) -> float:
        """Forwards of a micro-batch per iteration and rank."""
        c = self.config
        if not self.algorithm.explores:
            steps = min(c.tail_steps or c.num_sampling_steps, c.num_sampling_steps)
            low, high = c.guided_levels
            levels = flow_sigmas(steps, c.timestep_shift)[:-1]
            guided_steps = int(((levels >= low) & (levels <= high)).sum())
            return self.micro_batches * (steps + (self.branches - 1) * guided_steps)

        before, after = self.ode_steps
        inside_and_after = self.micro_batches * (self.windows.size + after)
        if c.same_init_noise:
            # A group shares the steps before its window, which cost as much as one clip's.
            groups = math.ceil(c.batch_size / c.num_generations)
            micro_batches_before = groups / self.micro_batch_size
        else:
            micro_batches_before = self.micro_batches
        return self.branches * (micro_batches_before * before + inside_and_after)

    @property
    def anchor_fraction(self) -> float:
        """Fraction of iterations that run the anchor: it is skipped while it equals the policy."""
        c = self.config
        anchor = c.trust_region.anchor
        if anchor is None:
            return 0.0
        if anchor != "moving" or c.lags:
            return 1.0
        iterations_per_refresh = math.ceil(c.update_ref_model_step / c.updates_per_rollout)
        return 1 - 1 / iterations_per_refresh

    @property
    def reductions(self) -> float:
        """Passes per iteration that sum gradients over ranks."""
        c = self.config
        if not c.enable_fsdp:
            return c.updates_per_rollout / c.gradient_accumulation_steps
        if c.reduces_once:
            return c.updates_per_rollout * self.trained_branches
        return self.training_passes
