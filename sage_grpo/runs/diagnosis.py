"""Why is the reward flat? Findings about a run, from its folder alone; docs/diagnosis.md explains each.

Fix findings in order: earlier ones invalidate later ones. The rules below are in that order. A rule returns its
evidence, or None where it does not hold. What a run did not record is NaN, for which no comparison holds, so nothing is
reported about it. Shapes: N logged iterations, T denoising steps.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from sage_grpo.config.fields import FIELDS, Config
from sage_grpo.runs.case import MIN_FOR_TREND, Case, gradient_signal, reward_slope
from sage_grpo.runs.history import RunHistory, column

BF16 = 2.0**-9  # relative rounding error
PHASES = ("rollout", "decode", "reward", "gold", "anchor", "update")

Evidence = Callable[[Case], str | None]


@dataclass(frozen=True)
class Rule:
    name: str
    evidence: Evidence
    cause: str
    remedy: str
    remedy_if_set: str = ""  # the remedy of a run that has one of the settings in `remedy` already
    panel: str = ""  # the figure of report.html that shows it
    # not reported while the reward rises, nor while it is too early to tell
    only_if_flat_or_falling: bool = False
    stop_message: str = ""  # part of the message with which a run stops for this reason


@dataclass(frozen=True)
class Finding:
    """A rule that holds for a run."""

    rule: Rule
    evidence: str
    config: Config

    @property
    def name(self) -> str:
        return self.rule.name

    @property
    def remedy(self) -> str:
        """What helps: never a setting that the run has already."""
        if self.rule.remedy_if_set and is_any_set(settings_in(self.rule.remedy), self.config):
            return self.rule.remedy_if_set
        return self.rule.remedy

    def __str__(self) -> str:
        return f"{self.name}: {self.evidence}. {self.rule.cause} Remedy: {self.remedy}"


def settings_in(remedy: str) -> dict[str, str]:
    """Values by flag that a remedy advises, such as `--compile False`; resuming is an action, not a setting."""
    values = {}
    for flag, word in re.findall(r"--(\w+) ([\w.-]+)", remedy):
        if flag in FIELDS and flag != "resume_from_checkpoint":
            values[flag] = word.rstrip(".")
    return values


def is_any_set(settings: Mapping[str, str], config: Config) -> bool:
    for flag, word in settings.items():
        value = getattr(config, flag)
        if str(value) == word:
            return True
        if isinstance(value, float) and f"{value:g}" == word:
            return True
    return False


RULES: dict[str, Rule] = {}  # by name


def diagnose(run: RunHistory) -> list[Finding]:
    """What is wrong with a run, in the order in which to fix it."""
    case = Case(run)
    findings = []
    for rule in RULES.values():
        evidence = rule.evidence(case) if run.full_lines and case.has_config else None
        if evidence is None and rule.stop_message and rule.stop_message in case.failure:
            evidence = f"the run stopped: {case.failure:.200}"
        if evidence is None or (rule.only_if_flat_or_falling and case.direction in (1, None)):
            continue
        findings.append(Finding(rule, evidence, case.config))
    return findings


def rule(name: str, **fields: Any) -> Callable[[Evidence], Evidence]:
    """Add a rule, whose evidence the decorated function looks for; `fields` are those of `Rule`."""

    def add(evidence: Evidence) -> Evidence:
        RULES[name] = Rule(name=name, evidence=evidence, **fields)
        return evidence

    return add


# faults that make all other numbers meaningless


@rule(
    "first ratio",
    cause="Rollout and training run different arithmetic, so every gradient is wrong.",
    remedy='see "The first ratio is not 1" in docs/diagnosis.md; --compile False first.',
    remedy_if_set='see "The first ratio is not 1" in docs/diagnosis.md.',
    panel="Largest ratio deviation",
    stop_message="first ratio",
)
def first_ratio_is_not_one(case: Case) -> str | None:
    exact = case.config.updates_per_rollout == 1 and case.config.algorithm == "grpo"
    deviation = case.most("policy/ratio_max_deviation")
    if exact and deviation > 0:
        return f"|ratio - 1| reached {deviation:.2g} before any update"
    return None


@rule(
    "ranks differ",
    cause="Ranks train different models or on different data, and the sum of their gradients fits none of them.",
    remedy="the same files and flags on all nodes, then --resume_from_checkpoint last_good.",
)
def ranks_differ(case: Case) -> str | None:
    checksums = {"signal/rank_weights": "weights", "signal/rank_prompts": "prompts or seeds"}
    for key, what in checksums.items():
        steps = [line["step"] for line in case.run.full_lines if line.get(key)]
        if steps:
            return f"{what} differ between ranks since iteration {min(steps)}"
    return None


@rule(
    "not finite",
    cause="Updates without a finite gradient are skipped: nothing is learned in them.",
    remedy="lower --learning_rate, raise --warmup_steps, check --eta; the message names the first clip.",
    panel="Gradient norm",
    stop_message="not finite",
)
def gradients_are_not_finite(case: Case) -> str | None:
    key = "policy/grad_norm"
    norms = [line[key] for line in case.run.full_lines if key in line]
    missing = norms.count(None)
    if missing > 0.02 * len(norms):
        return f"no finite gradient in {missing} of {len(norms)} updates"
    return None


@rule(
    "rewards fail",
    cause="A failed reward is missing data: its clip is paid for and teaches nothing.",
    remedy="fix the reward; a lower --max_reward_failures stops the run earlier.",
    panel="Total reward",
    stop_message="rewards failed",
)
def rewards_fail(case: Case) -> str | None:
    share = case.mean("reward/failed") / case.clips_per_rollout
    if share > 0.02:
        errors = [line["reward/error"] for line in case.run.full_lines if line.get("reward/error")]
        first = str(errors[0]) if errors else "an unknown error"
        return f"{share:.1%} of the rewards failed, first with: {first:.120}"
    return None


@rule(
    "rewards repeat",
    cause="This is typical of a reward that answers failures with a constant.",
    remedy="let the reward raise an error or return NaN instead; look for its constant in clips.json.",
    panel="Total reward",
)
def rewards_repeat(case: Case) -> str | None:
    shares = case.early_and_late("signal/same_reward")
    if min(shares) > 0.05 and max(shares) < 0.9:
        return (
            f"{max(shares):.0%} of the clips got one and the same reward, while all others differ"
        )
    return None


def call_dependence(case: Case) -> float:
    """How far a clip's score in a call with others is from its score alone, where 1 is the spread within a group.

    0 unless that is far more than the score differs between two calls of the clip alone.
    """
    difference = case.rescoring("signal/call_difference")
    if difference < 3 * case.rescoring("signal/rescoring"):
        return 0.0
    return difference / (case.mean("reward/group_std") or math.nan)


def scores_are_swapped(case: Case) -> bool:
    """Whether the scores of a call are those of its clips, but in another order."""
    in_order = case.rescoring("signal/call_difference")
    return case.rescoring("signal/call_sorted") < 0.1 * in_order


def call_score(case: Case) -> str:
    """The score that depends on its call."""
    names = [line["signal/call_score"] for line in case.rescorings if "signal/call_score" in line]
    return f"{names[-1]!s:.60}" if names else "the reward"


@rule(
    "scores belong to other clips",
    cause="The reward returns its scores in another order than it is given clips, so advantages are chance.",
    remedy="return the scores in the order of the clips; until then --reward_batch_size 1.",
    remedy_if_set="return the scores in the order of the clips.",
    panel="Total reward",
)
def scores_belong_to_other_clips(case: Case) -> str | None:
    share = call_dependence(case)
    if share > 0.3 and scores_are_swapped(case):
        return (
            f"clips of one call get each other's {call_score(case)}: scored alone, they differ by"
            f" {share:.0%} of the spread within a group, but not once both lists are sorted"
        )
    return None


@rule(
    "depends on the other clips of its call",
    cause="A clip's reward depends on which clips happen to be scored beside it.",
    remedy="score each clip by itself; until then --reward_batch_size 1.",
    remedy_if_set="score each clip by itself.",
    panel="Total reward",
)
def reward_depends_on_its_call(case: Case) -> str | None:
    share = call_dependence(case)
    if share > 0.3 and not scores_are_swapped(case):
        return (
            f"{call_score(case)} of the same clip differs by {share:.0%} of the spread within a group"
            " between a call with other clips and one without"
        )
    failures = case.rescoring("signal/call_failures")
    if failures > 0.9:
        return f"{failures:.0%} of the clips are scored in calls of several, but fail alone"
    return None


def learning_rates_since_refresh(case: Case) -> np.ndarray:
    """For each line, the highest learning rate since its anchor was refreshed: a resume may have lowered it.

    NaN for the first anchor of a run that was resumed into a new folder, which does not know its earlier rates.
    """
    # the anchor outlives a change of the yardstick, so its age may reach back to earlier series
    lines = case.run.all_full_lines
    learning_rate = column(lines, "lr")
    copied_at = column(lines, "updates") - column(lines, "kl/anchor_age")
    highest = learning_rate.copy()
    starts = case.run.starts
    if starts and starts[0].get("step"):
        highest[:1] = math.nan
    for i in range(1, len(lines)):
        # the rates of iterations between two lines are not known: the earlier line's counts, too
        has_same_anchor = copied_at[i] == copied_at[i - 1]
        before = highest[i - 1] if has_same_anchor else learning_rate[i - 1]
        highest[i] = np.maximum(highest[i], before)
    return highest[len(lines) - len(case.run.full_lines) :]


@rule(
    "wrong anchor",
    cause="The KL pulls the policy toward weights other than those it had when the anchor was due.",
    remedy=(
        "--resume_from_checkpoint last_good; check --update_ref_model_step and all code that loads or copies weights."
    ),
    panel="KL",
)
def anchor_is_wrong(case: Case) -> str | None:
    c = case.config
    keys = ("signal/anchor_moved", "kl/anchor_age", "signal/weight_rms")
    distance, age, weight_rms = (column(case.run.full_lines, key) for key in keys)
    learning_rate = learning_rates_since_refresh(case)
    # optimizers move a weight by about the learning rate, and weight decay by that share of it; rounding adds a little
    per_update = learning_rate * (1 + c.weight_decay * weight_rms)
    reachable = 2 * per_update * age + 2 * BF16 * weight_rms + 1e-30
    excess = distance / reachable
    if np.isfinite(excess).any():
        worst = int(np.nanargmax(excess))
        if excess[worst] > 1:
            return (
                f"weights of policy and anchor differ by {distance[worst]:.2g},"
                f" more than {age[worst]:.0f} updates can move them"
            )

    oldest = case.most("kl/anchor_age")
    due = c.update_ref_model_step
    if c.use_moving_KL and oldest > due + c.updates_per_rollout:
        return f"the anchor is {oldest:.0f} updates old, and due every {due}"
    return None


@rule(
    "variety collapsed",
    cause="The policy makes one clip per prompt: it has found one answer that the reward likes.",
    remedy=(
        "an earlier checkpoint, a larger --kl_weight, a smaller --learning_rate,"
        " different --reward_weights."
    ),
    panel="Exploration",
)
def variety_collapsed(case: Case) -> str | None:
    early, late = case.early_and_late("signal/variety")
    if late < 0.3 * early:
        return f"clips of one prompt differ by {late:.3f} per pixel, {late / early:.0%} of what they did"
    return None


# updates that are lost in rounding, and rewards that teach nothing


@rule(
    "gradient below eps",
    cause="AdamW divides by gradient plus eps, so weights hardly move.",
    remedy="--adam_eps 1e-15.",
    remedy_if_set="a larger --max_grad_norm, or advantages of another scale (--advantage_std).",
    panel="Gradient norm",
)
def gradient_is_below_eps(case: Case) -> str | None:
    rms = case.mean("policy/grad_rms")
    eps = case.config.adam_eps
    if 0 < rms < 10 * eps:
        return f"the gradient's RMS is {rms:.2g}, adam_eps {eps:g}"
    return None


@rule(
    "weights too coarse",
    cause="Most updates round to nothing.",
    remedy="--master_weight_type fp32 (with bf16 computation: --enable_fsdp True).",
    remedy_if_set="fp32 for --master_weight_type.",
    panel="Learning rate",
    only_if_flat_or_falling=True,
)
def weights_are_too_coarse(case: Case) -> str | None:
    spacing = 2 * BF16 * case.mean("signal/weight_rms")
    learning_rate = case.most("lr")
    if case.config.master_weight_type == "bf16" and 2 * learning_rate < spacing:
        return f"bf16 weights are {spacing:.1g} apart, and a step is {learning_rate:.1g}"
    return None


@rule(
    "flat groups",
    cause="Only differences within a group teach; these groups have none.",
    remedy=(
        "a finer reward (scripts/audit_reward.py shows what it tells apart), harder prompts,"
        " more --num_generations, a larger --eta."
    ),
    panel="Exploration",
    only_if_flat_or_falling=True,
)
def groups_are_flat(case: Case) -> str | None:
    groups = case.mean("reward/flat_groups")
    share = groups * case.config.num_generations / case.clips_per_rollout
    if share > 1 / 3:
        return f"in {share:.0%} of the groups all clips got the same reward"
    return None


@rule(
    "noisy reward",
    cause="Advantages are mostly chance.",
    remedy=(
        "make the reward deterministic, or average several scores (scripts/audit_reward.py tests it);"
        " then more --num_generations."
    ),
    panel="Exploration",
)
def reward_is_noisy(case: Case) -> str | None:
    differences = column(case.rescorings, "signal/rescoring")
    largest = max(differences[np.isfinite(differences)], default=math.nan)
    share = largest / (case.mean("reward/group_std") or math.nan)
    if share > 0.7:
        return f"the same clip scored twice differs by {share:.0%} of the spread within a group"
    return None


# exploration, and validation beside it


@rule(
    "validation unlike training",
    cause="Validation does not show what is trained.",
    remedy=(
        "a smaller --ema_decay; --validation_num_inference_steps and --validation_timestep_shift"
        " nearer to the rollout's."
    ),
    panel="Total reward",
)
def validation_is_unlike_training(case: Case) -> str | None:
    if not case.validation_pairs:
        return None
    # training before the first or after the last validation has nothing to be compared with
    lines = case.validated_lines
    slope = reward_slope(lines)
    iterations = lines[-1]["step"] - lines[0]["step"] if lines else 0
    least_gain = iterations * (slope.mean - slope.half)
    most_validated = case.validation_change.mean + case.validation_change.half
    if not (least_gain > 0 and most_validated < 0.3 * least_gain):
        return None

    text = (
        f"training clips gained at least {least_gain:.2g}, validation at most {most_validated:.2g}"
    )
    decay = case.config.ema_decay
    if decay:
        text += f"; averaged weights are still {decay ** case.most('updates'):.0%} the first ones"
    return text


def last_noise(case: Case) -> float:
    """Standard deviation that the last denoising step injects."""
    std = case.schedule("std")
    return float(std[-1]) if len(std) else math.nan


@rule(
    "noise in the clips",
    cause="No later step removes the last one's noise, and the reward judges it.",
    remedy="--sde_window all_but_last, or --sde_type precise.",
    remedy_if_set="an --sde_window without the last step, or a smaller --eta.",
    panel="Exploration noise",
)
def noise_is_left_in_the_clips(case: Case) -> str | None:
    noise = last_noise(case)
    if case.exploration_cost > 1 and noise > 0.02:
        return (
            f"training clips score {case.exploration_cost:.1f} standard deviations below validation,"
            f" and the last step leaves noise of {noise:.2g} in them"
        )
    return None


@rule(
    "too much exploration",
    cause="Exploration leads outside of what the model can make, so the reward ranks damage.",
    remedy="a smaller --eta, more --num_sampling_steps, or --sde_type precise.",
    remedy_if_set="a smaller --eta, or more --num_sampling_steps.",
    panel="Total reward",
)
def exploration_is_too_strong(case: Case) -> str | None:
    if case.exploration_cost > 1 and not last_noise(case) > 0.02:
        return (
            f"training clips score {case.exploration_cost:.1f} standard deviations below validation"
        )
    return None


@rule(
    "too little exploration",
    cause="Clips of a group differ mainly in their initial noise, for which no step gets credit.",
    remedy="a larger --eta (0.5 to 1), or more steps in --sde_window.",
    panel="Exploration noise",
    only_if_flat_or_falling=True,
)
def exploration_is_too_weak(case: Case) -> str | None:
    noise = float(np.linalg.norm(case.schedule("std")))
    if 0 < noise < 0.1:
        return f"all steps together add noise of {noise:.2g} to initial noise of 1"
    return None


# updates


@rule(
    "one step dominates",
    cause="The update is the noise of one step; the others hardly learn.",
    remedy="--use_grad_balancing True.",
    remedy_if_set="an --sde_window without that step, or a smaller --kl_weight.",
    panel="Gradient at the velocity",
)
def one_step_dominates(case: Case) -> str | None:
    steps = case.run.grid("grad_v").T
    sizes = np.array(
        [np.median(step[np.isfinite(step)]) for step in steps if np.isfinite(step).any()]
    )
    if len(sizes) < 2 or case.kl_pull > 1:  # then most of the gradient is the KL's
        return None
    largest = int(sizes.argmax())
    ratio = sizes[largest] / (np.median(np.delete(sizes, largest)) or math.nan)
    if ratio > 3:
        return f"denoising step {largest + 1} gets {ratio:.0f} times the gradient of the others"
    return None


def clipped_shares(case: Case) -> tuple[float, float]:
    """Shares of the pairs clipped below and above, in updates after a rollout's first; NaN if none can be."""
    updates = case.config.updates_per_rollout
    if updates == 1 or case.config.algorithm == "nft":
        return math.nan, math.nan
    low = case.mean("policy/clip_low") * updates / (updates - 1)
    high = case.mean("policy/clip_high") * updates / (updates - 1)
    return low, high


