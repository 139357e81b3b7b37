"""Results against compute: what a method reaches for its units, and how many units it takes to reach a reward.

A unit is one forward of one clip at full size. `research.studies.second_edition --summary` draws and writes all of
this.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np
from matplotlib.axes import Axes

from research.studies.page import over_seeds, smooth
from research.studies.questions import ROOT
from research.studies.records import Record, as_float, curve, mean, validated
from research.studies.result_tables import LEVEL, VERDICTS, Arms, crossing, markdown, with_results
from research.studies.statistics import corrected, p_value
from sage_grpo.config.fields import Config
from sage_grpo.config.parse import from_values
from sage_grpo.intervals import Interval, interval
from sage_grpo.tools.figure_style import GREY, PALETTE
from sage_grpo.tools.paired import number
from sage_grpo.tools.plan.planner import plan_of

# Units of a forward and backward with LoRA, of a decode and of a reward, as measured at full size (docs/scaling.md)
TRAINED = 3.7
DECODED = 3.8
REWARDED = 0.7
ALL_STEPS = "sage, all but the last step"  # the arm that windows are compared with
SHARE = 0.75  # of its gain in the search, which a run with another seed should reach as well
REWARD = "reward/total"
MATCH = "gold/match"
VARIETY = "signal/variety"
MEASURED = {REWARD: "reward", MATCH: "gold match"}
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
COST_VERDICTS = {-1: "**cheaper**", 0: "undecided", 1: "**costlier**"}
SPREAD_VERDICTS = {-1: "**narrower**", 0: "undecided", 1: "**wider**"}


def units(config: Config) -> float:
    """Units of one clip, in rollout, anchor and update, by the planner's counts; decode and reward included."""
    model = str(ROOT / config.pretrained_model_root)
    plan = plan_of(replace(config, pretrained_model_root=model), 1)
    # Each pair of a clip and a step is in one update, however many a rollout has.
    sampled = plan.rollout_passes * plan.micro_batch_size
    passes = plan.old_policy_passes + plan.training_passes * (plan.anchor_fraction + TRAINED)
    trained = passes * config.trained_micro_batch
    return (sampled + trained) / config.batch_size + DECODED + REWARDED


def per_iteration(record: Record) -> float:
    """Units of one iteration of a run."""
    return _per_iteration(json.dumps(record["config"]))


@cache
def _per_iteration(flags: str) -> float:
    """`per_iteration`, of a record's flags as JSON.

    Cached, because a plan takes milliseconds and a page asks for the same runs thousands of times.
    """
    config = from_values(json.loads(flags))
    return units(config) * config.batch_size


def budget(record: Record) -> float:
    """Units of the whole run, even if it was stopped."""
    return per_iteration(record) * record["config"]["max_steps"]


def validations(record: Record, key: str) -> tuple[np.ndarray, np.ndarray]:
    """Units spent before each validation of a run, and a metric there."""
    validation = record["validation"]
    spent = per_iteration(record) * np.array(validation["step"], float)
    return spent, np.array(validation[key], float)


def level_of(runs: Mapping[str, Record]) -> float:
    """The reward to be reached: the base model's, and SHARE of what ALL_STEPS gained at its best rate in the search."""
    candidates = [
        record
        for record in runs.values()
        if record["study"] == "rates"
        and record["arm"].rpartition(", ")[0] == ALL_STEPS
        and not record["collapsed"]
    ]
    if not candidates:
        return math.nan
    best = max(candidates, key=lambda record: validated(record, REWARD))
    first = validated(best, REWARD, 0)
    last = validated(best, REWARD)
    return first + SHARE * (last - first)


def units_to(record: Record, level: float) -> float:
    """Units until held-out prompts first have this reward, linearly between validations; NaN if they never have."""
    spent, rewards = validations(record, REWARD)
    return crossing(rewards, spent, level)


def spent_to(records: Mapping[int, Record], level: float) -> dict[int, float]:
    """By seed, the units to reach the level; all its units for a run that never does, which favors it."""
    spent = {}
    for seed, record in records.items():
        units_taken = units_to(record, level)
        spent[seed] = budget(record) if math.isnan(units_taken) else units_taken
    return spent


def log_ratios(
    records: Mapping[int, Record], reference: Mapping[int, Record], level: float
) -> list[float]:
    """Logarithms of units over those of the reference, by pairs of seeds in which the reference reaches the level."""
    spent = spent_to(records, level)
    logs = []
    for seed, record in reference.items():
        reference_spent = units_to(record, level)  # NaN, which is not above 0, if it is not reached
        if seed in spent and reference_spent > 0:
            logs.append(math.log(spent[seed] / reference_spent))
    return logs


