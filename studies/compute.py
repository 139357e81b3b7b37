"""Results against compute: what a method reaches for its units, and how many units it takes to reach a reward.

A unit is one forward of one clip at full size. `studies.second_edition --summary` draws and writes all of this.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from matplotlib.axes import Axes

from sage_grpo.config import Config
from sage_grpo.flags import from_values
from sage_grpo.intervals import interval
from sage_grpo.tools.figure_style import colors_of
from sage_grpo.tools.paired import number
from sage_grpo.tools.plan import plan_of
from studies.page import finish, over_seeds, smooth
from studies.questions import ROOT
from studies.records import Record, curve, validated
from studies.result_tables import LEVEL, Arms, crossing, markdown
from studies.statistics import corrected, p_value

# units of a forward and backward with LoRA, of a decode and of a reward, as measured at full size (docs/efficiency.md)
TRAINED, DECODED, REWARDED = 3.7, 3.8, 0.7
ALL_STEPS = "sage, all but the last step"  # the arm that windows are compared with
SHARE = 0.75  # of its gain in the search, which a run with another seed should reach as well
MEASURED = {"reward/total": "reward", "gold/match": "gold match", "gold/distance": "distance to the manifold"}
VARIETY = "signal/variety"


def units(config: Config) -> float:
    """Units of one clip, in rollout, anchor and update, by the planner's counts; decode and reward included."""
    plan = plan_of(replace(config, pretrained_model_root=str(ROOT / config.pretrained_model_root)), 1)
    passes = plan.rollout_passes + plan.training_passes * (plan.anchored + TRAINED)  # each pair is in one update
    return passes * plan.micro_batch / config.batch_size + DECODED + REWARDED


def per_iteration(record: Record) -> float:
    config = from_values(record["config"])
    return units(config) * config.batch_size


def budget(record: Record) -> float:
    """Units of the whole run, even if it was stopped."""
    return per_iteration(record) * record["config"]["max_steps"]


def validations(record: Record, key: str) -> tuple[np.ndarray, np.ndarray]:
    """Units spent before each validation of a run, and a metric there."""
    found = record["validation"]
    return per_iteration(record) * np.array(found["step"], float), np.array(found[key], float)


def level_of(found: Mapping[str, Record]) -> float:
    """The reward to be reached: the base model's, and SHARE of what ALL_STEPS gained at its best rate in the search."""
    searched = [r for r in found.values() if r["study"] == "rates" and r["arm"].rpartition(", ")[0] == ALL_STEPS]
    ends = [[validated(r, "reward/total", at) for at in (0, -1)] for r in searched if not r["collapsed"]]
    first, last = max(ends, key=lambda pair: pair[1], default=(math.nan, math.nan))
    return first + SHARE * (last - first)


def units_to(record: Record, level: float) -> float:
    """Units until held-out prompts first have this reward, linearly between validations; NaN if they never have."""
    spent, rewards = validations(record, "reward/total")
    return crossing(rewards, spent, level)


def cost_table(arms: Arms, found: Mapping[str, Record]) -> str:
    """How many units each arm takes to reach the level, over those of ALL_STEPS.

    A run that never reaches it counts with all its units, which favors it. Seeds in which ALL_STEPS never does leave
    the pairs.
    """
    level, base = level_of(found), arms.get(ALL_STEPS, {})
    reference = {seed: units_to(record, level) for seed, record in base.items()}
    rows, logs = [], {}
    for arm, records in ((arm, records) for arm, records in arms.items() if records):
        taken = {seed: units_to(record, level) for seed, record in records.items()}
        counted = {seed: budget(records[seed]) if math.isnan(value) else value for seed, value in taken.items()}
        logs[arm] = [math.log(counted[seed] / value) for seed, value in reference.items() if seed in counted]
        reached = sum(map(math.isfinite, taken.values()))
        average = math.exp(interval([math.log(value) for value in counted.values()]).mean)
        bound = "" if reached == len(records) else "over "
        rows.append([arm, str(len(records)), str(reached), f"{bound}{average:,.0f}"])
    others = [arm for arm in logs if arm != ALL_STEPS]
    tests = dict(zip(others, corrected([p_value(logs[arm]) for arm in others], len(arms) - 1), strict=True))
    for row in rows:
        change = interval(logs[row[0]])
        ratio, low, high = (math.exp(change.mean + end) for end in (0.0, -change.half, change.half))
        decided = change.sign if tests.get(row[0], 1.0) < LEVEL else 0
        verdict = {-1: "**cheaper**", 1: "**dearer**", 0: "undecided"}[decided]
        told = f"{ratio:.2f} ({low:.2f} to {high:.2f}): {verdict}" if math.isfinite(low) else f"{ratio:.2f}, {verdict}"
        kept = interval([relative_variety(record)[-1] for record in arms[row[0]].values()])
        row += [told if row[0] in tests else "", f"{number(kept.mean, 2)} ± {number(kept.half, 2)}"]
    head = ["arm", "runs", "reach it", "units, geometric mean", f"over those of {ALL_STEPS}", "variety, end over start"]
    goal = f"a reward of {level:.3f}: {SHARE:.0%} of what {ALL_STEPS} gained in the search"
    text = f"Units until held-out prompts have {goal}. Ratios by pairs of seeds, with 95 % intervals."
    return f"{text}\n\n{markdown([head, *rows])}"


