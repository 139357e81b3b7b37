"""Results against compute: what a method reaches for its units, and how many units it takes to reach a reward.

A unit is one forward of one clip at full size. `research.studies.second_edition --summary` draws and writes all of this.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter

import numpy as np
from matplotlib.axes import Axes

from research.studies.page import over_seeds, smooth
from research.studies.questions import ROOT
from research.studies.records import Record, as_float, curve, mean, validated
from research.studies.result_tables import LEVEL, VERDICTS, Arms, crossing, markdown
from research.studies.statistics import corrected, p_value
from sage_grpo.config.fields import Config
from sage_grpo.config.parse import from_values
from sage_grpo.intervals import Interval, interval
from sage_grpo.tools.figure_style import GREY, PALETTE
from sage_grpo.tools.paired import number
from sage_grpo.tools.plan.planner import plan_of

# units of a forward and backward with LoRA, of a decode and of a reward, as measured at full size (docs/scaling.md)
TRAINED, DECODED, REWARDED = 3.7, 3.8, 0.7
ALL_STEPS = "sage, all but the last step"  # the arm that windows are compared with
SHARE = 0.75  # of its gain in the search, which a run with another seed should reach as well
MATCH, VARIETY = "gold/match", "signal/variety"
MEASURED = {"reward/total": "reward", MATCH: "gold match"}
NAMED = (
    "awm",
    "MixGRPO, sliding window of 4",
    "flash, 1 step per prompt",
    "flow",
    ALL_STEPS,
    "nft",
    "published",
)
COLORS = dict(zip(NAMED, PALETTE, strict=False))  # of the methods that the figure names


def units(config: Config) -> float:
    """Units of one clip, in rollout, anchor and update, by the planner's counts; decode and reward included."""
    plan = plan_of(
        replace(config, pretrained_model_root=str(ROOT / config.pretrained_model_root)), 1
    )
    passes = plan.rollout_passes + plan.training_passes * (
        plan.anchor_fraction + TRAINED
    )  # each pair is in one update
    return passes * plan.micro_batch_size / config.batch_size + DECODED + REWARDED


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
    searched = [
        r
        for r in found.values()
        if r["study"] == "rates" and r["arm"].rpartition(", ")[0] == ALL_STEPS
    ]
    ends = [
        [validated(r, "reward/total", at) for at in (0, -1)] for r in searched if not r["collapsed"]
    ]
    first, last = max(ends, key=lambda pair: pair[1], default=(math.nan, math.nan))
    return first + SHARE * (last - first)


def units_to(record: Record, level: float) -> float:
    """Units until held-out prompts first have this reward, linearly between validations; NaN if they never have."""
    spent, rewards = validations(record, "reward/total")
    return crossing(rewards, spent, level)


def spent_to(records: Mapping[int, Record], level: float) -> dict[int, float]:
    """By seed, the units to reach the level; all its units for a run that never does, which favors it."""
    taken = {seed: units_to(record, level) for seed, record in records.items()}
    return {
        seed: budget(records[seed]) if math.isnan(value) else value for seed, value in taken.items()
    }


def log_ratios(
    records: Mapping[int, Record], reference: Mapping[int, Record], level: float
) -> list[float]:
    """Logarithms of units over those of the reference, by pairs of seeds in which the reference reaches the level."""
    counted, base = (
        spent_to(records, level),
        {seed: units_to(record, level) for seed, record in reference.items()},
    )
    return [
        math.log(counted[seed] / value)
        for seed, value in base.items()
        if seed in counted and value > 0
    ]


def ratio_of(logs: Sequence[float]) -> str:
    change = interval(logs)
    ratio, low, high = (math.exp(change.mean + end) for end in (0.0, -change.half, change.half))
    return f"{ratio:.2f} ({low:.2f} to {high:.2f})" if math.isfinite(low) else f"{ratio:.2f}"


def match_at(record: Record, level: float) -> float:
    """The gold match where held-out prompts first have this reward; NaN if they never have."""
    return crossing(validations(record, "reward/total")[1], validations(record, MATCH)[1], level)