def ratio_of(logs: Sequence[float]) -> str:
    """The ratio of units, from its logarithms over pairs, with its 95 % interval."""
    change = interval(logs)
    ratio, low, high = (math.exp(change.mean + end) for end in (0.0, -change.half, change.half))
    return f"{ratio:.2f} ({low:.2f} to {high:.2f})" if math.isfinite(low) else f"{ratio:.2f}"


def match_at(record: Record, level: float) -> float:
    """The gold match where held-out prompts first have this reward; NaN if they never have."""
    _, rewards = validations(record, REWARD)
    _, matches = validations(record, MATCH)
    return crossing(rewards, matches, level)


def matches_there(arms: Arms, level: float) -> dict[str, str]:
    """The gold match of each arm where its reward is at the level, and that minus the one of ALL_STEPS, by pairs."""
    value = partial(match_at, level=level)
    cells = {}
    for arm, records in with_results(arms).items():
        matches = np.array([value(record) for record in records.values()])
        cells[arm] = number(mean(matches), 2)
    for arm, lead in leads(arms, ALL_STEPS, value).items():
        cells[arm] += f" ({lead.text()})"
    return cells


def cost_table(arms: Arms, runs: Mapping[str, Record]) -> str:
    """How many units each arm takes to reach the level, over those of ALL_STEPS, and the gold match there."""
    level = level_of(runs)
    matches = matches_there(arms, level)
    reference = arms.get(ALL_STEPS, {})
    logs = {
        arm: log_ratios(records, reference, level) for arm, records in with_results(arms).items()
    }
    others = [arm for arm in logs if arm != ALL_STEPS]
    p_values = corrected([p_value(logs[arm]) for arm in others], len(arms) - 1)
    tests = dict(zip(others, p_values, strict=True))

    head = ["arm", "runs", "reach it", "units, geometric mean", f"over those of {ALL_STEPS}"]
    head += [f"gold match there, minus that of {ALL_STEPS}", "variety, end over start"]
    rows = [head]
    for arm, records in with_results(arms).items():
        reached = sum(math.isfinite(units_to(record, level)) for record in records.values())
        spent = spent_to(records, level).values()
        geometric_mean = math.exp(interval([math.log(value) for value in spent]).mean)
        bound = "" if reached == len(records) else "over "
        ratio = ""
        if arm in tests:
            decided = interval(logs[arm]).sign if tests[arm] < LEVEL else 0
            ratio = f"{ratio_of(logs[arm])}: {COST_VERDICTS[decided]}"
        cells = [f"{bound}{geometric_mean:,.0f}", ratio, matches[arm], variety_of(records)]
        rows.append([arm, str(len(records)), str(reached), *cells])
    goal = f"a reward of {level:.3f}: {SHARE:.0%} of what {ALL_STEPS} gained in the search"
    text = f"Units until held-out prompts have {goal}. By pairs of seeds, with 95 % intervals."
    return f"{text}\n\n{markdown(rows)}"


def variety_of(records: Mapping[int, Record]) -> str:
    """How much clips of a prompt vary in the last logged iteration, over the first."""
    curves = [curve(record, VARIETY) for record in records.values()]
    return with_half(interval([float(values[-1] / values[0]) for values in curves]))


def with_half(estimate: Interval, decimals: int = 2, sign: str = "") -> str:
    """A mean ± half of its 95 % interval."""
    return f"{number(estimate.mean, decimals, sign)} ± {number(estimate.half, decimals)}"


last_match = partial(validated, key=MATCH)


@dataclass(frozen=True)
class Lead:
    """How far an arm is ahead of another: the mean over pairs with its interval, and the decision (+1, -1 or 0)."""

    gap: Interval
    decided: int

    def text(self) -> str:
        return f"{with_half(self.gap, 3, '+')}: {VERDICTS[self.decided]}"


def leads(
    arms: Arms, reference: str, value: Callable[[Record], float] = last_match
) -> dict[str, Lead]:
    """A value of each other arm minus the reference's, by pairs of seeds that have it."""
    base = arms.get(reference, {})
    differences = {
        arm: [value(records[seed]) - value(base[seed]) for seed in records.keys() & base.keys()]
        for arm, records in with_results(arms).items()
        if arm != reference
    }
    p_values = corrected([p_value(values) for values in differences.values()], len(arms) - 1)
    arm_leads = {}
    for (arm, values), p in zip(differences.items(), p_values, strict=True):
        gap = interval(values)
        arm_leads[arm] = Lead(gap, gap.sign if p < LEVEL else 0)
    return arm_leads