def is_one_sided(low: float, high: float) -> bool:
    return max(low, high) > 2.5 * min(low, high)


@rule(
    "clipped on one side",
    cause="The KL has passed the clip range, so the policy learns from one side only.",
    remedy=(
        "--ratio_norm True, --updates_per_rollout 1, a smaller --learning_rate or a larger --clip_range."
    ),
    remedy_if_set="fewer --updates_per_rollout, a smaller --learning_rate or a larger --clip_range.",
    panel="Clipped pairs",
)
def pairs_are_clipped_on_one_side(case: Case) -> str | None:
    low, high = clipped_shares(case)
    if is_one_sided(low, high) and low + high > 0.2:
        return (
            f"after the first update of a rollout the clip silences {low + high:.0%} of the pairs,"
            f" mostly {'bad' if low > high else 'good'} ones"
        )
    return None


@rule(
    "clipped",
    cause="Clipped pairs have no gradient: all updates but the first are wasted.",
    remedy=(
        "--updates_per_rollout 1, --ratio_norm True, a smaller --learning_rate or a larger --clip_range."
    ),
    remedy_if_set="fewer --updates_per_rollout, a smaller --learning_rate or a larger --clip_range.",
    panel="Clipped pairs",
)
def pairs_are_clipped(case: Case) -> str | None:
    low, high = clipped_shares(case)
    if not is_one_sided(low, high) and low + high > 0.4:
        return (
            f"after the first update of a rollout the clip silences {low + high:.0%} of the pairs"
        )
    return None