def matches_there(arms: Arms, level: float) -> dict[str, str]:
    """The gold match of each arm where its reward is at the level, and that minus the one of ALL_STEPS, by pairs."""
    value = partial(match_at, level=level)
    there = {
        arm: np.array([value(r) for r in records.values()])
        for arm, records in arms.items()
        if records
    }
    told = {arm: number(mean(values), 2) for arm, values in there.items()}
    for arm, (gap, decided) in leads(arms, ALL_STEPS, value).items():
        told[arm] += f" ({number(gap.mean, 3, '+')} ± {number(gap.half)}: {VERDICTS[decided]})"
    return told


def cost_table(arms: Arms, found: Mapping[str, Record]) -> str:
    """How many units each arm takes to reach the level, over those of ALL_STEPS, and the gold match there."""
    level, there = level_of(found), {arm: records for arm, records in arms.items() if records}
    matches = matches_there(arms, level)
    logs = {
        arm: log_ratios(records, arms.get(ALL_STEPS, {}), level) for arm, records in there.items()
    }
    others = [arm for arm in logs if arm != ALL_STEPS]
    tests = dict(
        zip(others, corrected([p_value(logs[arm]) for arm in others], len(arms) - 1), strict=True)
    )
    rows = []
    for arm, records in there.items():
        counted = spent_to(records, level)
        reached = sum(math.isfinite(units_to(record, level)) for record in records.values())
        average = math.exp(interval([math.log(value) for value in counted.values()]).mean)
        bound = "" if reached == len(records) else "over "
        decided = interval(logs[arm]).sign if tests.get(arm, 1.0) < LEVEL else 0
        verdict = {-1: "**cheaper**", 1: "**costlier**", 0: "undecided"}[decided]
        told = f"{ratio_of(logs[arm])}: {verdict}" if arm in tests else ""
        cells = [f"{bound}{average:,.0f}", told, matches[arm], variety_of(records)]
        rows.append([arm, str(len(records)), str(reached), *cells])
    head = ["arm", "runs", "reach it", "units, geometric mean", f"over those of {ALL_STEPS}"]
    head += [f"gold match there, minus that of {ALL_STEPS}", "variety, end over start"]
    goal = f"a reward of {level:.3f}: {SHARE:.0%} of what {ALL_STEPS} gained in the search"
    text = f"Units until held-out prompts have {goal}. By pairs of seeds, with 95 % intervals."
    return f"{text}\n\n{markdown([head, *rows])}"


def variety_of(records: Mapping[int, Record]) -> str:
    """How much clips of a prompt vary in the last logged iteration, over the first."""
    curves = [curve(record, VARIETY) for record in records.values()]
    kept = interval([float(values[-1] / values[0]) for values in curves])
    return f"{number(kept.mean, 2)} ± {number(kept.half, 2)}"


last_match = partial(validated, key=MATCH)


def leads(
    arms: Arms, reference: str, value: Callable[[Record], float] = last_match
) -> dict[str, tuple[Interval, int]]:
    """A value of each other arm minus the reference's, by pairs that have it, and its decision: +1, -1 or 0."""
    base = arms.get(reference, {})
    gaps = {
        arm: [value(records[seed]) - value(base[seed]) for seed in records.keys() & base.keys()]
        for arm, records in arms.items()
        if records and arm != reference
    }
    tests = corrected([p_value(own) for own in gaps.values()], len(arms) - 1)
    found = {arm: interval(own) for arm, own in gaps.items()}
    return {
        arm: (found[arm], found[arm].sign if p < LEVEL else 0)
        for arm, p in zip(found, tests, strict=True)
    }


def winners(arms: Arms) -> list[str]:
    """The arms that beat the first one in gold match and that no other of these beats, the highest match first."""
    first = next(iter(arms))
    better = [arm for arm, (_, decided) in leads(arms, first).items() if decided > 0]
    beaten = {
        arm for one in better for arm, (_, decided) in leads(arms, one).items() if decided < 0
    }
    return sorted(
        (arm for arm in better if arm not in beaten), key=lambda arm: -match_of(arms[arm]).mean
    )


def match_of(records: Mapping[int, Record]) -> Interval:
    return interval([last_match(record) for record in records.values()])


