"""The metrics of a run folder, read back by iteration.

Results can be compared as long as the yardstick stays the same: the reward with its weights, the prompts, and how clips
are sampled. Where a resumed run changes it, a line of the kind "break" ends the series of training results, that of
validations, or both:

    {"kind": "break", "step": 40, "series": ["train", "validation"], "changed": {"reward weights": ["1 VQ", "2 VQ"]}}

Readers get the series since the last break, so no comparison crosses one; earlier series are only drawn. A break counts
only if results follow it before the next one.

Shapes: N iterations with all metrics, T denoising steps. A null in the file becomes NaN.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from sage_grpo.config.fields import ConfigError
from sage_grpo.files.foreign import Refused, read_bytes
from sage_grpo.files.json_files import printable
from sage_grpo.rewards.reserved import RESERVED_NAMES

Line = dict[str, Any]  # of metrics.jsonl: kind, step, metrics

SERIES = ("train", "validation")  # whose results are compared
KINDS = ("run", "limits", "break", "train", "reward", "validation")  # of line
# fields of a "limits" line; in runs of older versions, of a "run" line
LIMITS = ("perfect", "vae_floor")
SERIES_OF = {"train": "train", "reward": "train", "validation": "validation"}  # by kind of line
FIELD_TYPES = {
    "time": str,
    "device": str,
    "world": str,
    "step": int,
    "ranks": int,
    "trainable_parameters": int,
    "versions": dict,
    "perfect": dict,
    "perfect_is_best": bool,
    "vae_floor": dict,
    "schedule": dict,
    "per_step": dict,
    "yardstick": dict,
    "series": list,
    "changed": dict,
}
MAX_INTEGER = 2**53  # beyond it floats skip integers, and far beyond it they overflow
MAX_BYTES = 1 << 32  # of metrics.jsonl
MAX_TEXT = 1 << 24  # bytes of a text file
MAX_VALUE = 1e100  # beyond it a value is shown as missing: axes and squares would overflow


class RunError(ConfigError):
    """Why a folder cannot be reported on, in one sentence."""


@dataclass(frozen=True)
class RunHistory:
    folder: Path
    starts: list[Line]  # the "run" lines: the start and each resume
    # iterations since the last break, in order, with all metrics: one of every `log_interval`
    full_lines: list[Line]
    validations: list[Line]  # by iteration, since the last break
    # the iterations between them, with the metrics of the reward alone
    reward_only_lines: list[Line] = field(default_factory=list)
    breaks: list[Line] = field(default_factory=list)  # where a series ended, in order
    limits: Line = field(default_factory=dict)  # what samples can reach at best
    # series that ended, as `full_lines`, `iteration_lines` and `validations`
    earlier_full_lines: list[list[Line]] = field(default_factory=list)
    earlier_iteration_lines: list[list[Line]] = field(default_factory=list)
    earlier_validations: list[list[Line]] = field(default_factory=list)

    @property
    def head(self) -> Line:
        """The line of the last start, with what samples can reach at best."""
        return {**self.limits, **self.starts[-1]} if self.starts else {}

    @cached_property
    def iteration_lines(self) -> list[Line]:
        """One line per iteration since the last break, in order; some have the metrics of the reward alone."""
        return _in_order([*self.full_lines, *self.reward_only_lines])

    @property
    def all_iteration_lines(self) -> list[Line]:
        """One line per iteration of all series: for counts of failures, which need no yardstick."""
        return [
            line
            for series in (*self.earlier_iteration_lines, self.iteration_lines)
            for line in series
        ]

    @property
    def all_full_lines(self) -> list[Line]:
        """The lines with all metrics, of all series: for costs, which need no yardstick."""
        return [line for series in (*self.earlier_full_lines, self.full_lines) for line in series]

    @property
    def iterations(self) -> int:
        lines = self.all_iteration_lines
        return lines[-1]["step"] if lines else 0

    def until(self, step: int) -> "RunHistory":
        """The run as it was at iteration `step`, in the series to which that iteration belongs."""
        breaks = [line for line in self.breaks if line["step"] < step]

        def series(name: str, parts: Sequence[Sequence[Line]]) -> list[Line]:
            current = parts[_count(name, breaks)]
            return [line for line in current if line["step"] <= step]

        iteration_lines = series("train", [*self.earlier_iteration_lines, self.iteration_lines])
        return RunHistory(
            self.folder,
            self.starts,
            full_lines=[line for line in iteration_lines if line["kind"] == "train"],
            validations=series("validation", [*self.earlier_validations, self.validations]),
            reward_only_lines=[line for line in iteration_lines if line["kind"] == "reward"],
            breaks=breaks,
            limits=self.limits,
        )

    @property
    def break_sentences(self) -> list[str]:
        """One for each break: where it is, what it separates, what changed."""
        return [break_sentence(line) for line in self.breaks]

    @property
    def scores(self) -> list[str]:
        """Names of the reward's scores, such as VQ, in file order."""
        keys = dict.fromkeys(
            key for line in (*self.iteration_lines, *self.validations) for key in line
        )
        names = [key.removeprefix("reward/") for key in keys if key.startswith("reward/")]
        return [
            name for name in names if name not in RESERVED_NAMES and not name.endswith("_stderr")
        ]

    @property
    def holdouts(self) -> set[str]:
        """The metrics of a reward that training never sees."""
        keys = {key for line in self.validations for key in line if key.startswith("holdout/")}
        return {key for key in keys if not key.endswith(("_stderr", "/diverged"))}

    def has(self, key: str) -> bool:
        """Whether the metric has a value in training."""
        return bool(np.isfinite(column(self.iteration_lines, key)).any())

    def measured(self, key: str) -> bool:
        """Whether the metric has a value in training or in validation."""
        return self.has(key) or bool(np.isfinite(column(self.validations, key)).any())

    def grid(self, key: str) -> np.ndarray:
        """A metric by iteration and denoising step, (N, T); T is 0 if no line has it."""
        rows = [numbers((line.get("per_step") or {}).get(key), key) for line in self.full_lines]
        steps = max(map(len, rows), default=0)
        grid = np.full((len(rows), steps), math.nan)
        for i, row in enumerate(rows):
            grid[i, : len(row)] = row
        return grid


