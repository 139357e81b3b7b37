"""Tables, figures and decisions of the third edition, as its registration says (research/studies/third_edition.py)."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from matplotlib.axes import Axes

from research.studies import compute
from research.studies.compute import MATCH, crossing, interval, ratio_of, validations, with_half
from research.studies.records import Record, as_float, validated
from research.studies.result_tables import Arms, markdown, with_results
from sage_grpo.config.parse import from_values
from sage_grpo.intervals import Interval
from sage_grpo.tools.figure_style import GREY, PALETTE
from sage_grpo.tools.paired import number

GOAL_MATCH = 0.9  # to which units are counted
GOAL_RATIO = 0.6  # of those of the arm that trains all clips
MARGIN = 0.05  # by which match or spread may be lower: a seed that is run twice differs by as much
SPREAD = "classes if both match"
PLACES = "places if both match"
OPEN_MATCH = "match"  # of the prompts whose spread is measured
NO_RESULTS = "No results yet.\n"
BASE_MODEL = "base model"
INTERVALS = "± and parentheses: 95 % intervals over seeds."

Value = Callable[[Record], float]


def units_to_match(record: Record) -> float:
    """Units until held-out prompts first have GOAL_MATCH; NaN if they never have."""
    spent, matches = validations(record, MATCH)
    return crossing(matches, spent, GOAL_MATCH)


def counted_seeds(runs: Mapping[int, Record], reference: Mapping[int, Record]) -> list[int]:
    """The seeds in which units are compared: those in which the reference reaches the match."""
    return [seed for seed, base in reference.items() if seed in runs and units_to_match(base) > 0]


def num_missing(runs: Mapping[int, Record], reference: Mapping[int, Record]) -> int:
    """The number of these seeds in which the arm never reaches the match."""
    units = [units_to_match(runs[seed]) for seed in counted_seeds(runs, reference)]
    return sum(map(math.isnan, units))


def log_ratios(runs: Mapping[int, Record], reference: Mapping[int, Record]) -> list[float]:
    """Logarithms of the units to GOAL_MATCH over the reference's, by seed; all units of a run that never has it."""
    logs = []
    for seed in counted_seeds(runs, reference):
        taken = units_to_match(runs[seed])
        if math.isnan(taken):
            taken = compute.budget(runs[seed])
        logs.append(math.log(taken / units_to_match(reference[seed])))
    return logs


def told_ratio(runs: Mapping[int, Record], reference: Mapping[int, Record]) -> str:
    """The ratio of units in words: a lower bound if some runs never reach the match."""
    logs = log_ratios(runs, reference)
    if not logs:
        return "–"
    ratio = ratio_of(logs)
    if num_missing(runs, reference):
        return f"over {ratio.split()[0]}"  # the interval's upper end is not known
    return ratio


def units_per_clip(runs: Mapping[int, Record]) -> float:
    """Units of one clip of an arm."""
    return compute.units(from_values(next(iter(runs.values()))["config"]))


def end_spread(record: Record, kind: str = SPREAD) -> float:
    return as_float(record.get("spread", {}).get("end", {}).get(kind))


def base_spread(record: Record, kind: str = SPREAD) -> float:
    """The spread of the base model."""
    return as_float(record.get("spread", {}).get("base", {}).get(kind))


def match_or_base(record: Record) -> float:
    """The match of the last validation; of a collapsed run, which has none, that of the base model."""
    return validated(record, MATCH, 0) if record["collapsed"] else compute.last_match(record)


def mean_of(runs: Mapping[int, Record], value: Value) -> Interval:
    return interval([value(run) for run in runs.values()])


def gaps(runs: Mapping[int, Record], reference: Mapping[int, Record], value: Value) -> Interval:
    """A value minus the reference's, over the seeds that both have."""
    return interval(
        [value(runs[seed]) - value(reference[seed]) for seed in runs.keys() & reference.keys()]
    )


def collapsed(runs: Mapping[int, Record]) -> bool:
    return any(run["collapsed"] for run in runs.values())


def num_collapsed(runs: Mapping[int, Record]) -> int:
    return sum(bool(run["collapsed"]) for run in runs.values())


