"""Why is the reward flat? Findings about a run, from its folder alone; docs/diagnosis.md explains each.

A rule is a name in findings.json, whether it holds, and the numbers of its evidence. What a run did not record is NaN,
for which no comparison holds, so nothing is said about it. Shapes: N logged iterations, T denoising steps.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from sage_grpo.config.fields import FIELDS
from sage_grpo.config.parse import from_values, yaml_mapping
from sage_grpo.files.json_files import read_object
from sage_grpo.intervals import Interval, interval, student_95
from sage_grpo.runs.clips import pair_clips, read_validations
from sage_grpo.runs.history import RunHistory, column, numbers

# by rank: what makes other findings meaningless comes first; `excused` ones are none while the reward rises
FINDINGS = json.loads(Path(__file__).with_name("findings.json").read_text())
FEW = 8  # iterations or updates before which nothing is said about a trend
BF16 = 2.0**-9  # relative rounding error
PHASES = ("rollout", "decode", "reward", "gold", "anchor", "update")
STOPPED = {
    "first ratio": "first ratio",
    "not finite": "not finite",
    "rewards fail": "rewards failed",
}
Rule = tuple[str, bool, dict[str, Any]]


class Finding:
    def __init__(self, name: str, values: dict[str, Any]) -> None:
        evidence, self.cause, self.remedy, self.panel, self.excused = FINDINGS[name].values()
        self.name, self.evidence = name, evidence.format(**values)

    def __str__(self) -> str:
        return f"{self.name}: {self.evidence}. {self.cause} Remedy: {self.remedy}"


def diagnose(run: RunHistory) -> list[Finding]:
    """What is wrong with a run, the likeliest cause first."""
    case, rules = Case(run), (broken, reward_rules, sampling_rules, update_rules, progress_rules)
    text = {"text": f"the run stopped: {case.failure:.200}"}
    held = {name: text for name, words in STOPPED.items() if words in case.failure}
    known = run.train and case.has_config
    held |= {name: values for part in rules if known for name, holds, values in part(case) if holds}
    found = [Finding(name, held[name]) for name in FINDINGS if name in held]
    return [one for one in found if not (one.excused and case.direction in (1, None))]


class Case:
    """A run, and what its rules share."""

    def __init__(self, run: RunHistory) -> None:
        config, status = run.folder / "config.yaml", run.folder / "status.json"
        self.has_config = config.is_file()
        given = (
            yaml_mapping(config.read_text("utf-8", "replace"), str(config))
            if self.has_config
            else {}
        )
        self.run, self.config = (
            run,
            from_values({key: value for key, value in given.items() if key in FIELDS}),
        )
        ended = read_object(status) if status.is_file() else {}
        self.failure = str(ended.get("message")) if ended.get("state") == "failed" else ""
        self.clips = max(
            1, self.config.batch_size * (run.head.get("ranks") or 1) // self.config.sp_size
        )
        kept = read_validations(run.folder)
        ends = [line["step"] for line in run.validations if line["step"] in kept] or [0]
        self.pairs = (
            pair_clips(*(kept[step] for step in (ends[0], ends[-1]))) if len(ends) > 1 else []
        )
        self.validated = interval(new.reward - old.reward for old, new in self.pairs)
        self.trained, self.gap, self.pull = self.slope(), self.gap_to_validation(), self.kl_pull()
        self.drift = math.sqrt(
            2 * self.most("kl/anchor")
        )  # of the velocity, in units of the exploration noise
        by_validation = math.isfinite(self.validated.half)
        self.progress = self.validated if by_validation else self.trained
        # a change that is small against the spread within groups, even if it went on until the end, is none
        until = self.config.max_steps / (ends[-1] - ends[0] if by_validation else 1)
        small = abs(self.progress.mean) * until < self.mean("reward/group_std") / 3
        known = math.isfinite(self.progress.half)
        self.direction = (
            (0 if small else self.progress.sign) if known else None
        )  # +1 rises, 0 is flat, -1 falls

    def values(self, key: str) -> np.ndarray:
        """The finite values of a metric of training."""
        found = column(self.run.train, key)
        return found[np.isfinite(found)]

    def mean(self, key: str) -> float:
        return interval(self.values(key)).mean

    def most(self, key: str) -> float:
        return float(max(self.values(key), default=math.nan))

    def ends(self, key: str) -> tuple[float, float]:
        """Medians of a metric over the first and over the last iterations; the very first one warms up."""
        found = self.values(key)[1:]
        parts = (
            (found[:FEW], found[-FEW // 2 :]) if len(found) >= 2 * FEW else ([math.nan], [math.nan])
        )
        return float(np.median(parts[0])), float(np.median(parts[1]))

    def schedule(self, key: str) -> np.ndarray:
        """(T,), or empty."""
        return np.array(numbers((self.run.head.get("schedule") or {}).get(key), key))

    def slope(self) -> Interval:
        """Change of the reward of training clips, per iteration."""
        steps, reward = (column(self.run.train, key) for key in ("step", "reward/total"))
        known = np.isfinite(reward)
        if known.sum() < FEW:
            return interval([])
        (slope, _), errors = np.polyfit(steps[known], reward[known], 1, cov=True)
        return Interval(float(slope), student_95(int(known.sum()) - 2) * math.sqrt(errors[0, 0]))

    def gap_to_validation(self) -> float:
        """How far the first validation scores above the next iteration, whose policy is the same.

        In standard deviations of a batch, less two of the mean of its groups: a lower bound.
        """
        before = self.run.validations[:1]
        after = [
            line for line in self.run.train if before and line["step"] == before[0]["step"] + 1
        ]
        if not after:
            return math.nan
        difference = column(before, "reward/total").item() - column(after, "reward/total").item()
        gap = difference / max(column(after, "reward/std").item(), 1e-12)
        return math.copysign(
            max(abs(gap) - 2 / math.sqrt(self.clips / self.config.num_generations), 0.0), gap
        )

    def kl_pull(self) -> float:
        """Gradient of the KL over the noise of the policy gradient, in an update.

        At the velocity and per pair they are lambda N_t sqrt(2 KL_t) and S_t N_t; the first adds up over the P pairs of
        an update, the second as sqrt(P).
        """
        c, kl = self.config, self.run.grid("kl_anchor")
        n, s = self.schedule("gradient_scale"), self.schedule("equalizer")
        if (
            kl.shape[1] != len(n) or not (kl > 0).any() or c.algorithm == "nft"
        ):  # whose gradient is another
            return math.nan
        squares = np.nansum(2 * kl * n**2 * (s**4 if c.use_kl_balancing else 1), 1)
        policy = np.where(np.isfinite(kl), (s * n) ** 2, 0).sum(1)
        pairs = (
            self.clips
            * c.gradient_accumulation_steps
            * np.isfinite(kl).sum(1)
            / c.updates_per_rollout
        )
        coef = column(self.run.train, "kl/coef") * c.dual_kl_moving_weight
        return float(
            np.median((coef * np.sqrt(pairs * squares / np.maximum(policy, 1e-30)))[squares > 0])
        )


def broken(case: Case) -> Iterator[Rule]:
    """Faults that make the other numbers meaningless."""
    c, train, worst = case.config, case.run.train, case.most("policy/ratio_max_deviation")
    exact = c.updates_per_rollout == 1 and c.algorithm == "grpo"
    yield (
        "first ratio",
        exact and worst > 0,
        {"text": f"|ratio - 1| reached {worst:.2g} before any update"},
    )
    for key, what in (
        ("signal/rank_prompts", "prompts or seeds"),
        ("signal/rank_weights", "weights"),
    ):
        wrong = [line["step"] for line in train if line.get(key)]
        yield "ranks differ", bool(wrong), {"what": what, "step": min(wrong, default=0)}
    norms = [line["policy/grad_norm"] for line in train if "policy/grad_norm" in line]
    lost = norms.count(None)
    yield (
        "not finite",
        lost > 0.02 * len(norms),
        {"text": f"no finite gradient in {lost} of {len(norms)} updates"},
    )
    oldest, due = case.most("kl/anchor_age"), c.update_ref_model_step
    late = c.use_moving_KL and oldest > due + c.updates_per_rollout
    yield (
        "wrong anchor",
        late,
        {"text": f"the anchor is {oldest:.0f} updates old, and due every {due}"},
    )
    keys = ("signal/anchor_moved", "kl/anchor_age", "lr", "signal/weight_rms")
    moved, age, rate, size = (column(train, key) for key in keys)
    far = moved / (
        2 * rate * age + 2 * BF16 * size + 1e-30
    )  # optimizers move a weight by about the learning rate
    at = int(np.nanargmax(far)) if np.isfinite(far).any() else 0
    text = f"weights of policy and anchor differ by {moved[at]:.2g}, more than {age[at]:.0f} updates can move them"
    yield "wrong anchor", far[at] > 1, {"text": text}


def reward_rules(case: Case) -> Iterator[Rule]:
    failed, same = case.mean("reward/failed") / case.clips, case.ends("signal/same_reward")
    error = next(
        (line["reward/error"] for line in case.run.train if line.get("reward/error")),
        "an unknown error",
    )
    yield (
        "rewards fail",
        failed > 0.02,
        {"text": f"{failed:.1%} of the rewards failed, first with: {error:.120}"},
    )
    yield "rewards repeat", min(same) > 0.05 and max(same) < 0.9, {"share": max(same)}
    before, now = case.ends("signal/variety")
    yield "variety collapsed", now < 0.3 * before, {"now": now, "share": now / (before or math.nan)}
    flat = case.mean("reward/flat_groups") * case.config.num_generations / case.clips
    yield "flat groups", flat > 0.5, {"share": flat}
    twice = column(case.run.validations, "signal/rescoring")
    noise = max(twice[np.isfinite(twice)], default=math.nan) / (
        case.mean("reward/group_std") or math.nan
    )
    yield "noisy reward", noise > 0.7, {"share": noise}


def sampling_rules(case: Case) -> Iterator[Rule]:
    """Exploration, if there is any, and validation beside it."""
    c, std, gap, gain = case.config, case.schedule("std"), case.gap, case.trained
    steps = (c.validation_num_inference_steps or c.num_sampling_steps) / c.num_sampling_steps
    alike, last = c.algorithm == "grpo" and 0.25 < steps < 4, std[-1] if len(std) else math.nan
    least = (case.run.train[-1]["step"] - case.run.train[0]["step"]) * (gain.mean - gain.half)
    most = case.validated.mean + case.validated.half
    text = f"training clips gained at least {least:.2g}, validation at most {most:.2g}"
    if c.ema_decay:
        text += (
            f"; averaged weights are still {c.ema_decay ** case.most('updates'):.0%} the first ones"
        )
    yield "validation unlike training", least > 0 and most < 0.3 * least, {"text": text}
    yield "noise in the clips", alike and gap > 1 and last > 0.02, {"gap": gap, "std": last}
    yield "too much exploration", alike and gap > 1 and not last > 0.02, {"gap": gap}
    yield "too little exploration", 0 < np.linalg.norm(std) < 0.1, {"std": np.linalg.norm(std)}


def update_rules(case: Case) -> Iterator[Rule]:
    c, updates, rms = case.config, case.config.updates_per_rollout, case.mean("policy/grad_rms")
    yield "gradient below eps", 0 < rms < 10 * c.adam_eps, {"rms": rms, "eps": c.adam_eps}
    apart, rate = 2 * BF16 * case.mean("signal/weight_rms"), case.most("lr")
    yield (
        "weights too coarse",
        c.master_weight_type == "bf16" and 2 * rate < apart,
        {"apart": apart, "rate": rate},
    )
    grid = case.run.grid("grad_v")
    sizes = np.array(
        [np.median(step[np.isfinite(step)]) for step in grid.T if np.isfinite(step).any()]
    )
    if len(sizes) > 1 and not case.pull > 1:  # else most of it is the KL's
        top = int(sizes.argmax())
        ratio = sizes[top] / (np.median(np.delete(sizes, top)) or math.nan)
        yield "one step dominates", ratio > 3, {"step": top + 1, "ratio": ratio}
    low, high = (
        case.mean(f"policy/clip_{side}") * updates / max(updates - 1, 1e-9)
        for side in ("low", "high")
    )
    values = {"share": low + high, "which": "bad" if low > high else "good"}
    one_sided, clips = max(low, high) > 2.5 * min(low, high), updates > 1 and c.algorithm != "nft"
    yield "clipped on one side", clips and one_sided and low + high > 0.2, values
    yield "clipped", clips and not one_sided and low + high > 0.4, values
    hacked = any(line.get("holdout/diverged") for line in case.run.validations)
    yield "KL too strong", case.pull > 3 and not case.drift > 0.5, {"pull": case.pull}
    yield (
        "KL without effect",
        (case.direction == -1 or hacked) and case.pull < 0.03,
        {"pull": case.pull},
    )


def progress_rules(case: Case) -> Iterator[Rule]:
    c, updates = case.config, case.most("updates")
    values = {"change": case.progress.mean, "half": case.progress.half, "drift": case.drift}
    yield "learning rate too high", case.direction == -1 or case.drift > 0.5, values
    # how far the policy would get until the end in one direction: by its KL, and by the rewards of validation clips
    planned = c.max_steps * c.updates_per_rollout / c.gradient_accumulation_steps
    kl, age = (column(case.run.train, f"kl/{name}") for name in ("anchor", "anchor_age"))
    paces = np.sqrt(2 * kl) / np.maximum(age - 1, 1)
    reached = [max(paces[paces > 0], default=math.nan) * planned]
    rewards = np.array([(old.reward, new.reward) for old, new in case.pairs]).reshape(-1, 2)
    rewards = rewards[np.isfinite(rewards).all(1)]
    if len(rewards) > 2 and rewards[:, 0].std() > 0:
        reached.append(
            np.sqrt(np.square(np.diff(rewards)).mean()) / rewards[:, 0].std() * planned / updates
        )
    pace = max((one for one in reached if math.isfinite(one)), default=math.nan)
    yield "learning rate too low", updates >= FEW and pace < 0.02, {"pace": pace}
    shares, squares = (
        column(case.run.train, "signal/gradient"),
        column(case.run.train, "policy/grad_norm") ** 2,
    )
    known, clips = np.isfinite(shares) & (squares > 0), case.clips * c.gradient_accumulation_steps
    if known.sum() >= FEW and not case.pull > 1:
        weights = squares[known] / squares[known].sum()
        share = shares[known] @ weights
        error = np.linalg.norm((shares[known] - share) * weights)
        most, shape = (
            max(share, 2 * error, 1e-3),
            f"{clips // c.num_generations} x {c.num_generations}",
        )
        values = {
            "share": share,
            "error": error,
            "shape": shape,
            "needed": clips * (1 - most) / most,
        }
        yield "too few clips", share + error < 0.25, values
    before, now = case.ends("time/total")
    grown = {part: np.subtract(*case.ends(f"time/{part}")) for part in PHASES}
    part = min(grown, key=lambda part: np.nan_to_num(grown[part]))
    yield "slow", now > 3 * before, {"now": now, "ratio": now / (before or math.nan), "part": part}