def column(lines: Sequence[Mapping[str, Any]], key: str) -> np.ndarray:
    """A metric over lines, (N,); NaN where a line lacks it."""
    return np.array([as_float(line.get(key), key) for line in lines])


def numbers(values: Any, name: str) -> list[float]:
    """A list of numbers from a file; null stands for an empty one."""
    values = values or []
    if not isinstance(values, list):
        raise RunError(f"{name} is {values!r:.100}; a list of numbers is expected")
    return [as_float(value, name) for value in values]


def as_float(value: Any, name: str = "a metric") -> float:
    """A number from a file; NaN for null and for what is too large to be shown."""
    if value is None:
        return math.nan
    if not isinstance(value, (int, float)):
        raise RunError(f"{name} is {value!r:.100}; a number is expected")
    return float(value) if abs(value) < MAX_VALUE else math.nan


def text_of(file: Path) -> str:
    """A text file of a run folder; empty if it is missing."""
    if not file.is_file():
        return ""
    return read_bytes(file, MAX_TEXT).decode(errors="replace")


@contextmanager
def about(*folders: Path) -> Iterator[None]:
    """Context of work on run folders: errors caused by the numbers in them name the folders."""
    try:
        yield
    except (ConfigError, Refused):  # these name their file
        raise
    except (ValueError, ArithmeticError) as error:
        names = " or ".join(map(str, folders))
        raise RunError(
            f"{names} holds values that cannot be used ({printable(error)});"
            " look at its metrics.jsonl and its clips.json"
        ) from error


