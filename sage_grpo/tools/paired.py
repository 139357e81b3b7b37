"""Compares systems clip by clip, same prompt and seed: the start and end of a run, several runs, or checkpoints.

Every ± is half of the 95 % interval of a mean, by Student's t. A verdict needs `FEWEST` pairs. The total reward is the
sum that training maximizes, with the run's reward_weights; the paper's Overall is VQ + MQ + TA without weights.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sage_grpo.intervals import FEWEST, Interval, interval
from sage_grpo.runs.clips import Clip, pair_clips, read_clips
from sage_grpo.runs.hacking import change
from sage_grpo.runs.history import RunHistory

TOTAL = "total reward"
TABLE_2 = (
    TOTAL,
    "Overall",
    "VQ",
    "MQ",
    "TA",
    "CLIPScore",
    "PickScore",
)  # the paper's columns after the total
RENAMED = {"cosine": "CLIPScore", "pickscore": "PickScore"}
CLIPSCORE = 2.5  # times the cosine, clamped at 0: a scale that the paper's numbers can be on
VERDICTS = {1: "better", -1: "worse", 0: "not significant"}
MOST_PROMPTS = 12

Systems = Mapping[str, Sequence[Clip]]  # the first is the reference
Row = dict[str, float]  # column -> value


def validation_clips(run: RunHistory) -> dict[int, list[Clip]]:
    """The clips of the validations that still have them, by iteration."""
    steps = [line["step"] for line in run.validations]
    found = {step: read_clips(run.folder / "validation" / f"step-{step:06d}") for step in steps}
    return {step: clips for step, clips in found.items() if clips}


def columns(clip: Clip, total: bool = False) -> Row:
    """The columns of the paper's Table 2 that were scored, then all other scores; `total`: with the total reward."""
    found: Row = {}
    for key, value in clip.values.items():
        kind, _, rest = key.partition("/")
        label = rest if kind == "reward" else f"{kind} {rest.replace('_', ' ')}"
        name = TOTAL if label == "total" else RENAMED.get(short := label.rpartition(".")[2], short)
        if total or label != "total":
            found[label if name in found else name] = value
    if {"VQ", "MQ", "TA"} <= found.keys():
        found["Overall"] = found["VQ"] + found["MQ"] + found["TA"]
    if "CLIPScore" in found:
        found["CLIPScore"] = CLIPSCORE * max(found["CLIPScore"], 0.0)
    return {name: found[name] for name in TABLE_2 if name in found} | found


def compared(systems: Systems, total: bool = False) -> dict[str, Any]:
    """By system and column: mean and interval, paired difference to the first system, and win rate over clips."""
    first = next(iter(systems))
    found: dict[str, Any] = {"reference": first, "systems": {}}
    for name, clips in systems.items():
        rows = [columns(clip, total) for clip in clips]
        pairs = pair_clips(systems[first], clips) if name != first else []
        both = [(columns(before, total), columns(after, total)) for before, after in pairs]
        names = dict.fromkeys(column for row in rows for column in row)
        found["systems"][name] = {
            "clips": len(clips),
            "columns": {n: _column(n, rows, both) for n in names},
        }
    return found


def _column(name: str, rows: Sequence[Row], pairs: Sequence[tuple[Row, Row]]) -> dict[str, Any]:
    mean, better = interval(row.get(name, math.nan) for row in rows), better_sign(name)
    record = {"mean": mean.mean, "half": mean.half, "count": mean.count}
    gains = [after.get(name, math.nan) - before.get(name, math.nan) for before, after in pairs]
    moved = interval(gains)
    if not moved.count:
        return record
    wins = sum((better * gain > 0) + (gain == 0) / 2 for gain in gains) / moved.count
    record |= {"difference": moved.mean, "difference_half": moved.half, "pairs": moved.count}
    return record | {"win_rate": wins, "verdict": verdict(moved, better)}


def verdict(change: Interval, better: int = 1) -> str:
    """What a paired difference says, given enough pairs."""
    return VERDICTS[better * change.sign] if change.count >= FEWEST else "too few clips"


def better_sign(column: str) -> int:
    """+1 if higher is better, -1 if lower is."""
    return -1 if column.endswith("distance") else 1


