"""The first validation of a run against its last, clip by clip: same prompt, same seed, other weights."""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sage_grpo.intervals import Interval, interval
from sage_grpo.tools.run_folder import Run, as_float, beside
from sage_grpo.train import hacking

VERDICTS = {1: "better", -1: "worse", 0: "not significant"}


@dataclass(frozen=True)
class Clip:
    path: Path
    prompt: str
    seed: int
    values: dict[str, float]  # "reward/VQ", "gold/match", ...: named as in the lines of validation

    @property
    def reward(self) -> float:
        return self.values.get("reward/total", math.nan)


Pair = tuple[Clip, Clip]  # before, after


@dataclass(frozen=True)
class Measure:
    """One metric before and after, and the mean of its differences over pairs with a 95 % interval of +- `half`."""

    before: float
    before_error: float  # standard errors, NaN where unknown
    after: float
    after_error: float
    difference: float
    half: float
    better: int  # +1 where more is better, -1 where less is

    @property
    def verdict(self) -> int:
        """+1 better, -1 worse, 0 where the interval holds 0."""
        return self.better * int(np.sign(self.difference)) if abs(self.difference) > self.half else 0


@dataclass(frozen=True)
class Comparison:
    steps: tuple[int, int]  # iterations of the two validations
    measures: dict[str, Measure]  # of the metrics that both have; the total first
    pairs: list[Pair]


def compare(run: Run) -> Comparison | None:
    """None where there are no two validations."""
    if len(run.validations) < 2:
        return None
    first, last = run.validations[0], run.validations[-1]
    pairs = pair_clips(*(read_clips(run.folder / "validation" / f"step-{line['step']:06d}") for line in (first, last)))
    names = [key for key in last if first.get(key) is not None and f"{key}_stderr" in last]
    measures = {}
    for key in sorted(names, key=lambda key: key != "reward/total"):
        means = [as_float(line.get(name)) for line in (first, last) for name in (key, f"{key}_stderr")]
        change = interval(after.values.get(key, math.nan) - before.values.get(key, math.nan) for before, after in pairs)
        measures[key] = Measure(*means, change.mean, change.half, -1 if key.endswith("distance") else 1)
    return Comparison((first["step"], last["step"]), measures, pairs)


def drift(run: Run) -> dict[str, dict[int, Interval]]:
    """By name and iteration: reward and hold-out less those of the first validation, clip by clip.

    In standard deviations of the first one's clips, so that both have one scale. Empty where no hold-out was measured.
    """
    found = hacking.validations(run.folder)
    steps = [line["step"] for line in run.validations if line["step"] in found]
    if len(steps) < 2 or not any(map(math.isfinite, map(hacking.held_out, found[steps[-1]]))):
        return {}
    first, changes = found[steps[0]], {}
    for name, value in (("trained", hacking.trained), ("held out", hacking.held_out)):
        spread = float(np.nanstd([value(record) for record in first])) or 1.0
        moved = {step: hacking.change(first, found[step], value) for step in steps}
        changes[name] = {step: Interval(c.mean / spread, c.half / spread) for step, c in moved.items()}
    return changes


def table(run: Run, comparison: Comparison) -> list[list[str]]:
    """Before and after for people: titles, then a row for each metric."""
    steps = [f"iteration {step}" for step in comparison.steps]
    rows = [["held-out prompts", *steps, "paired difference", "95 % interval", "", "perfect clips"]]
    perfect = {f"reward/{name}": value for name, value in (run.head.get("perfect") or {}).items()}
    for key, m in comparison.measures.items():
        name = key.replace("/", " ", 1).replace("_", " ")
        decimals = 4 if m.better < 0 else 3  # distances are small parts of the range of a pixel
        means = ((m.before, m.before_error), (m.after, m.after_error))
        row = [f"{name} (lower is better)" if m.better < 0 else name]
        row += [f"{number(mean, decimals)} ± {number(error, decimals)}" for mean, error in means]
        interval = " to ".join(number(m.difference + end, decimals, "+") for end in (-m.half, m.half))
        row += [number(m.difference, decimals, "+"), interval, VERDICTS[m.verdict], number(as_float(perfect.get(key)))]
        rows.append(row)
    return rows


def text_table(run: Run) -> str:
    """The table for the terminal; empty where there are no two validations."""
    comparison = compare(run)
    return aligned(table(run, comparison)) if comparison else ""


def aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def number(value: float, decimals: int = 3, sign: str = "") -> str:
    """One digit where the decimals would show none; a dash for NaN."""
    if not math.isfinite(value):
        return "–"
    form = f".{decimals}f" if value == 0 or round(value, decimals) else ".1g"
    return f"{value:{sign}{form}}".replace("-", "−")


def read_clips(folder: Path, anywhere: bool = False) -> list[Clip]:
    """The clips of one validation; empty where they were not kept. `anywhere`: the list is our own, and may point."""
    path, clips = folder / "clips.json", []
    for entry in json.loads(path.read_bytes()) if path.is_file() else ():
        values = {}
        for kind, place in (("reward", "scores"), ("holdout", "holdout"), ("gold", "gold")):
            values |= {f"{kind}/{name}": as_float(value) for name, value in entry.get(place, {}).items()}
        file = folder / entry["file"] if anywhere else beside(path, entry["file"])
        clips.append(Clip(file, entry["prompt"], entry["seed"], values))
    return clips


def pair_clips(before: Sequence[Clip], after: Sequence[Clip]) -> list[Pair]:
    """Clips of the same prompt and seed, in the order of `before`."""
    found = {(clip.prompt, clip.seed): clip for clip in after}
    return [(clip, found[clip.prompt, clip.seed]) for clip in before if (clip.prompt, clip.seed) in found]


def gain(pair: Pair) -> float:
    return pair[1].reward - pair[0].reward


def choose_pairs(pairs: Iterable[Pair], most: int) -> list[Pair]:
    """Up to `most` pairs with files and different prompts: the best, the middle and the worst third by their gain."""
    firsts: dict[str, Pair] = {}
    for pair in pairs:
        if all(clip.path.is_file() for clip in pair) and math.isfinite(gain(pair)):
            firsts.setdefault(pair[0].prompt, pair)
    ranked = sorted(firsts.values(), key=gain, reverse=True)
    count = min(most, len(ranked))
    ends, middle = count // 3, (len(ranked) - count) // 2 + count // 3
    return [*ranked[:ends], *ranked[middle : middle + count - 2 * ends], *ranked[len(ranked) - ends :]]