def read_run(folder: Path) -> RunHistory:
    path = folder / "metrics.jsonl"
    if not path.is_file() and not path.is_symlink():
        raise RunError(f"{folder} is not a run folder: it holds no metrics.jsonl")

    starts: list[Line] = []
    breaks: list[Line] = []
    # by kind of line, the lines of each series by iteration
    series: dict[str, list[dict[int, Line]]] = {kind: [{}] for kind in (*SERIES_OF, "limits")}
    for line in _read_lines(path):
        kind, step = line["kind"], line["step"]
        if kind in series:
            series[kind][-1][step] = line
        elif kind == "break":
            breaks.append(line)
            for name in _kinds_ended(line):
                series[name].append({})
        else:
            starts.append(line)
            # a resume repeats iterations: lines that an earlier start wrote after this one are void
            breaks = [earlier for earlier in breaks if earlier["step"] <= step]
            for name, parts in series.items():
                kept = parts[: 1 + _count(name, breaks)]
                series[name] = [_until(step, lines) for lines in kept]
    breaks = _join_breaks(breaks, series)

    last_limits = list(series["limits"][-1].values())[-1:]
    limits = {name: line.get(name) for line in last_limits for name in LIMITS}
    full, reward_only, validations = (
        [list(lines.values()) for lines in series[kind]] for kind in SERIES_OF
    )
    has_results = any(lines for parts in (full, reward_only, validations) for lines in parts)
    if not starts and not has_results:
        raise RunError(f"{path} holds no metrics yet")
    return RunHistory(
        folder,
        starts,
        full_lines=full[-1],
        validations=validations[-1],
        reward_only_lines=reward_only[-1],
        breaks=breaks,
        limits=limits,
        earlier_full_lines=full[:-1],
        earlier_iteration_lines=[
            _in_order([*logged, *others])
            for logged, others in zip(full[:-1], reward_only[:-1], strict=True)
        ],
        earlier_validations=validations[:-1],
    )


# series and their breaks


def _join_breaks(breaks: Sequence[Line], series: dict[str, list[dict[int, Line]]]) -> list[Line]:
    """Make one break of two that no result lies between, or none if the second goes back to what was before the first.

    Starts of which no result came, perhaps with a wrong reward, so end no series. `series` changes accordingly.
    """
    joined: list[Line] = []
    for line in breaks:
        ended = _ended(line)
        # of the series that it ends
        place = {kind: _count(kind, joined) for kind in _kinds_ended(line)}
        has_results = any(series[kind][place[kind]] for kind in place if kind in SERIES_OF)
        if has_results or not joined or _ended(joined[-1]) != ended:
            joined.append(line)
            continue

        first = joined.pop()
        for kind, number in place.items():
            series[kind].pop(number)
        changed = _changed_by_both(first, line)
        if changed:
            joined.append(first | {"changed": changed})
            continue
        for kind, number in place.items():
            series[kind][number - 1] |= series[kind].pop(number)
    return joined


def _changed_by_both(first: Line, second: Line) -> dict[str, Any]:
    """What two breaks changed together: by name, the value before the first and that after the second."""
    changed = dict(first.get("changed") or {})
    for name, values in (second.get("changed") or {}).items():
        if _is_pair(changed.get(name)) and _is_pair(values):
            before, after = changed.pop(name)[0], values[1]
            if before == after:
                continue
            values = [before, after]
        changed[name] = values
    return changed


def _is_pair(values: Any) -> bool:
    return isinstance(values, list) and len(values) == 2


