"""Compares systems clip by clip, same prompt and seed: the start and end of a run, several runs, or checkpoints.

Every ± is half of the 95 % interval of a mean, by Student's t. A verdict needs `MIN_PAIRS` pairs. The total reward is
the sum that training maximizes, with the run's reward_weights; the paper's Overall is VQ + MQ + TA without weights.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from sage_grpo.intervals import MIN_PAIRS, Interval, interval
from sage_grpo.runs.clips import Clip, pair_clips, read_clips
from sage_grpo.runs.hacking import change
from sage_grpo.runs.history import RunHistory

TOTAL = "total reward"
# the paper's columns after the total
TABLE_2 = (TOTAL, "Overall", "VQ", "MQ", "TA", "CLIPScore", "PickScore")
RENAMED = {"cosine": "CLIPScore", "pickscore": "PickScore"}
CLIPSCORE = 2.5  # times the cosine, clamped at 0: a scale that the paper's numbers can be on
VERDICTS = {1: "better", -1: "worse", 0: "not significant"}
MAX_PROMPTS = 12

Systems = Mapping[str, Sequence[Clip]]  # the first is the reference
Row = dict[str, float]  # column -> value


def validation_clips(run: RunHistory) -> dict[int, list[Clip]]:
    """The clips of the validations that still have them, by iteration."""
    validations = {}
    for line in run.validations:
        step = line["step"]
        clips = read_clips(run.folder / "validation" / f"step-{step:06d}")
        if clips:
            validations[step] = clips
    return validations


# numbers


def columns(clip: Clip, total: bool = False) -> Row:
    """The columns of the paper's Table 2 that were scored, then all other scores; `total`: with the total reward."""
    row: Row = {}
    for key, value in clip.values.items():
        kind, _, score = key.partition("/")
        label = score if kind == "reward" else f"{kind} {score.replace('_', ' ')}"
        if label == "total":
            if total:
                row[TOTAL] = value
            continue
        short = label.rpartition(".")[2]  # without the name of its reward
        name = RENAMED.get(short, short)
        row[label if name in row else name] = value
    if {"VQ", "MQ", "TA"} <= row.keys():
        row["Overall"] = row["VQ"] + row["MQ"] + row["TA"]
    if "CLIPScore" in row:
        row["CLIPScore"] = CLIPSCORE * max(row["CLIPScore"], 0.0)
    return {name: row[name] for name in TABLE_2 if name in row} | row


def compared(systems: Systems, total: bool = False) -> dict[str, Any]:
    """By system and column: mean and interval, paired difference to the first system, and win rate over clips."""
    reference = next(iter(systems))
    results = {}
    for name, clips in systems.items():
        rows = [columns(clip, total) for clip in clips]
        pairs = [] if name == reference else pair_clips(systems[reference], clips)
        row_pairs = [(columns(before, total), columns(after, total)) for before, after in pairs]
        names = dict.fromkeys(column for row in rows for column in row)
        results[name] = {
            "clips": len(clips),
            "columns": {column: _column(column, rows, row_pairs) for column in names},
        }
    return {"reference": reference, "systems": results}


def _column(name: str, rows: Sequence[Row], pairs: Sequence[tuple[Row, Row]]) -> dict[str, Any]:
    """Mean of a column over clips and, if there are pairs, its paired difference."""
    mean = interval(row.get(name, math.nan) for row in rows)
    record = {"mean": mean.mean, "half": mean.half, "count": mean.count}

    gains = [after.get(name, math.nan) - before.get(name, math.nan) for before, after in pairs]
    difference = interval(gains)
    if not difference.count:
        return record
    sign = better_sign(name)
    wins = sum(1 for gain in gains if sign * gain > 0)
    ties = sum(1 for gain in gains if gain == 0)
    record["difference"] = difference.mean
    record["difference_half"] = difference.half
    record["pairs"] = difference.count
    record["win_rate"] = (wins + ties / 2) / difference.count
    record["verdict"] = verdict(difference, sign)
    return record


def verdict(difference: Interval, better: int = 1) -> str:
    """What a paired difference says, given enough pairs."""
    return VERDICTS[better * difference.sign] if difference.count >= MIN_PAIRS else "too few clips"


def better_sign(column: str) -> int:
    """+1 if higher is better, -1 if lower is."""
    return -1 if column.endswith("distance") else 1


def drift(run: RunHistory) -> dict[str, dict[int, Interval]]:
    """By name and iteration: reward and hold-out minus their values in the first validation, clip by clip.

    In standard deviations over the first validation's clips, so that scales match. Empty without a hold-out.
    """
    validations = validation_clips(run)
    if len(validations) < 2:
        return {}
    first = validations[min(validations)]
    last = validations[max(validations)]
    if not any(math.isfinite(clip.held_out) for clip in last):
        return {}

    changes = {}
    for name, attribute in (("trained", "reward"), ("held out", "held_out")):
        values = [getattr(clip, attribute) for clip in first]
        finite = [value for value in values if math.isfinite(value)]
        spread = float(np.std(finite or [0.0])) or 1.0
        changes[name] = {}
        for step, clips in validations.items():
            moved = change(first, clips, attribute)
            changes[name][step] = Interval(moved.mean / spread, moved.half / spread)
    return changes