def winners(arms: Arms) -> list[str]:
    """The arms that beat the first one in gold match and that no other of these beats, the highest match first."""
    first = next(iter(arms))
    better = [arm for arm, lead in leads(arms, first).items() if lead.decided > 0]
    beaten = set()
    for rival in better:
        beaten |= {arm for arm, lead in leads(arms, rival).items() if lead.decided < 0}
    unbeaten = [arm for arm in better if arm not in beaten]
    return sorted(unbeaten, key=lambda arm: -match_of(arms[arm]).mean)


def match_of(records: Mapping[int, Record]) -> Interval:
    """The gold match of the last validations, over seeds."""
    return interval([last_match(record) for record in records.values()])


def decision_table(arms: Arms, runs: Mapping[str, Record]) -> str:
    """All methods, the highest gold match first: what they reach, for how many units, and how far behind the winner."""
    first = next(iter(arms))
    level = level_of(runs)
    finished = with_results(arms)
    if first not in finished or len(finished) < 2:
        return "No results yet.\n"
    winning = winners(arms)
    behind = leads(arms, winning[0]) if winning else {}

    goal = f"units to a reward of {level:.2f}, {first} = 1"
    rows = [["method", "gold match", "in training", "reward", goal, "variety", "verdict"]]
    for arm in sorted(finished, key=lambda arm: -match_of(finished[arm]).mean):
        records = finished[arm]
        training = interval([float(curve(record, MATCH)[-1]) for record in records.values()])
        reward = interval([validated(record, REWARD) for record in records.values()])
        measures = [with_half(measure) for measure in (match_of(records), training, reward)]

        units_taken = "1"
        if arm != first:
            reached = [math.isfinite(units_to(record, level)) for record in records.values()]
            ratio = ratio_of(log_ratios(records, finished[first], level))
            units_taken = ratio if all(reached) else f"over {ratio}"

        verdict = ""
        if arm in winning:
            verdict = "**joint winner**" if len(winning) > 1 else "**winner**"
        elif arm in behind:
            lead = behind[arm]
            order = {-1: "behind", 0: "not told apart from", 1: "ahead of"}[lead.decided]
            verdict = f"{order} {winning[0]}: {with_half(lead.gap, 2, '+')}"
        rows.append([arm, *measures, units_taken, variety_of(records), verdict])

    start = next(iter(finished[first].values()))
    base_match = validated(start, MATCH, 0)
    base_reward = validated(start, REWARD, 0)
    base = f"Before training: match {base_match:.2f}, reward {base_reward:.2f}."
    return f"{markdown(rows)}\n± and parentheses: 95 % intervals over seeds. {base}\n"


def sampler_table(arms: Arms) -> str:
    """The samplers at equal injected energy: reward and gold match minus those of sage, which has the same window."""
    if not all(arms.values()):
        return "No results yet.\n"
    changes = {key: leads(arms, ALL_STEPS, partial(validated, key=key)) for key in MEASURED}
    columns = [f"{name} minus that of sage" for name in MEASURED.values()]
    rows = [["sampler", "learning rate", *columns]]
    others = [arm for arm in arms if arm != ALL_STEPS]
    for arm in others:
        cells = [changes[key][arm].text() for key in MEASURED]
        rows.append([arm, f"{learning_rate(arms[arm]):g}", *cells])
    return (
        f"{markdown(rows)}\nThe learning rate of sage is {learning_rate(arms[ALL_STEPS]):g}. "
        f"p-values corrected over {len(others)} samplers.\n"
    )


def learning_rate(records: Mapping[int, Record]) -> float:
    """The learning rate of an arm."""
    return next(iter(records.values()))["config"]["learning_rate"]


SPREADS = ("classes", "places", "classes if both match", "places if both match", "match")