def tables(result: Mapping[str, Any]) -> list[list[list[str]]]:
    """Means, and differences in a table of their own if there are several: a row per metric, a column per system."""
    systems, first = result["systems"], result["reference"]
    others = [
        name
        for name, found in systems.items()
        if any("pairs" in cell for cell in found["columns"].values())
    ]
    means = [
        ["mean ± 95 %", *(f"{name}, {found['clips']} clips" for name, found in systems.items())]
    ]
    against = [["difference ± 95 %", *(f"{name} minus {first}" for name in others)]]
    for name in dict.fromkeys(name for found in systems.values() for name in found["columns"]):
        cells = {system: found["columns"].get(name, {}) for system, found in systems.items()}
        title = f"{name} (lower is better)" if better_sign(name) < 0 else name
        means.append([title, *(shown(name, cell, "mean", "half") for cell in cells.values())])
        against.append([title, *(_difference(name, cells[system]) for system in others)])
    return (
        [means, against]
        if len(others) > 1
        else [[m + d[1:] for m, d in zip(means, against, strict=True)]]
    )


def _difference(name: str, cell: Mapping[str, Any]) -> str:
    change = shown(name, cell, "difference", "difference_half", "+")
    return (
        f"{change}, wins {cell['win_rate']:.0%} of {cell['pairs']}, {cell['verdict']}"
        if "pairs" in cell
        else change
    )


def shown(name: str, cell: Mapping[str, float], mean: str, half: str, sign: str = "") -> str:
    """A mean with its interval; distances are small fractions of the pixel range."""
    decimals = 4 if better_sign(name) < 0 else 3
    return (
        f"{number(cell[mean], decimals, sign)} ± {number(cell[half], decimals)}"
        if mean in cell
        else "–"
    )


def clip_rows(systems: Systems, total: bool = False) -> list[list[tuple[str, Clip, Row]]]:
    """System, clip and columns in rows of one prompt and seed, from the last system's largest gain to its largest loss.

    Rows are evenly spaced in between. A prompt is shown once, and rows that lack a video only if no row has all.
    """
    rows: dict[tuple[str, int, str], list[tuple[str, Clip, Row]]] = {}
    for name, clips in systems.items():
        for clip in (clip for clip in clips if clip.path.is_file()):
            rows.setdefault(clip.request, []).append((name, clip, columns(clip, total)))
    full = [row for row in rows.values() if len(row) == len(systems)] or list(rows.values())
    prompts = {row[0][1].prompt: row for row in reversed(full)}
    ranked = sorted(
        (row for row in full if prompts[row[0][1].prompt] is row), key=gain, reverse=True
    )
    chosen = np.linspace(0, len(ranked) - 1, min(MOST_PROMPTS, len(ranked))).round().astype(int)
    return [ranked[place] for place in chosen]


def gain(row: Sequence[tuple[str, Clip, Row]]) -> float:
    """Last minus first, of the first column; 0 where one has none."""
    values = [next(iter(columns.values()), math.nan) for _, _, columns in row]
    return float(np.nan_to_num(values[-1] - values[0]))


def drift(run: RunHistory) -> dict[str, dict[int, Interval]]:
    """By name and iteration: reward and hold-out minus their values in the first validation, clip by clip.

    In standard deviations over the first validation's clips, so that scales match. Empty without a hold-out.
    """
    found, changes = validation_clips(run), {}
    if len(found) < 2 or not any(math.isfinite(clip.held_out) for clip in found[max(found)]):
        return {}
    first = found[min(found)]
    for name, value in (("trained", "reward"), ("held out", "held_out")):
        known = [number for clip in first if math.isfinite(number := getattr(clip, value))]
        spread = float(np.std(known or [0.0])) or 1.0
        moved = {step: change(first, clips, value) for step, clips in found.items()}
        changes[name] = {
            step: Interval(c.mean / spread, c.half / spread) for step, c in moved.items()
        }
    return changes


def aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def number(value: float, decimals: int = 3, sign: str = "") -> str:
    """Format a number: one significant digit if the decimals would show none; a dash for NaN."""
    if not math.isfinite(value):
        return "–"
    form = f".{decimals}f" if value == 0 or round(value, decimals) else ".1g"
    return f"{value:{sign}{form}}".replace("-", "−")