def yardstick_changes(
    run: RunHistory, step: int, yardstick: Mapping[str, Mapping[str, Any]]
) -> Line | None:
    """A "break" line if the yardstick of results after iteration `step` differs from that of the last start.

    yardstick: by series, what two results must share. None if it is the same, or if the run has no results yet.
    """
    results = {
        "train": (*run.earlier_iteration_lines, run.iteration_lines),
        "validation": (*run.earlier_validations, run.validations),
    }
    after = json.loads(json.dumps(yardstick))
    ended = []
    changed: dict[str, Any] = {}
    for name in SERIES:
        old = _last_known(run, name, step)
        has_results = any(line["step"] <= step for lines in results[name] for line in lines)
        if not has_results:
            continue
        differing = {
            key: [old[key], value]
            for key, value in after[name].items()
            if key in old and old[key] != value
        }
        if differing:
            ended.append(name)
            changed.update(differing)
    return {"series": ended, "changed": changed} if ended else None


def _last_known(run: RunHistory, name: str, step: int) -> dict[str, Any]:
    """What the results of a series up to `step` share: the last value of each part of the yardstick since its break.

    A part may be missing in some starts, such as a held-out reward that was left out for a while.
    """
    breaks = [line["step"] for line in run.breaks if name in _ended(line) and line["step"] <= step]
    first = max(breaks, default=0)
    starts: list[Line] = []  # that led to `step`; a resume from before makes later ones void
    for line in run.starts:
        starts = [earlier for earlier in starts if earlier["step"] <= line["step"]]
        starts.append(line)
    known: dict[str, Any] = {}
    for line in starts:
        part = (line.get("yardstick") or {}).get(name)
        if first <= line["step"] <= step and isinstance(part, dict):
            known |= part
    return known


def _ended(line: Line) -> list[str]:
    """The series that a break ends."""
    return [name for name in SERIES if name in (line.get("series") or ())]


def _kinds_ended(line: Line) -> list[str]:
    """The kinds of lines of which a break begins another series."""
    return [*(kind for kind, name in SERIES_OF.items() if name in _ended(line)), "limits"]


def _count(kind: str, breaks: Sequence[Line]) -> int:
    """How many series of lines of this kind ended."""
    return sum(kind in _kinds_ended(line) for line in breaks)


def _until(step: int, lines: Mapping[int, Line]) -> dict[int, Line]:
    return {number: line for number, line in lines.items() if number <= step}


def _in_order(lines: Sequence[Line]) -> list[Line]:
    return sorted(lines, key=lambda line: line["step"])


RESULTS = {"train": "training rewards", "validation": "validations"}


def break_sentence(line: Line) -> str:
    """Where a break is, what it separates, and what changed."""
    results = " and ".join(RESULTS[name] for name in _ended(line))
    return (
        f"{results.capitalize()} up to iteration {line['step']} are not compared with later ones,"
        f" because the yardstick changed: {'; '.join(change_texts(line))}."
    )


def change_texts(line: Line) -> list[str]:
    """What changed at a break, in words: name, old value, new value."""
    texts = []
    for name, values in (line.get("changed") or {}).items():
        old, new = values if _is_pair(values) else ("?", values)
        texts.append(f"{printable(name)} {printable(old)} -> {printable(new)}")
    return texts


def _read_lines(path: Path) -> list[Line]:
    """All lines, except a last one cut short by a crash."""
    texts = read_bytes(path, MAX_BYTES).splitlines()
    lines = []
    for number, text in enumerate(texts, 1):
        try:
            line = json.loads(text)
            _check_line(line)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            if number == len(texts):
                break
            raise RunError(f"{path}, line {number} is damaged; fix or delete that line") from error
        lines.append(line)
    return lines


def _check_line(line: Any) -> None:
    """ValueError or another error unless it is a line of known kind, with fields of the right types."""
    for key, field_type in FIELD_TYPES.items():
        value = line.get(key)
        if not isinstance(value, field_type | None):
            raise ValueError(f"{key} is {value!r:.100}")
        if field_type is int and value is not None and not abs(value) < MAX_INTEGER:
            raise ValueError(f"{key} is too large")
    if line["kind"] not in KINDS or line["step"] is None:
        raise ValueError(f"kind {line['kind']!r:.20}, step {line['step']!r:.20}")