def verdict(ratio: Interval, match: Interval, spread: Interval, missing: int = 0) -> str:
    """What the registration decides about shares of clips, from the logarithm of the ratio and two differences.

    missing: the number of runs that never reach the match, which count with all their units.
    """
    goal = math.log(GOAL_RATIO)
    is_met = ratio.mean + ratio.half <= goal
    note = f", {missing} that never reach the match counted with all their units" if missing else ""
    worse = [
        name
        for name, gap in (("match", match), ("spread", spread))
        if not gap.mean - gap.half > -MARGIN
    ]
    if is_met and not worse:
        return f"**wins**{note}"

    cheap = "goal not met"
    if is_met:
        cheap = f"goal met{note}"
    elif ratio.mean <= goal:
        cheap = f"goal met on average{note}"
    return "; ".join([cheap, *(f"{name} may be worse" for name in worse)])


def goal_table(study_arms: Arms, _: Mapping[str, Record], reference: str) -> str:
    """Every arm against the reference: match, units to the match, spread, and the verdict."""
    finished = with_results(study_arms)
    base = finished.get(reference)
    if not base:
        return NO_RESULTS
    rows = [
        [
            "arm",
            "runs",
            "gold match",
            f"minus that of {reference}",
            f"reach {GOAL_MATCH:g}",
            "units to it, over the reference's",
            "spread minus the reference's",
            "verdict",
        ]
    ]
    for arm, runs in sorted(finished.items(), key=lambda item: -compute.match_of(item[1]).mean):
        reached = sum(units_to_match(run) > 0 for run in runs.values())
        cells = [arm, str(len(runs)), with_half(compute.match_of(runs))]
        if arm == reference:
            rows.append([*cells, "", str(reached), "1", "", ""])
            continue
        logs = log_ratios(runs, base)
        match = gaps(runs, base, compute.last_match)
        spread = gaps(runs, base, end_spread)
        cells += [with_half(match, 3, "+"), str(reached), told_ratio(runs, base)]
        told = verdict(interval(logs), match, spread, num_missing(runs, base))
        rows.append([*cells, with_half(spread, 3, "+"), told])
    return f"{markdown(rows)}\n{INTERVALS}\n"


def averaged_table(
    study_arms: Arms,
    runs_of_all: Mapping[str, Record],
    pairs: Mapping[str, str],
    reference: str,
    seeds: int,
) -> str:
    """The arms with averaged weights against the one of these that trains all clips, and which arms may be averaged.

    pairs: the averaged arms, each with the arm that differs in nothing else. reference: one of the averaged arms.
    """
    averaged = {arm: study_arms.get(arm, {}) for arm in pairs}
    table = goal_table(averaged, runs_of_all, reference)
    if table == NO_RESULTS:
        return table
    sentences = []
    for arm, plain in pairs.items():
        runs = study_arms.get(arm, {})
        last = study_arms.get(plain, {})
        if min(len(runs), len(last)) < seeds:
            sentences.append(f"*{arm}* is not decided yet: runs are left.")
            continue
        match = gaps(runs, last, compute.last_match)
        is_no_worse = match.mean - match.half > -MARGIN
        told = "averages its weights" if is_no_worse else "does not average its weights"
        gap = with_half(match, 3, "+")
        sentences.append(
            f"By the registered rule a recipe of *{plain}* {told}: they change its match by {gap}."
        )
    return f"{table}\n{' '.join(sentences)}\n"


def centering_table(
    study_arms: Arms, _: Mapping[str, Record], pairs: Mapping[str, str], seeds: int
) -> str:
    """Every arm with centered advantages against the one without, and whether centering stays the default.

    pairs: the centered arms, each with the arm that differs in nothing else.
    """
    finished = with_results(study_arms)
    rows = [
        [
            "centered",
            "runs",
            "collapsed",
            "of those not centered",
            "gold match",
            "minus not centered",
            "spread minus not centered",
        ]
    ]
    better = []
    for arm, plain in pairs.items():
        if arm not in finished or plain not in finished:
            continue
        runs = finished[arm]
        match = gaps(runs, finished[plain], match_or_base)
        spread = gaps(runs, finished[plain], end_spread)
        counts = (len(runs), num_collapsed(runs), num_collapsed(finished[plain]))
        cells = [arm, *map(str, counts)]
        cells += [with_half(mean_of(runs, match_or_base)), with_half(match, 3, "+")]
        rows.append([*cells, with_half(spread, 3, "+")])
        if match.mean - match.half > 0 and not collapsed(runs):
            better.append(arm)
    if len(rows) == 1:
        return NO_RESULTS
    decided = "By the registered rule centering is no longer the default."
    if better:
        names = "; ".join(better)
        decided = (
            f"By the registered rule centering stays the default: better in match are {names}."
        )
    if any(len(study_arms[arm]) < seeds for pair in pairs.items() for arm in pair):
        decided = "Not decided yet: runs are left."
    return f"{markdown(rows)}\n{INTERVALS} {decided}\n"


