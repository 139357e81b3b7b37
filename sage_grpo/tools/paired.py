"""The first validation of a run against its last, clip by clip: same prompt, same seed, other weights."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sage_grpo.tools.run_folder import Run, RunError, as_float

LEAST_PAIRS = 3  # below that an interval says nothing


@dataclass(frozen=True)
class Clip:
    path: Path
    prompt: str
    seed: int
    number: int
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
    def decimals(self) -> int:
        """How many to show: distances are small parts of the range of a pixel."""
        return 4 if self.better < 0 else 3

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
    lines = run.validations[0], run.validations[-1]
    clips = [read_clips(run.folder / "validation" / f"step-{line['step']:06d}") for line in lines]
    pairs = pair_clips(*clips)
    measures = {}
    for key in sorted(lines[1], key=lambda key: key != "reward/total"):
        values = [as_float(line.get(key)) for line in lines]
        if "/" in key and not key.startswith(("time/", "reward/failed")) and not key.endswith("_stderr") and np.isfinite(values).all():
            errors = [_error(line, key, kept) for line, kept in zip(lines, clips, strict=True)]
            better = -1 if key.endswith("distance") else 1
            measures[key] = Measure(values[0], errors[0], values[1], errors[1], *paired_difference(pairs, key), better)
    return Comparison((lines[0]["step"], lines[1]["step"]), measures, pairs)


def text_table(run: Run) -> str:
    """Before and after for the terminal; empty where there are no two validations."""
    comparison = compare(run)
    if comparison is None:
        return ""
    first, last = comparison.steps
    rows = [("held-out prompts", f"iteration {first}", f"iteration {last}", "difference, 95 %", "perfect clips")]
    perfect = run.head.get("perfect") or {}
    for key, m in comparison.measures.items():
        mark = {1: "better", -1: "worse", 0: "not significant"}[m.verdict]
        goal = perfect.get(key.removeprefix("reward/"))
        rows.append((
            key + (" (lower is better)" if m.better < 0 else ""),
            f"{m.before:.{m.decimals}f} ± {m.before_error:.{m.decimals}f}",
            f"{m.after:.{m.decimals}f} ± {m.after_error:.{m.decimals}f}",
            f"{m.difference:+.{m.decimals}f} ± {m.half:.{m.decimals}f} {mark}",
            "" if goal is None else f"{goal:.3f}",
        ))  # fmt: skip
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def read_clips(folder: Path) -> list[Clip]:
    """The clips of one validation; empty where they were not kept."""
    path = folder / "clips.json"
    if not path.is_file():
        return []
    try:
        return [_clip(folder, entry) for entry in json.loads(path.read_bytes())]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{path} is no list of clips: {type(error).__name__} {error}") from error


def pair_clips(before: Sequence[Clip], after: Sequence[Clip]) -> list[Pair]:
    """Clips of the same prompt, seed and number, in the order of `before`."""
    found = {(clip.prompt, clip.seed, clip.number): clip for clip in after}
    keys = [(clip.prompt, clip.seed, clip.number) for clip in before]
    return [(clip, found[key]) for clip, key in zip(before, keys, strict=True) if key in found]


def paired_difference(pairs: Sequence[Pair], key: str) -> tuple[float, float]:
    """Mean of after - before over the pairs that both have the metric, and half of its 95 % interval."""
    values = _finite(after.values.get(key, math.nan) - before.values.get(key, math.nan) for before, after in pairs)
    mean = float(values.mean()) if len(values) else math.nan
    return mean, student_95(len(values) - 1) * standard_error(values)


def standard_error(values: np.ndarray) -> float:
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) >= LEAST_PAIRS else math.nan


def student_95(freedom: int) -> float:
    """Two-sided 95 % quantile of Student's t by the Cornish-Fisher series: 3 % low at 2 degrees, exact above 10."""
    if freedom < LEAST_PAIRS - 1:
        return math.nan
    z, n = 1.959964, freedom
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / n + second / n**2 + third / n**3


def gain(pair: Pair) -> float:
    return pair[1].reward - pair[0].reward


def choose_pairs(pairs: Iterable[Pair], most: int, most_bytes: int) -> list[Pair]:
    """Up to `most` pairs with files and different prompts: the best, the middle and the worst third by their gain.

    Fewer where the files are together larger than `most_bytes`.
    """
    firsts: dict[str, Pair] = {}
    for pair in pairs:
        if all(clip.path.is_file() for clip in pair) and math.isfinite(gain(pair)):
            firsts.setdefault(pair[0].prompt, pair)
    ranked = sorted(firsts.values(), key=gain, reverse=True)
    for count in range(min(most, len(ranked)), 0, -1):
        ends, start = count // 3, (len(ranked) - (count - 2 * (count // 3))) // 2
        middle = ranked[start : start + count - 2 * ends]
        chosen = [*ranked[:ends], *middle, *ranked[len(ranked) - ends :]]
        if sum(clip.path.stat().st_size for pair in chosen for clip in pair) <= most_bytes:
            return chosen
    return []


def _clip(folder: Path, entry: Mapping[str, Any]) -> Clip:
    values = {f"reward/{name}": as_float(value) for name, value in entry["scores"].items()}
    values |= {f"gold/{name}": as_float(value) for name, value in (entry.get("gold") or {}).items()}
    return Clip(folder / Path(entry["file"]).name, entry["prompt"], entry["seed"], entry["number"], values)


def _error(line: Mapping[str, Any], key: str, clips: Sequence[Clip]) -> float:
    """Standard error of a metric: as the trainer wrote it, else over the clips."""
    written = as_float(line.get(f"{key}_stderr"))
    return (
        written if math.isfinite(written) else standard_error(_finite(clip.values.get(key, math.nan) for clip in clips))
    )


def _finite(values: Iterable[float]) -> np.ndarray:
    array = np.array(list(values), dtype=float)
    return array[np.isfinite(array)]