def draw_compute(axes: np.ndarray, arms: Arms, variable: str) -> None:
    """Held-out reward, gold match and distance, and the variety of training clips, against thousands of units."""
    found = {arm: list(records.values()) for arm, records in arms.items() if records}
    colors = list(colors_of({arm: arm for arm in found}).values())  # dashed where they come again
    styles = {arm: {"color": colors[i], "ls": ("-", "--")[colors[i] in colors[:i]]} for i, arm in enumerate(found)}
    for ax, (key, title) in zip(axes.flat, MEASURED.items(), strict=False):
        for arm, records in found.items():
            draw_validations(ax, records, key, label=arm, **styles[arm])
        ax.set(title=f"{title}, held out", xlabel="1,000 units")
    for arm, records in found.items():
        axes.flat[3].plot(*varieties(records), label=arm, **styles[arm])
    axes.flat[3].set(title="variety, relative to the start", xlabel="1,000 units")
    finish(axes, variable, below=True)


def draw_validations(ax: Axes, records: Sequence[Record], key: str, color: str, **style: str) -> None:
    """Means over seeds at the validations, and the 95 % interval over seeds at the last."""
    whole = [record for record in records if not math.isnan(validated(record, key))]
    if not whole:
        return
    spent, rows = validations(whole[0], key)[0] / 1000, [validations(record, key)[1] for record in whole]
    ax.plot(spent, over_seeds(rows), marker="o", ms=3, color=color, **style)
    ax.errorbar(spent[-1], *interval_of([row[-1] for row in rows]), color=color, capsize=2)


def interval_of(values: Sequence[float]) -> tuple[float, float]:
    """What an error bar shows: none where there are too few values for an interval."""
    found = interval(values)
    return found.mean, float(np.nan_to_num(found.half))


def varieties(records: Sequence[Record]) -> tuple[np.ndarray, np.ndarray]:
    """Thousands of units, and the mean over seeds of the variety relative to a run's first."""
    length = min(len(record["steps"]) for record in records)
    steps = per_iteration(records[0]) * np.array(records[0]["steps"][:length]) / 1000
    return steps, over_seeds([relative_variety(record)[:length] for record in records])


def relative_variety(record: Record) -> np.ndarray:
    """How much the clips of a prompt differ, over the run, relative to its start."""
    found = smooth(curve(record, VARIETY))
    return found / found[0]


def draw_batches(axes: np.ndarray, arms: Arms, variable: str) -> None:
    """Reward and match against prompts per update, after equally many clips and at equal reward; 95 % intervals."""
    counts = {arm: int(arm.split()[0]) for arm in arms if arms[arm]}
    for ax, key in zip(axes.flat, ("reward/total", "gold/match"), strict=False):
        found = {arm: [validated(record, key) for record in arms[arm].values()] for arm in counts}
        draw_counts(ax, counts, found, f"{MEASURED[key]} at equal clips")
    draw_counts(axes.flat[2], counts, matches_at_equal_reward(arms), "gold match at equal reward")


def matches_at_equal_reward(arms: Arms) -> dict[str, list[float]]:
    """The match of each arm and seed where its reward first is the highest that all arms reach with that seed."""
    found: dict[str, list[float]] = {arm: [] for arm, records in arms.items() if records}
    for seed in set.intersection(*(set(arms[arm]) for arm in found)):
        rewards = {arm: validations(arms[arm][seed], "reward/total")[1] for arm in found}
        level = min(float(np.nanmax(values)) for values in rewards.values())
        for arm in found:
            found[arm].append(crossing(rewards[arm], validations(arms[arm][seed], "gold/match")[1], level))
    return found


def draw_counts(ax: Axes, counts: Mapping[str, int], found: Mapping[str, Sequence[float]], title: str) -> None:
    middles, halves = zip(*(interval_of(found[arm]) for arm in counts), strict=True)
    ax.errorbar(list(counts.values()), middles, halves, fmt="o-", ms=4, capsize=2.5)
    ax.set(title=title, xlabel="prompts per update", xscale="log")
    ax.set_xticks(list(counts.values()), [str(count) for count in counts.values()])
    ax.minorticks_off()