@dataclass(frozen=True)
class SamplerResult:
    """An arm against the one it is compared with."""

    units: float  # per clip
    reference_units: float
    ratio: Interval  # logarithm of the units to GOAL_MATCH, over the reference's
    match: Interval  # minus the reference's
    spread: Interval  # minus the reference's
    collapsed: bool

    @property
    def failures(self) -> list[str]:
        """Why the sampler is not taken; empty if it may be."""
        failed = []
        if self.collapsed:
            failed.append("a run collapsed")
        if self.units < self.reference_units:
            if not self.match.mean > -MARGIN:
                failed.append("match is worse")
            if not self.spread.mean > -MARGIN:
                failed.append("spread is worse")
            if not self.ratio.mean <= 0:
                failed.append("no fewer units to the match")
        elif not self.match.mean - self.match.half > 0:
            failed.append("no cheaper, and match is not decided to be higher")
        return failed


def sampler_results(study_arms: Arms, against: Mapping[str, str]) -> dict[str, SamplerResult]:
    """The samplers with results, each against its reference; those without a reference are left out."""
    finished = with_results(study_arms)
    results = {}
    for arm, reference in against.items():
        if arm not in finished or reference not in finished:
            continue
        runs = finished[arm]
        base = finished[reference]
        results[arm] = SamplerResult(
            units=units_per_clip(runs),
            reference_units=units_per_clip(base),
            ratio=interval(log_ratios(runs, base)),
            match=gaps(runs, base, compute.last_match),
            spread=gaps(runs, base, end_spread),
            collapsed=collapsed(runs),
        )
    return results


def taken_samplers(study_arms: Arms, against: Mapping[str, str], seeds: int) -> dict[str, str]:
    """By reference, the sampler to take: the fewest units per clip, then the highest match; itself if none may be.

    Empty until all runs are there.
    """
    if any(len(runs) < seeds for runs in study_arms.values()):
        return {}
    results = sampler_results(study_arms, against)
    taken = {}
    for reference in dict.fromkeys(against.values()):
        allowed = [
            arm
            for arm, result in results.items()
            if against[arm] == reference and not result.failures
        ]
        order = sorted(allowed, key=lambda arm: (results[arm].units, -results[arm].match.mean))
        taken[reference] = order[0] if order else reference
    return taken


def sampler_table(
    study_arms: Arms, _: Mapping[str, Record], against: Mapping[str, str], seeds: int
) -> str:
    """Every sampler against its reference: what a clip costs, match, units to the match, spread, and the verdict."""
    finished = with_results(study_arms)
    if not finished:
        return NO_RESULTS
    results = sampler_results(study_arms, against)
    taken = taken_samplers(study_arms, against, seeds)
    rows = [
        [
            "rollouts by",
            "runs",
            "units per clip",
            "gold match",
            "minus the reference's",
            f"reach {GOAL_MATCH:g}",
            "units to it, over the reference's",
            "spread minus the reference's",
            "verdict",
        ]
    ]
    for arm, runs in finished.items():
        reached = sum(units_to_match(run) > 0 for run in runs.values())
        cells = [arm, str(len(runs)), f"{units_per_clip(runs):.1f}"]
        cells.append(with_half(compute.match_of(runs)))
        if arm not in results:
            rows.append([*cells, "", str(reached), "1", "", "reference"])
            continue
        result = results[arm]
        cells += [
            with_half(result.match, 3, "+"),
            str(reached),
            told_ratio(runs, finished[against[arm]]),
        ]
        told = "; ".join(result.failures) or "no worse"
        if arm in taken.values():
            told = "**taken**"
        rows.append([*cells, with_half(result.spread, 3, "+"), told])
    decided = "Not decided yet: runs are left."
    if taken:
        choices = (
            f"{arm}" if arm == reference else f"{arm} instead of {reference}"
            for reference, arm in taken.items()
        )
        decided = f"By the registered rule rollouts take: {'; '.join(choices)}."
    return f"{markdown(rows)}\n{INTERVALS} {decided}\n"


def point_failures(runs: Mapping[int, Record], reference: Mapping[int, Record]) -> list[str]:
    """Why a point of the trade-off is not proposed; empty if it may be. By means over the seeds that both have."""
    failed = []
    if collapsed(runs):
        failed.append("a run collapsed")
    if not gaps(runs, reference, compute.last_match).mean > -MARGIN:
        failed.append("match is worse")
    if not gaps(runs, reference, end_spread).mean > 0:
        failed.append("spread is not higher")
    return failed


