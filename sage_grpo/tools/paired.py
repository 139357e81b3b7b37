"""Compares a run's first validation with its last, clip by clip: same prompt, same seed, different weights."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from sage_grpo.intervals import Interval, interval
from sage_grpo.runs.clips import Pair, change, pair_clips, read_clips, read_validations
from sage_grpo.runs.history import RunHistory, as_float

VERDICTS = {1: "better", -1: "worse", 0: "not significant"}


@dataclass(frozen=True)
class Measure:
    """One metric before and after, and its mean difference over pairs with a 95 % interval of +- `half`."""

    before: float
    before_error: float  # standard errors, NaN where unknown
    after: float
    after_error: float
    difference: float
    half: float
    better: int  # +1 if higher is better, -1 if lower is

    @property
    def verdict(self) -> int:
        """+1 better, -1 worse, 0 if the interval contains 0."""
        return self.better * int(np.sign(self.difference)) if abs(self.difference) > self.half else 0


@dataclass(frozen=True)
class Comparison:
    steps: tuple[int, int]  # iterations of the two validations
    measures: dict[str, Measure]  # metrics that both have; the total first
    pairs: list[Pair]


def compare(run: RunHistory) -> Comparison | None:
    """Compare the first and last validation; None if there are fewer than two."""
    if len(run.validations) < 2:
        return None
    first, last = run.validations[0], run.validations[-1]
    pairs = pair_clips(*(read_clips(run.folder / "validation" / f"step-{line['step']:06d}") for line in (first, last)))
    names = [key for key in last if first.get(key) is not None and f"{key}_stderr" in last]
    measures = {}
    for key in sorted(names, key=lambda key: key != "reward/total"):
        means = [as_float(line.get(name), name) for line in (first, last) for name in (key, f"{key}_stderr")]
        change = interval(after.values.get(key, math.nan) - before.values.get(key, math.nan) for before, after in pairs)
        measures[key] = Measure(*means, change.mean, change.half, -1 if key.endswith("distance") else 1)
    return Comparison((first["step"], last["step"]), measures, pairs)


def drift(run: RunHistory) -> dict[str, dict[int, Interval]]:
    """By name and iteration: reward and hold-out minus their values in the first validation, clip by clip.

    In standard deviations over the first validation's clips, so that scales match. Empty without a hold-out.
    """
    found = read_validations(run.folder)
    steps = [line["step"] for line in run.validations if line["step"] in found]
    if len(steps) < 2 or not any(math.isfinite(clip.held_out) for clip in found[steps[-1]]):
        return {}
    first, changes = found[steps[0]], {}
    for name, value in (("trained", "reward"), ("held out", "held_out")):
        known = [number for clip in first if math.isfinite(number := getattr(clip, value))]
        spread = float(np.std(known or [0.0])) or 1.0
        moved = {step: change(first, found[step], value) for step in steps}
        changes[name] = {step: Interval(c.mean / spread, c.half / spread) for step, c in moved.items()}
    return changes


def table(run: RunHistory, comparison: Comparison | None) -> list[list[str]]:
    """Before and after as text: titles, then one row per metric. Without a comparison it is empty."""
    if comparison is None:
        return []
    steps = [f"iteration {step}" for step in comparison.steps]
    rows = [["held-out prompts", *steps, "paired difference", "95 % interval", "", "perfect clips"]]
    perfect = {f"reward/{name}": as_float(value, name) for name, value in (run.head.get("perfect") or {}).items()}
    for key, m in comparison.measures.items():
        name = key.replace("/", " ", 1).replace("_", " ")
        decimals = 4 if m.better < 0 else 3  # distances are small fractions of the pixel range
        means = ((m.before, m.before_error), (m.after, m.after_error))
        row = [f"{name} (lower is better)" if m.better < 0 else name]
        row += [f"{number(mean, decimals)} ± {number(error, decimals)}" for mean, error in means]
        interval = " to ".join(number(m.difference + end, decimals, "+") for end in (-m.half, m.half))
        row += [number(m.difference, decimals, "+"), interval, VERDICTS[m.verdict], number(perfect.get(key, math.nan))]
        rows.append(row)
    return rows


def aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def number(value: float, decimals: int = 3, sign: str = "") -> str:
    """Format a number: one significant digit if the decimals would show none; a dash for NaN."""
    if not math.isfinite(value):
        return "–"
    form = f".{decimals}f" if value == 0 or round(value, decimals) else ".1g"
    return f"{value:{sign}{form}}".replace("-", "−")


def gain(pair: Pair) -> float:
    return pair[1].reward - pair[0].reward


def choose_pairs(pairs: Iterable[Pair], most: int) -> list[Pair]:
    """Up to `most` pairs with files and different prompts, in thirds by gain: best, middle and worst."""
    firsts: dict[str, Pair] = {}
    for pair in pairs:
        if all(clip.path.is_file() for clip in pair) and math.isfinite(gain(pair)):
            firsts.setdefault(pair[0].prompt, pair)
    ranked = sorted(firsts.values(), key=gain, reverse=True)
    count = min(most, len(ranked))
    ends, middle = count // 3, (len(ranked) - count) // 2 + count // 3
    return [*ranked[:ends], *ranked[middle : middle + count - 2 * ends], *ranked[len(ranked) - ends :]]