def spread_table(arms: Arms) -> str:
    """How far clips of a prompt spread in what it leaves open: the base model, then each arm.

    research/studies/spread.py measures it.
    """
    spreads = {}
    for arm, records in arms.items():
        measured = [record["spread"] for record in records.values() if "spread" in record]
        if measured:
            spreads[arm] = measured
    if not spreads:
        return "No results yet.\n"

    bases = {
        arm: {key: as_float(measured[0]["base"][key]) for key in SPREADS}
        for arm, measured in spreads.items()
    }
    rows = {arm: [arm, str(len(measured))] for arm, measured in spreads.items()}
    for key in SPREADS:
        ends = {
            arm: [as_float(run["end"][key]) for run in measured]
            for arm, measured in spreads.items()
        }
        gaps = {arm: [value - bases[arm][key] for value in values] for arm, values in ends.items()}
        p_values = corrected([p_value(values) for values in gaps.values()], len(arms))
        for arm, p in zip(spreads, p_values, strict=True):
            end = interval(ends[arm])
            cell = with_half(end, 3)
            if key != "match":
                decided = interval(gaps[arm]).sign if p < LEVEL else 0
                cell += f": {SPREAD_VERDICTS[decided]}"
            rows[arm].append(cell)

    # Arms that are sampled alike have the same base model: one row for each way of sampling.
    starts: dict[tuple[str, ...], str] = {}
    for arm, base in bases.items():
        cells = tuple(map(number, base.values()))
        starts.setdefault(cells, f"base model, sampled as {arm}")
    if len(starts) == 1:
        starts = dict.fromkeys(starts, "base model")
    base_rows = [[name, "", *cells] for cells, name in starts.items()]
    table = markdown([["weights", "runs", *SPREADS], *base_rows, *rows.values()])
    return f"{table}\n±: 95 % intervals over seeds. p-values corrected over {len(arms)} methods.\n"


def search_table(runs: Mapping[str, Record], studies: Sequence[str]) -> str:
    """Last reward and gold match of each arm at each learning rate of a search; bold where the reward is highest."""
    searched: dict[str, dict[float, Record]] = {}  # arm -> learning rate -> run
    for record in runs.values():
        if record["study"] in studies:
            arm = record["arm"].rpartition(", ")[0]
            searched.setdefault(arm, {})[record["config"]["learning_rate"]] = record
    if not searched:
        return "No results yet.\n"

    rates = sorted({rate for by_rate in searched.values() for rate in by_rate})
    rows = [["arm", *(f"{rate:g}" for rate in rates)]]
    for arm in sorted(searched, key=numbers_in):
        by_rate = searched[arm]
        rewards = {
            rate: validated(record, REWARD)
            for rate, record in by_rate.items()
            if not record["collapsed"]
        }
        best = max(rewards, key=rewards.__getitem__, default=None)
        cells = dict.fromkeys(rates, "") | dict.fromkeys(by_rate, "collapsed")
        for rate, reward in rewards.items():
            match = validated(by_rate[rate], MATCH)
            cell = f"{number(reward, 3)}, {number(match, 2)}"
            cells[rate] = f"**{cell}**" if rate == best else cell
        rows.append([arm, *cells.values()])
    return f"{markdown(rows)}\nReward and gold match of one run, seed 101.\n"


def numbers_in(arm: str) -> list[int]:
    """The numbers in the name of an arm, so that 2 prompts come before 16."""
    return [int(word) for word in arm.split() if word.isdigit()]


def draw_compute(
    axes: np.ndarray, arms: Arms, variable: str, colors: Mapping[str, str] = COLORS
) -> None:
    """Gold match, reward and variety of the clips against thousands of units; arms not in `colors` are gray."""
    match_axis, reward_axis, variety_axis = axes.flat
    finished = with_results(arms)
    for arm in sorted(finished, key=lambda arm: arm in colors):  # the named ones on top
        records = list(finished[arm].values())
        style = {"color": colors.get(arm, GREY), "alpha": 1.0 if arm in colors else 0.35}
        draw_validations(match_axis, records, MATCH, label=arm, **style)
        draw_validations(reward_axis, records, REWARD, label=arm, **style)
        spent, variety = varieties(records)
        variety_axis.plot(spent, variety, label=arm, **style)
    titles = ("gold match", "reward", "variety, relative to the start")
    for ax, title in zip(axes.flat, titles, strict=True):
        ax.set(title=title, xlabel="1,000 units")
        label_ends(ax, colors)