def proposed_point(study_arms: Arms, reference: str, seeds: int) -> str | None:
    """The arm with the highest spread of those that may be proposed; None until all runs are there, or if none may."""
    if any(len(runs) < seeds for runs in study_arms.values()):
        return None
    base = study_arms[reference]
    spreads = {
        arm: gaps(runs, base, end_spread).mean
        for arm, runs in study_arms.items()
        if arm != reference and not point_failures(runs, base)
    }
    return max(spreads, key=spreads.__getitem__, default=None)


def check_gaps(
    first: Mapping[int, Record],
    new: Mapping[int, Record],
    first_reference: Mapping[int, Record],
    new_reference: Mapping[int, Record],
) -> tuple[Interval, Interval]:
    """The two differences from the reference that decide the check: match over the new seeds, spread over all."""
    match = gaps(new, new_reference, compute.last_match)
    spread = gaps({**first, **new}, {**first_reference, **new_reference}, end_spread)
    return match, spread


def variety_decision(variety: Arms, check: Arms, reference: str, seeds: int) -> str:
    """Which point of the trade-off the recipes take, with the numbers of the check.

    check: the proposed arm and the reference with new seeds; empty while nothing is proposed.
    """
    if any(len(runs) < seeds for runs in variety.values()):
        return "Not decided yet: runs are left."
    arm = proposed_point(variety, reference, seeds)
    if arm is None:
        return f"By the registered rule the recipes keep their point, {reference}: no other may be proposed."
    if any(len(check.get(name, {})) < seeds for name in (arm, reference)):
        return f"Proposed is {arm}; not decided yet: runs with new seeds are left."

    match, spread = check_gaps(variety[arm], check[arm], variety[reference], check[reference])
    failed = num_collapsed(check[arm])
    collapse = f" ({failed} of its runs collapsed)" if failed else ""
    measured = (
        f"Its match differs by {with_half(match, 3, '+')} with the new seeds{collapse}, its spread by "
        f"{with_half(spread, 3, '+')} with all seeds."
    )
    if not failed and match.mean > -MARGIN and spread.mean - spread.half > 0:
        return f"By the registered rule the recipes take **{arm}**, which new seeds confirmed. {measured}"
    return (
        f"By the registered rule the recipes keep their point, {reference}: new seeds did not confirm {arm}. "
        f"{measured}"
    )


def check_table(variety: Arms, check: Arms, reference: str) -> str:
    """The points of the check with all seeds, those that proposed one and the new ones; empty before there are any."""
    finished = with_results(check)
    if reference not in finished:
        return ""
    pooled = {arm: {**variety[arm], **runs} for arm, runs in finished.items()}
    base = pooled[reference]
    rows = [
        [
            "point, all seeds",
            "runs",
            "gold match",
            "minus today's",
            "match of the open prompts",
            "minus today's",
            "spread, classes",
            "minus today's",
        ]
    ]
    open_match = partial(end_spread, kind=OPEN_MATCH)
    for arm, runs in pooled.items():
        cells = [arm, str(len(runs))]
        for value, digits in ((compute.last_match, 2), (open_match, 2), (end_spread, 3)):
            cells.append(with_half(mean_of(runs, value), digits))
            cells.append("" if arm == reference else with_half(gaps(runs, base, value), 3, "+"))
        rows.append(cells)
    return f"\n{markdown(rows)}"


def variety_table(
    study_arms: Arms,
    runs_of_all: Mapping[str, Record],
    reference: str,
    seeds: int,
    check_of: Callable[[Mapping[str, Record]], Arms],
) -> str:
    """Every point of the trade-off: match, both spreads, the differences from today's point, and the decision.

    check_of: the arms of the check, from all runs.
    """
    finished = with_results(study_arms)
    base = finished.get(reference)
    if not base:
        return NO_RESULTS
    proposed = proposed_point(study_arms, reference, seeds)
    head = ["point", "runs", "1,000 units", "gold match", "minus today's"]
    head += ["spread, classes", "minus today's", "spread, places", "verdict"]
    first = next(iter(base.values()))
    start = [number(validated(first, MATCH, 0), 2), "", number(base_spread(first), 3), ""]
    rows = [head, [BASE_MODEL, "", "", *start, number(base_spread(first, PLACES), 3), ""]]

    order = sorted(finished, key=lambda arm: -mean_of(finished[arm], end_spread).mean)
    for arm in order:
        runs = finished[arm]
        thousands = compute.budget(next(iter(runs.values()))) / 1000
        cells = [arm, str(len(runs)), f"{thousands:.0f}", with_half(compute.match_of(runs))]
        spread = with_half(mean_of(runs, end_spread), 3)
        places = with_half(mean_of(runs, partial(end_spread, kind=PLACES)), 3)
        if arm == reference:
            rows.append([*cells, "", spread, "", places, "today's point"])
            continue
        match_gap = with_half(gaps(runs, base, compute.last_match), 3, "+")
        spread_gap = with_half(gaps(runs, base, end_spread), 3, "+")
        told = "; ".join(point_failures(runs, base)) or "may be proposed"
        if arm == proposed:
            told = "**proposed**"
        rows.append([*cells, match_gap, spread, spread_gap, places, told])
    check = check_of(runs_of_all)
    decided = variety_decision(study_arms, check, reference, seeds)
    checked = check_table(study_arms, check, reference)
    return f"{markdown(rows)}{checked}\n±: 95 % intervals over seeds. {decided}\n"


