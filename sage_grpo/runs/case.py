"""A run as the diagnosis sees it: its settings, and the measurements that several rules share.

Shapes: N iterations with all metrics, T denoising steps. What a run did not record is NaN.
"""

import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from sage_grpo.config.fields import FIELDS, Config
from sage_grpo.config.parse import from_values
from sage_grpo.config.yaml_files import yaml_mapping
from sage_grpo.files.foreign import check_regular
from sage_grpo.files.json_files import read_object
from sage_grpo.intervals import Interval, interval, student_95
from sage_grpo.runs.clips import Clip, Pair, pair_clips, read_validations
from sage_grpo.runs.history import Line, RunHistory, column, numbers, text_of

MIN_FOR_TREND = 8  # iterations or updates needed for a statement about a trend
# logged iterations needed to compare late ones with early ones
MIN_FOR_LATE = 2 * MIN_FOR_TREND + 1


def gradient_signal(lines: Sequence[Line]) -> tuple[float, float]:
    """Share of signal in the squared gradient of an update, and its standard error; NaN if not known.

    Iterations count by their squared gradient norm, of which the share is a part.
    """
    shares = column(lines, "signal/gradient")
    squares = column(lines, "policy/grad_norm") ** 2
    known = np.isfinite(shares) & (squares > 0)
    if known.sum() < MIN_FOR_TREND:
        return math.nan, math.nan
    weights = squares[known] / squares[known].sum()
    share = shares[known] @ weights
    error = np.linalg.norm((shares[known] - share) * weights)
    return float(share), float(error)


def reward_slope(lines: Sequence[Line]) -> Interval:
    """Change of the training reward per iteration; NaN for too few iterations."""
    steps = column(lines, "step")
    rewards = column(lines, "reward/total")
    known = np.isfinite(rewards)
    if known.sum() < MIN_FOR_TREND:
        return interval([])
    (slope, _), covariance = np.polyfit(steps[known], rewards[known], 1, cov=True)
    half = student_95(int(known.sum()) - 2) * math.sqrt(max(covariance[0, 0], 0.0))
    return Interval(float(slope), half)