def decision_table(arms: Arms, found: Mapping[str, Record]) -> str:
    """All methods, the highest gold match first: what they reach, for how many units, and how far behind the winner."""
    first, level = next(iter(arms)), level_of(found)
    there = {arm: records for arm, records in arms.items() if records}
    if first not in there or len(there) < 2:
        return "No results yet.\n"
    won = winners(arms)
    behind = leads(arms, won[0]) if won else {}
    goal = f"units to a reward of {level:.2f}, {first} = 1"
    rows = [["method", "gold match", "in training", "reward", goal, "variety", "verdict"]]
    for arm in sorted(there, key=lambda arm: -match_of(there[arm]).mean):
        records = there[arm].values()
        training = interval([float(curve(record, MATCH)[-1]) for record in records])
        reward = interval([validated(record, "reward/total") for record in records])
        reached = all(math.isfinite(units_to(record, level)) for record in records)
        ratio = ratio_of(log_ratios(there[arm], there[first], level))
        units_taken = "1" if arm == first else ratio if reached else f"over {ratio}"
        verdict = ("**joint winner**" if len(won) > 1 else "**winner**") if arm in won else ""
        if arm in behind and arm not in won:
            gap, decided = behind[arm]
            how = {-1: "behind", 0: "not told apart from", 1: "ahead of"}[decided]
            verdict = f"{how} {won[0]}: {number(gap.mean, 2, '+')} ± {number(gap.half, 2)}"
        shown = [
            f"{number(one.mean, 2)} ± {number(one.half, 2)}"
            for one in (match_of(there[arm]), training, reward)
        ]
        rows.append([arm, *shown, units_taken, variety_of(there[arm]), verdict])
    start = next(iter(there[first].values()))
    base = f"Before training: match {validated(start, MATCH, 0):.2f}, reward {validated(start, 'reward/total', 0):.2f}."
    return f"{markdown(rows)}\n± and parentheses: 95 % intervals over seeds. {base}\n"


def sampler_table(arms: Arms) -> str:
    """The samplers at equal injected energy: reward and gold match minus those of sage, which has the same window."""
    if not all(arms.values()):
        return "No results yet.\n"
    rows = [
        ["sampler", "learning rate", *(f"{MEASURED[key]} minus that of sage" for key in MEASURED)]
    ]
    found = {key: leads(arms, ALL_STEPS, partial(validated, key=key)) for key in MEASURED}
    for arm in (arm for arm in arms if arm != ALL_STEPS):
        told = [found[key][arm] for key in MEASURED]
        cells = [
            f"{number(gap.mean, 3, '+')} ± {number(gap.half)}: {VERDICTS[decided]}"
            for gap, decided in told
        ]
        rows.append([arm, f"{next(iter(arms[arm].values()))['config']['learning_rate']:g}", *cells])
    rate = next(iter(arms[ALL_STEPS].values()))["config"]["learning_rate"]
    return f"{markdown(rows)}\nThe learning rate of sage is {rate:g}. p-values corrected over {len(rows) - 1} samplers.\n"


def spread_table(arms: Arms) -> str:
    """How far clips of a prompt spread in what it leaves open (research/studies/spread.py): the base model, then each arm."""
    every = {
        arm: [r["spread"] for r in records.values() if "spread" in r]
        for arm, records in arms.items()
    }
    found = {arm: own for arm, own in every.items() if own}
    if not found:
        return "No results yet.\n"
    keys = ("classes", "places", "classes if both match", "places if both match", "match")
    bases = {
        arm: {key: as_float(own[0]["base"][key]) for key in keys} for arm, own in found.items()
    }
    cells = {arm: [arm, str(len(own))] for arm, own in found.items()}
    for key in keys:
        ends = {arm: [as_float(one["end"][key]) for one in own] for arm, own in found.items()}
        gaps = {arm: [value - bases[arm][key] for value in values] for arm, values in ends.items()}
        tests = corrected([p_value(values) for values in gaps.values()], len(arms))
        for arm, p in zip(found, tests, strict=True):
            end, sign = interval(ends[arm]), interval(gaps[arm]).sign if p < LEVEL else 0
            verdict = (
                {-1: ": **narrower**", 0: ": undecided", 1: ": **wider**"}[sign]
                if key != "match"
                else ""
            )
            cells[arm].append(f"{number(end.mean)} ± {number(end.half)}{verdict}")
    starts: dict[tuple[str, ...], str] = {}
    for arm, base in bases.items():
        starts.setdefault(tuple(map(number, base.values())), f"base model, sampled as {arm}")
    if len(starts) == 1:
        starts = dict.fromkeys(starts, "base model")
    rows = [
        ["weights", "runs", *keys],
        *([name, "", *told] for told, name in starts.items()),
        *cells.values(),
    ]
    return f"{markdown(rows)}\n±: 95 % intervals over seeds. p-values corrected over {len(arms)} methods.\n"