def point_colors(curves: Sequence[Sequence[str]], reference: str) -> dict[str, str]:
    """A color for each curve of the trade-off, and the first one for the point that all are compared with."""
    first, *others = PALETTE
    colors = {reference: first}
    for curve_arms, color in zip(curves, others, strict=False):
        colors |= {arm: color for arm in curve_arms if arm != reference}
    return colors


def draw_trade_off(
    axes: np.ndarray, arms: Arms, variable: str, reference: str, curves: Sequence[Sequence[str]]
) -> None:
    """Spread against gold match, of classes and of places: a labeled point per arm, and the base model.

    curves: arms that a line joins. Right of the dashed line match is no worse, above the dotted one spread is higher,
    than that of the reference.
    """
    finished = with_results(arms)
    if reference not in finished:
        return
    start = next(iter(finished[reference].values()))
    colors = point_colors(curves, reference) | {BASE_MODEL: GREY}
    for ax, kind in zip(axes.flat, (SPREAD, PLACES), strict=True):
        value = partial(end_spread, kind=kind)
        points = {BASE_MODEL: (validated(start, MATCH, 0), base_spread(start, kind))}
        for arm, runs in finished.items():
            match, match_half = compute.interval_of([compute.last_match(r) for r in runs.values()])
            spread, spread_half = compute.interval_of([value(run) for run in runs.values()])
            points[arm] = (match, spread)
            ax.errorbar(
                match, spread, spread_half, match_half, color=colors[arm], lw=0.7, alpha=0.35
            )
        for name, (match, spread) in points.items():
            marker = {reference: "D", BASE_MODEL: "s"}.get(name, "o")
            ax.plot(match, spread, marker, color=colors[name], ms=6, zorder=3)
        for curve_arms in curves:
            joined = [arm for arm in curve_arms if arm in points]
            places = np.array([points[arm] for arm in joined]).reshape(-1, 2)
            ax.plot(*places.T, color=colors[joined[-1]] if joined else GREY, lw=1.2)

        match, spread = points[reference]
        ax.axvline(match - MARGIN, color=GREY, lw=0.8, ls="--")
        ax.axhline(spread, color=GREY, lw=0.8, ls=":")
        label_points(ax, points, colors)
        ax.set_title(f"spread of {kind.split()[0]} among clips that match")
        ax.set_xlabel("gold match at the end")
    axes.flat[0].set_ylabel("spread")


def label_points(
    ax: Axes, points: Mapping[str, tuple[float, float]], colors: Mapping[str, str]
) -> None:
    """The names of points in a column on the right, in the order of their heights, each tied to its point by a line."""
    low, high = ax.get_ylim()
    left, right = ax.get_xlim()
    ticks = [tick for tick in ax.get_xticks() if left <= tick <= right]
    column = right + 0.06 * (right - left)
    drawn = {name: point for name, point in points.items() if all(map(math.isfinite, point))}
    order = sorted(drawn, key=lambda name: drawn[name][1])
    heights = np.linspace(low, high, len(order) + 2)[1:-1]
    ax.set_xlim(left, right + 0.55 * (right - left))
    ax.set_xticks(ticks)
    for name, height in zip(order, heights, strict=True):
        color = colors[name]
        tie = {"arrowstyle": "-", "color": color, "lw": 0.6, "alpha": 0.6, "relpos": (0, 0.5)}
        style = {"color": color, "fontsize": 8, "va": "center", "arrowprops": tie}
        ax.annotate(name, drawn[name], (column, height), **style)