@rule(
    "KL too strong",
    cause="The anchor holds the policy where it is.",
    remedy="a smaller --kl_weight, or --use_moving_KL True with a smaller --update_ref_model_step.",
    remedy_if_set="a smaller --kl_weight, or a smaller --update_ref_model_step.",
    panel="KL",
    only_if_flat_or_falling=True,
)
def kl_is_too_strong(case: Case) -> str | None:
    if case.kl_pull > 3 and not case.drift > 0.5:
        return f"the KL pulls {case.kl_pull:.1f} times as hard as the noise of the policy gradient"
    return None


def drift_text(case: Case) -> str:
    """How far the policy gets from its anchor, in a unit that its algorithm has."""
    if case.config.algorithm == "grpo":
        return f"{case.drift:.2g} from its anchor, where 1 is the exploration noise"
    # The KL of awm and nft is |v - v_anchor|^2, and a velocity is noise minus clip: its mean square is about 2.
    return f"{case.drift / 2:.2g} from its anchor, where 1 is the size of a velocity"


@rule(
    "learning rate too high",
    cause="The policy moves, but not toward what the reward asks for.",
    remedy="a smaller --learning_rate or more clips per update, and --resume_from_checkpoint of a good step.",
    panel="KL",
    only_if_flat_or_falling=True,
)
def learning_rate_is_too_high(case: Case) -> str | None:
    change = case.reward_change
    if case.direction == -1 or case.drift > 0.5:
        return (
            f"the reward changed by {change.mean:+.2g} ± {change.half:.1g}, while the policy drifted up to"
            f" {drift_text(case)}"
        )
    return None