class Case:
    def __init__(self, run: RunHistory) -> None:
        self.run = run

        config_file = run.folder / "config.yaml"
        self.has_config = config_file.is_file()
        settings = {}
        if self.has_config:
            settings = yaml_mapping(text_of(config_file), str(config_file))
        self.config: Config = from_values({k: v for k, v in settings.items() if k in FIELDS})

        c = self.config
        ranks = run.head.get("ranks") or 1
        self.clips_per_rollout = max(1, c.batch_size * ranks // c.sp_size)
        self.trained_clips = max(1, c.rank_trained * ranks // c.sp_size)  # of a rollout

    @cached_property
    def failure(self) -> str:
        """The message of a run that stopped with an error; empty for all others."""
        status_file = self.run.folder / "status.json"
        if not status_file.is_file() or status_file.is_symlink():
            return ""
        status = read_object(status_file)
        return str(status.get("message")) if status.get("state") == "failed" else ""

    # metrics of training

    def values(self, key: str) -> np.ndarray:
        """The finite values of a metric."""
        values = column(self.run.full_lines, key)
        return values[np.isfinite(values)]

    def mean(self, key: str) -> float:
        return interval(self.values(key)).mean

    def most(self, key: str) -> float:
        return float(max(self.values(key), default=math.nan))

    def early_and_late(self, key: str) -> tuple[float, float]:
        """Medians over the first 8 and the last 4 iterations, without the very first, which warms up."""
        values = self.values(key)[1:]
        if len(values) < MIN_FOR_LATE - 1:
            return math.nan, math.nan
        early = values[:MIN_FOR_TREND]
        late = values[-(MIN_FOR_TREND // 2) :]
        return float(np.median(early)), float(np.median(late))

    def schedule(self, key: str) -> np.ndarray:
        """What the sampler does at each denoising step, (T,); empty if that was not recorded."""
        return np.array(numbers((self.run.head.get("schedule") or {}).get(key), key))

    @cached_property
    def rescorings(self) -> list[Line]:
        """The lines of iterations and validations in which a few clips were scored again."""
        lines = [*self.run.full_lines, *self.run.validations]
        return [line for line in lines if "signal/rescoring" in line]

    def rescoring(self, key: str) -> float:
        """Root mean square of a metric over `rescorings`; NaN if none has it."""
        values = column(self.rescorings, key)
        values = values[np.isfinite(values)]
        return math.sqrt(np.square(values).mean()) if len(values) else math.nan

    # is there enough data to judge?

    def iteration_of_line(self, count: int) -> int:
        """The iteration that writes the `count`th line of training metrics."""
        missing = max(0, count - len(self.run.full_lines))
        return self.run.iterations + missing * self.config.log_interval

    @property
    def next_validation(self) -> int | None:
        """The iteration of the next validation; None if none is to come."""
        c = self.config
        if self.run.iterations >= c.max_steps:
            return None
        every = c.validation_interval or c.max_steps
        return min((self.run.iterations // every + 1) * every, c.max_steps)

    @property
    def seconds_per_iteration(self) -> float:
        """Median over logged iterations; NaN if none has its time."""
        times = self.values("time/total")
        return float(np.median(times)) if len(times) else math.nan

    # did the reward rise?

    @cached_property
    def validation_clips(self) -> dict[int, list[Clip]]:
        """By iteration, for the validations that kept their clips."""
        check_regular(self.run.folder, ("validation",))
        validations = read_validations(self.run.folder)
        steps = [line["step"] for line in self.run.validations]
        return {step: validations[step] for step in steps if step in validations}

    @property
    def validated_iterations(self) -> int:
        """Iterations between the first and the last validation."""
        steps = list(self.validation_clips)
        return steps[-1] - steps[0]

    @property
    def validated_updates(self) -> float:
        """Optimizer steps between the first and the last validation, in proportion to iterations."""
        return self.most("updates") * self.validated_iterations / max(1, self.run.iterations)

    @property
    def validated_lines(self) -> list[Line]:
        """The lines of training metrics between the first and the last validation."""
        steps = list(self.validation_clips)
        return [line for line in self.run.full_lines if steps[0] < line["step"] <= steps[-1]]

    @cached_property
    def validation_pairs(self) -> list[Pair]:
        """Clips of the first and of the last validation, same prompt and seed."""
        validations = list(self.validation_clips.values())
        return pair_clips(validations[0], validations[-1]) if len(validations) > 1 else []

    @cached_property
    def validation_change(self) -> Interval:
        """Change of a clip's reward from the first to the last validation."""
        return interval(after.reward - before.reward for before, after in self.validation_pairs)

    @cached_property
    def training_slope(self) -> Interval:
        """Change of the training reward per iteration."""
        return reward_slope(self.run.full_lines)

    @property
    def judged_by_validation(self) -> bool:
        return math.isfinite(self.validation_change.half)

    @property
    def reward_change(self) -> Interval:
        """Between validations, paired by clip; without two validations, per training iteration."""
        return self.validation_change if self.judged_by_validation else self.training_slope

    @cached_property
    def direction(self) -> int | None:
        """+1 if the reward rises, 0 if it is flat, -1 if it falls, None if it is too early to tell."""
        change = self.reward_change
        if not math.isfinite(change.half):
            return None

        # flat: continued until the end, the change would still be small against the spread in groups
        iterations = self.validated_iterations if self.judged_by_validation else 1
        at_the_end = abs(change.mean) * (self.config.max_steps / iterations)
        if at_the_end < self.mean("reward/group_std") / 3:
            return 0
        return change.sign

    # distances and forces

    @cached_property
    def drift(self) -> float:
        """How far the policy's velocity gets from its anchor's: with grpo 1 is the exploration noise.

        awm and nft have none; their KL is the squared difference of the velocities, so that this is sqrt(2) times it.
        """
        return math.sqrt(max(2 * self.most("kl/anchor"), 0.0))

    @cached_property
    def exploration_cost(self) -> float:
        """How far the first validation scores above the next training iteration, whose policy is the same.

        In standard deviations of the batch, minus two standard errors of the mean over its groups: a lower bound. NaN
        if the two are not comparable, because rollouts do not explore or take a very different number of steps.
        """
        c = self.config
        validation_steps = c.validation_num_inference_steps or c.num_sampling_steps
        if c.algorithm != "grpo" or not 0.25 < validation_steps / c.num_sampling_steps < 4:
            return math.nan

        validations = self.run.validations[:1]
        if not validations:
            return math.nan
        next_step = validations[0]["step"] + 1
        iterations = [line for line in self.run.full_lines if line["step"] == next_step]
        if not iterations:
            return math.nan

        validation_reward = column(validations, "reward/total").item()
        training_reward = column(iterations, "reward/total").item()
        spread = max(column(iterations, "reward/std").item(), 1e-12)
        cost = (validation_reward - training_reward) / spread
        margin = 2 / math.sqrt(self.clips_per_rollout / c.num_generations)
        return math.copysign(max(abs(cost) - margin, 0.0), cost)

    @property
    def kl_gradient_scale(self) -> np.ndarray:
        """Gradient of a denoising step's KL at the velocity, divided by lambda sqrt(2 KL), (T,)."""
        recorded = self.schedule("kl_gradient_scale")
        if len(recorded):
            return recorded
        # older runs recorded only the policy loss: exact unless ratio_norm is set, or the KL alone is balanced
        gradient_scale = self.schedule("gradient_scale")
        equalizer = self.schedule("equalizer")
        if self.config.use_kl_balancing and len(equalizer) == len(gradient_scale):
            return gradient_scale * equalizer**2
        return gradient_scale

    @cached_property
    def kl_pull(self) -> float:
        """Gradient of the KL, relative to the noise of the policy gradient, in one update; NaN with nft.

        At the velocity and per pair they are lambda N_t sqrt(2 KL_t) and |A| S_t N_t, for advantages of size |A|. The
        first adds up over the P pairs of an update, the second as sqrt(P). The first N_t is `kl_gradient_scale`.
        """
        c = self.config
        kl = self.run.grid("kl_anchor")
        count = self.run.grid("count")  # pairs of an iteration
        if not count.size:
            count = np.full_like(kl, math.nan)
        gradient_scale = self.schedule("gradient_scale")
        equalizer = self.schedule("equalizer")
        kl_gradient_scale = self.kl_gradient_scale
        num_steps = {kl.shape[1], count.shape[1]}
        num_steps |= {len(gradient_scale), len(equalizer), len(kl_gradient_scale)}
        if len(num_steps) > 1 or not (kl > 0).any() or c.algorithm == "nft":
            return math.nan

        # not recorded: every clip trained every step that any clip did
        count = np.where(np.isfinite(count), count, self.trained_clips)
        count = np.where(np.isfinite(kl), count, 0)
        pairs = count.sum(1) * c.gradient_accumulation_steps / c.updates_per_rollout
        kl_square = np.nansum(count * 2 * kl * kl_gradient_scale**2, 1)
        policy_square = (count * (equalizer * gradient_scale) ** 2).sum(1)

        weight = column(self.run.full_lines, "kl/coef") * c.dual_kl_moving_weight
        advantage_size = column(self.run.full_lines, "signal/advantage_size")
        advantage_size = np.where(advantage_size > 0, advantage_size, 1.0)  # 1: not recorded
        pull = weight * np.sqrt(pairs * kl_square / np.maximum(policy_square, 1e-30))
        pull /= advantage_size
        return float(np.median(pull[kl_square > 0]))