def label_ends(ax: Axes, colors: Mapping[str, str]) -> None:
    """The names of the lines in `colors` beside their ends, pushed apart where they would overlap."""
    lines = [line for line in ax.lines if line.get_label() in colors]
    ends = {line.get_label(): line.get_xydata()[-1] for line in lines}
    low, high = ax.get_ylim()
    ax.set_xlim(right=1.62 * max((x for x, _ in ends.values()), default=1.0))
    order = sorted(ends, key=lambda arm: ends[arm][1])
    heights = apart([ends[arm][1] for arm in order], 0.062 * (high - low), high)
    for arm, height in zip(order, heights, strict=True):
        x, y = ends[arm]
        style = {"color": colors[arm], "fontsize": 7, "va": "center"}
        ax.annotate(arm, (x, y), (1.03 * x, height), annotation_clip=False, **style)


def apart(heights: Sequence[float], gap: float, highest: float) -> list[float]:
    """Ascending heights, moved until neighbors are `gap` apart: upward, and down again from `highest`."""
    moved = []
    place = -math.inf
    for height in heights:
        place = max(height, place + gap)
        moved.append(place)
    limit = highest
    for number_below in reversed(range(len(moved))):
        moved[number_below] = min(moved[number_below], limit)
        limit = moved[number_below] - gap
    return moved


def draw_validations(
    ax: Axes, records: Sequence[Record], key: str, color: str, **style: str
) -> None:
    """Means over seeds at the validations, and the 95 % interval over seeds at the last."""
    complete = [record for record in records if not math.isnan(validated(record, key))]
    if not complete:
        return
    spent, _ = validations(complete[0], key)
    thousands = spent / 1000
    rows = [validations(record, key)[1] for record in complete]
    ax.plot(thousands, over_seeds(rows), marker="o", ms=3, color=color, **style)
    middle, half = interval_of([row[-1] for row in rows])
    ax.errorbar(thousands[-1], middle, half, color=color, capsize=2)


def interval_of(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half width of an error bar; a width of 0 where there are too few values for an interval."""
    estimate = interval(values)
    return estimate.mean, float(np.nan_to_num(estimate.half))


def varieties(records: Sequence[Record]) -> tuple[np.ndarray, np.ndarray]:
    """Thousands of units, and the mean over seeds of the variety relative to a run's first."""
    length = min(len(record["steps"]) for record in records)
    steps = per_iteration(records[0]) * np.array(records[0]["steps"][:length]) / 1000
    return steps, over_seeds([relative_variety(record)[:length] for record in records])


def relative_variety(record: Record) -> np.ndarray:
    """How much the clips of a prompt differ, over the run, relative to its start."""
    variety = smooth(curve(record, VARIETY))
    return variety / variety[0]


def draw_batches(axes: np.ndarray, arms: Arms, variable: str) -> None:
    """Reward and match against prompts per update, after equally many clips and at equal reward; 95 % intervals."""
    counts = {arm: int(arm.split()[0]) for arm in arms if arms[arm]}
    reward_axis, match_axis, equal_axis = axes.flat
    for ax, key in ((reward_axis, REWARD), (match_axis, MATCH)):
        values = {arm: [validated(record, key) for record in arms[arm].values()] for arm in counts}
        draw_counts(ax, counts, values, f"{MEASURED[key]} at equal clips")
    draw_counts(equal_axis, counts, matches_at_equal_reward(arms), "gold match at equal reward")


def matches_at_equal_reward(arms: Arms) -> dict[str, list[float]]:
    """The match of each arm and seed where its reward first is the highest that all arms reach with that seed."""
    finished = with_results(arms)
    matches: dict[str, list[float]] = {arm: [] for arm in finished}
    for seed in set.intersection(*(set(records) for records in finished.values())):
        runs = {arm: records[seed] for arm, records in finished.items()}
        rewards = {arm: validations(record, REWARD)[1] for arm, record in runs.items()}
        level = min(float(np.nanmax(values)) for values in rewards.values())
        for arm, record in runs.items():
            _, run_matches = validations(record, MATCH)
            matches[arm].append(crossing(rewards[arm], run_matches, level))
    return matches


def draw_counts(
    ax: Axes, counts: Mapping[str, int], values: Mapping[str, Sequence[float]], title: str
) -> None:
    """Means with 95 % intervals against prompts per update."""
    middles, halves = zip(*(interval_of(values[arm]) for arm in counts), strict=True)
    ax.errorbar(list(counts.values()), middles, halves, fmt="o-", ms=4, capsize=2.5)
    ax.set(title=title, xlabel="prompts per update", xscale="log")
    ax.set_xticks(list(counts.values()), [str(count) for count in counts.values()])
    ax.minorticks_off()