@rule(
    "KL without effect",
    cause="The trust region does not hold the policy.",
    remedy="a larger --kl_weight, --kl_schedule fixed.",
    remedy_if_set="a larger --kl_weight.",
    panel="KL coefficient",
)
def kl_has_no_effect(case: Case) -> str | None:
    hacked = any(line.get("holdout/diverged") for line in case.run.validations)
    if (case.direction == -1 or hacked) and case.kl_pull < 0.03:
        return f"the KL pulls {case.kl_pull:.1g} times as hard as the noise of the policy gradient"
    return None


# progress


@rule(
    "learning rate too low",
    cause="Nothing moves.",
    remedy=(
        "a larger --learning_rate, LoRA needs about ten times that of all weights;"
        " fewer --warmup_steps if the warm-up has not ended."
    ),
    panel="KL",
    only_if_flat_or_falling=True,
)
def learning_rate_is_too_low(case: Case) -> str | None:
    """How far would the policy get until the end, if it kept its direction?"""
    c = case.config
    updates = case.most("updates")
    planned_updates = c.max_steps * c.updates_per_rollout / c.gradient_accumulation_steps

    # by its KL
    kl = column(case.run.full_lines, "kl/anchor")
    age = column(case.run.full_lines, "kl/anchor_age")
    paces = np.sqrt(2 * kl) / np.maximum(age - 1, 1)
    changes = [max(paces[paces > 0], default=math.nan) * planned_updates]

    # by the rewards of validation clips
    rewards = [(before.reward, after.reward) for before, after in case.validation_pairs]
    rewards = np.array(rewards).reshape(-1, 2)
    rewards = rewards[np.isfinite(rewards).all(1)]
    spread = rewards[:, 0].std() if len(rewards) > 2 else 0.0
    if spread > 0:
        moved = np.sqrt(np.square(np.diff(rewards)).mean()) / spread
        changes.append(moved * planned_updates / case.validated_updates)

    change = max((value for value in changes if math.isfinite(value)), default=math.nan)
    if not (updates >= MIN_FOR_TREND and change < 0.02):
        return None
    text = f"at this pace the whole run changes the policy by {change:.1g}, where 1 is a visible change"
    reached = case.most("lr")
    if c.warmup_steps > updates and reached < 0.5 * c.learning_rate:
        text += (
            f"; after {updates:.0f} of {c.warmup_steps} steps of warm-up the learning rate is {reached:.2g}"
            f" instead of {c.learning_rate:.2g}"
        )
    return text