def search_table(found: Mapping[str, Record], studies: Sequence[str]) -> str:
    """Last reward and gold match of each arm at each learning rate of a search; bold where the reward is highest."""
    cells: dict[str, dict[float, Record]] = {}
    for record in (record for record in found.values() if record["study"] in studies):
        cells.setdefault(record["arm"].rpartition(", ")[0], {})[
            record["config"]["learning_rate"]
        ] = record
    rates = sorted({rate for one in cells.values() for rate in one})
    rows = [["arm", *(f"{rate:g}" for rate in rates)]]
    for arm in sorted(
        cells, key=lambda arm: [int(word) for word in arm.split() if word.isdigit()]
    ):  # 2 before 16
        one = cells[arm]
        rewards = {
            r: validated(record, "reward/total")
            for r, record in one.items()
            if not record["collapsed"]
        }
        best = max(rewards, key=rewards.__getitem__, default=None)
        shown = {
            r: f"{number(value, 3)}, {number(validated(one[r], MATCH), 2)}"
            for r, value in rewards.items()
        }
        lost = dict.fromkeys(one, "collapsed") | shown
        rows.append([arm, *(f"**{lost[r]}**" if r == best else lost.get(r, "") for r in rates)])
    return (
        f"{markdown(rows)}\nReward and gold match of one run, seed 101.\n"
        if cells
        else "No results yet.\n"
    )


def draw_compute(
    axes: np.ndarray, arms: Arms, variable: str, colors: Mapping[str, str] = COLORS
) -> None:
    """Gold match, reward and variety of the clips against thousands of units; arms not in `colors` are gray."""
    found = {arm: list(records.values()) for arm, records in arms.items() if records}
    for arm, records in sorted(found.items(), key=lambda item: item[0] in colors):  # these on top
        style = {"color": colors.get(arm, GREY), "alpha": 1.0 if arm in colors else 0.35}
        for ax, key in zip(axes.flat, (MATCH, "reward/total"), strict=False):
            draw_validations(ax, records, key, label=arm, **style)
        axes.flat[2].plot(*varieties(records), label=arm, **style)
    for ax, title in zip(
        axes.flat, ("gold match", "reward", "variety, relative to the start"), strict=True
    ):
        ax.set(title=title, xlabel="1,000 units")
        label_ends(ax, colors)


def label_ends(ax: Axes, colors: Mapping[str, str]) -> None:
    """The names of the lines in `colors` beside their ends, pushed apart where they would overlap."""
    ends = [
        (*line.get_xydata()[-1], line.get_label())
        for line in ax.lines
        if line.get_label() in colors
    ]
    low, high = ax.get_ylim()
    gap, place = 0.062 * (high - low), -math.inf
    ax.set_xlim(right=1.62 * max((x for x, _, _ in ends), default=1.0))
    for x, y, arm in sorted(ends, key=itemgetter(1)):
        place = max(y, place + gap)
        ax.annotate(
            arm,
            (x, y),
            (1.03 * x, place),
            color=colors[arm],
            fontsize=7,
            va="center",
            annotation_clip=False,
        )


def draw_validations(
    ax: Axes, records: Sequence[Record], key: str, color: str, **style: str
) -> None:
    """Means over seeds at the validations, and the 95 % interval over seeds at the last."""
    whole = [record for record in records if not math.isnan(validated(record, key))]
    if not whole:
        return
    spent, rows = (
        validations(whole[0], key)[0] / 1000,
        [validations(record, key)[1] for record in whole],
    )
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
            found[arm].append(
                crossing(rewards[arm], validations(arms[arm][seed], "gold/match")[1], level)
            )
    return found


def draw_counts(
    ax: Axes, counts: Mapping[str, int], found: Mapping[str, Sequence[float]], title: str
) -> None:
    middles, halves = zip(*(interval_of(found[arm]) for arm in counts), strict=True)
    ax.errorbar(list(counts.values()), middles, halves, fmt="o-", ms=4, capsize=2.5)
    ax.set(title=title, xlabel="prompts per update", xscale="log")
    ax.set_xticks(list(counts.values()), [str(count) for count in counts.values()])
    ax.minorticks_off()