# tables


@dataclass(frozen=True)
class Table:
    rows: list[list[str]]  # the first are titles
    caption: str


def tables(result: Mapping[str, Any], note: str = "") -> list[Table]:
    """The result of `compared`: a row per metric, a column per system.

    Differences have a table of their own if there are several. note: sentences for the caption of the means.
    """
    systems = result["systems"]
    paired = [
        name
        for name, system in systems.items()
        if any("pairs" in cell for cell in system["columns"].values())
    ]
    means = [
        ["mean ± 95 %", *(f"{name}, {system['clips']} clips" for name, system in systems.items())]
    ]
    differences = [
        ["difference ± 95 %", *(f"{name} minus {result['reference']}" for name in paired)]
    ]
    columns = dict.fromkeys(column for system in systems.values() for column in system["columns"])
    for column in columns:
        cells = {name: system["columns"].get(column, {}) for name, system in systems.items()}
        title = f"{column} (lower is better)" if better_sign(column) < 0 else column
        means.append([title, *(shown(column, cell, "mean", "half") for cell in cells.values())])
        differences.append([title, *(_difference(column, cells[name]) for name in paired)])

    about_means = _about_means(columns, note)
    about_differences = ABOUT_DIFFERENCES if paired else ""
    if len(paired) > 1:
        return [Table(means, about_means), Table(differences, about_differences)]
    rows = [mean + difference[1:] for mean, difference in zip(means, differences, strict=True)]
    return [Table(rows, f"{about_means} {about_differences}".strip())]


ABOUT_DIFFERENCES = (
    "Differences are taken clip by clip, same prompt and seed. "
    "wins: the share of pairs in which the clip is better, ties"
    f" counted half. A verdict needs {MIN_PAIRS} pairs; "
    "it is better or worse (green, red) if the interval of the difference"
    " excludes 0, not corrected for the number of rows."
)


def _about_means(columns: Mapping[str, Any], note: str) -> str:
    sentences = ["± is half of the 95 % interval of the mean over clips, by Student's t."]
    if note:
        sentences.append(note)
    if TOTAL in columns:
        sentences.append(
            "The total reward is the sum that training maximizes, with the run's reward_weights."
        )
    if "Overall" in columns:
        sentences.append(
            "Overall is VQ + MQ + TA without weights, the column of the paper's Table 2."
        )
    return " ".join(sentences)


def _difference(column: str, cell: Mapping[str, Any]) -> str:
    text = shown(column, cell, "difference", "difference_half", sign="+")
    if "pairs" in cell:
        text += f", wins {cell['win_rate']:.0%} of {cell['pairs']}, {cell['verdict']}"
    return text


def shown(column: str, cell: Mapping[str, float], mean: str, half: str, sign: str = "") -> str:
    """A mean with its interval, both named by their keys in `cell`."""
    if mean not in cell:
        return "–"
    # distances are small fractions of the pixel range
    decimals = 4 if better_sign(column) < 0 else 3
    return f"{number(cell[mean], decimals, sign)} ± {number(cell[half], decimals)}"


def number(value: float, decimals: int = 3, sign: str = "") -> str:
    """Format a number: one significant digit if the decimals would show none; a dash for NaN."""
    if not math.isfinite(value):
        return "–"
    form = f".{decimals}f" if value == 0 or round(value, decimals) else ".1g"
    return f"{value:{sign}{form}}".replace("-", "−")


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows as text, with columns of equal width."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


# clips side by side


class ShownClip(NamedTuple):
    system: str
    clip: Clip
    columns: Row


def clip_rows(systems: Systems, total: bool = False) -> list[list[ShownClip]]:
    """Clips in rows of one prompt and seed, from the last system's largest gain to its largest loss.

    Rows are evenly spaced in between. A prompt is shown once, and rows that lack a video only if no row has all.
    """
    by_request: dict[tuple[str, int, str], list[ShownClip]] = {}
    for system, clips in systems.items():
        for clip in clips:
            if clip.path.is_file():
                shown_clip = ShownClip(system, clip, columns(clip, total))
                by_request.setdefault(clip.request, []).append(shown_clip)
    rows = list(by_request.values())
    complete = [row for row in rows if len(row) == len(systems)] or rows

    by_prompt: dict[str, list[ShownClip]] = {}
    for row in complete:
        by_prompt.setdefault(row[0].clip.prompt, row)
    ranked = sorted(by_prompt.values(), key=gain, reverse=True)
    places = np.linspace(0, len(ranked) - 1, min(MAX_PROMPTS, len(ranked))).round().astype(int)
    return [ranked[place] for place in places]


def gain(row: Sequence[ShownClip]) -> float:
    """Last minus first, of the first column; 0 where one has none."""
    first = next(iter(row[0].columns.values()), math.nan)
    last = next(iter(row[-1].columns.values()), math.nan)
    return float(np.nan_to_num(last - first))