@rule(
    "too few clips",
    cause="Updates are mostly noise, which the learning rate turns into a random walk.",
    remedy=(
        "more prompts per update: --gradient_accumulation_steps or --batch_size,"
        " with a smaller --learning_rate."
    ),
    panel="Gradient norm",
    only_if_flat_or_falling=True,
)
def clips_are_too_few(case: Case) -> str | None:
    c = case.config
    share, error = gradient_signal(case.run.full_lines)
    if case.kl_pull > 1:  # then most of the gradient is the KL's
        return None
    # the share measured is below 0 only by chance
    if not max(share, 0.0) + error < 0.25:
        return None

    clips = case.clips_per_rollout * c.gradient_accumulation_steps
    shape = f"{clips // c.num_generations} x {c.num_generations}"
    chosen = ""
    if c.group_trained < c.num_generations:
        chosen = f", of which {c.group_trained} of each group are trained,"
    at_most = max(share, 2 * error, 1e-3)
    needed = clips * (1 - at_most) / at_most
    return (
        f"{share:.0%} ± {error:.0%} of an update of {shape} clips{chosen} is signal;"
        f" it takes about {needed:.0f} clips or more to make it half"
    )


@rule(
    "slow",
    cause="Training is slow; the reward itself may be fine.",
    remedy="look at that phase: a reward server, a shared machine, swapping.",
    panel="Time per iteration",
)
def iterations_slowed_down(case: Case) -> str | None:
    early, late = case.early_and_late("time/total")
    if not late > 3 * early:
        return None

    def growth(phase: str) -> float:
        phase_early, phase_late = case.early_and_late(f"time/{phase}")
        return float(np.nan_to_num(phase_late - phase_early))

    ratio = late / (early or math.nan)
    phase = max(PHASES, key=growth)
    return f"an iteration takes {late:.3g} s, {ratio:.1f} times as long as at first, most of it in {phase}"
