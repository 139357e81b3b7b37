"""Tables of an evaluation: means with 95 % intervals, and each system paired with the first, clip by clip."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sage_grpo.intervals import interval
from sage_grpo.json_files import write_json
from sage_grpo.runs.clips import Clip, pair_clips, read_clips
from sage_grpo.tools.paired import aligned, number
from sage_grpo.tools.templating import render

MOST_PROMPTS = 12
TABLE_2 = ("Overall", "VQ", "MQ", "TA", "CLIPScore", "PickScore")  # the paper's columns
CLIPSCORE = 2.5  # times the cosine, clamped at 0: a scale that the paper's numbers can be on


def columns(clip: Clip) -> dict[str, float]:
    """The columns of the paper's Table 2 that were scored, then all other scores."""
    found: dict[str, float] = {}
    for key, value in clip.values.items():
        label = key.removeprefix("reward/")
        short = label.rpartition(".")[2]
        if label != "total":
            found[label if short in found else short] = value
    if {"VQ", "MQ", "TA"} <= found.keys():
        found["Overall"] = found["VQ"] + found["MQ"] + found["TA"]
    if "cosine" in found:
        found["CLIPScore"] = CLIPSCORE * max(found.pop("cosine"), 0.0)
    if "pickscore" in found:
        found["PickScore"] = found.pop("pickscore")
    return {name: found[name] for name in TABLE_2 if name in found} | found


def compared(output: Path, systems: Sequence[str]) -> dict[str, Any]:
    """By system and column: mean and interval, paired difference to the first system, and win rate over clips."""
    clips = {name: read_clips(output / name, anywhere=True) for name in systems}
    found: dict[str, Any] = {"reference": systems[0], "systems": {}}
    for name, own in clips.items():
        names = dict.fromkeys(column for clip in own for column in columns(clip))
        pairs = [(columns(a), columns(b)) for a, b in pair_clips(clips[systems[0]], own)] if name != systems[0] else []
        found["systems"][name] = {"clips": len(own), "columns": {n: _column(n, own, pairs) for n in names}}
    return found


def _column(name: str, clips: Sequence[Clip], pairs: Sequence[tuple[Mapping[str, float], Mapping[str, float]]]) -> Any:
    values = [columns(clip).get(name, math.nan) for clip in clips]
    mean = interval(values)
    record = {"mean": mean.mean, "half": mean.half, "count": sum(map(math.isfinite, values))}
    better = -1 if name.endswith("distance") else 1
    gains = [after.get(name, math.nan) - before.get(name, math.nan) for before, after in pairs]
    gains = [better * gain for gain in gains if math.isfinite(gain)]
    if not gains:
        return record
    change = interval(gains)
    wins = sum((gain > 0) + (gain == 0) / 2 for gain in gains) / len(gains)
    record |= {"difference": better * change.mean, "difference_half": change.half, "pairs": len(gains)}
    return record | {"win_rate": wins, "verdict": change.sign}


def tables(result: Mapping[str, Any]) -> tuple[list[list[str]], list[list[str]]]:
    """Two tables as text: means, and differences to the reference with win rates."""
    names = list(dict.fromkeys(n for system in result["systems"].values() for n in system["columns"]))
    means = [["mean ± 95 %", "clips", *names]]
    against = [[f"against {result['reference']}", "pairs", *names]]
    for system, found in result["systems"].items():
        cells = [found["columns"].get(name, {}) for name in names]
        means.append([system, str(found["clips"]), *(_shown(c, "mean", "half") for c in cells)])
        pairs = max((cell.get("pairs", 0) for cell in cells), default=0)
        if pairs:
            wins = (f", wins {cell['win_rate']:.0%}" if "win_rate" in cell else "" for cell in cells)
            changes = (_shown(cell, "difference", "difference_half", "+") for cell in cells)
            against.append([system, str(pairs), *map(str.__add__, changes, wins)])
    return means, against


def _shown(cell: Mapping[str, Any], mean: str, half: str, sign: str = "") -> str:
    return f"{number(cell[mean], sign=sign)} ± {number(cell[half])}" if mean in cell else "–"


def pages(output: Path, result: Mapping[str, Any]) -> str:
    """Write evaluation.json, .md and .html; returns the tables for the terminal."""
    both = [rows for rows in tables(result) if len(rows) > 1]
    write_json(output / "evaluation.json", result)
    (output / "evaluation.md").write_text("\n".join(map(markdown, both)), encoding="utf-8")
    html = render("evaluation.html", title="Evaluation", tables=both, cards=_cards(output, list(result["systems"])))
    (output / "evaluation.html").write_text(html, encoding="utf-8", errors="replace")
    return "\n\n".join(map(aligned, both)) + f"\n\n{output / 'evaluation.html'}"


def markdown(rows: Sequence[Sequence[str]]) -> str:
    rules = ["---", *["---:"] * (len(rows[0]) - 1)]
    return "".join(f"| {' | '.join(row)} |\n" for row in (rows[0], rules, *rows[1:]))


def _cards(output: Path, systems: Sequence[str]) -> list[list[tuple[str, Clip, dict[str, float]]]]:
    """Clips of all systems side by side, with their columns, for the first prompts."""
    cards: dict[tuple[str, int], list[Any]] = {}
    for name in systems:
        for clip in read_clips(output / name, anywhere=True):
            if clip.path.is_file():
                cards.setdefault((clip.prompt, clip.seed), []).append((name, clip, columns(clip)))
    return list(cards.values())[:MOST_PROMPTS]
