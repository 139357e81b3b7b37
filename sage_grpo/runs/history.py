"""The metrics of a run folder, read back by iteration.

Shapes: N logged iterations, T denoising steps. A null in the file becomes NaN.
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

Line = dict[str, Any]  # of metrics.jsonl: kind, step, metrics

# metrics under reward/ that are not scores
BATCH_STATISTICS = (
    "total",
    "std",
    "group_std",
    "advantage_size",
    "failed",
    "starved_groups",
    "flat_groups",
    "error",
)
KINDS = ("run", "train", "reward", "validation")  # of line
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
}
LARGEST_INTEGER = 2**53  # beyond it floats skip integers, and far beyond it they overflow
MOST_BYTES = 1 << 32  # of metrics.jsonl
MOST_TEXT = 1 << 24  # bytes of a text file
LARGEST = 1e100  # beyond it a value is shown as missing: axes and squares would overflow


class RunError(ConfigError):
    """Why a folder cannot be reported on, in one sentence."""


@dataclass(frozen=True)
class RunHistory:
    folder: Path
    starts: list[Line]  # the "run" lines: the start and each resume
    train: list[Line]  # one line per logged iteration, in order
    validations: list[Line]  # by iteration
    # iterations of which only the reward was kept
    unlogged: list[Line] = field(default_factory=list)

    @property
    def head(self) -> Line:
        """The line of the last start."""
        return self.starts[-1] if self.starts else {}

    @cached_property
    def rewards(self) -> list[Line]:
        """A line per iteration, in order: all have the metrics of the reward, some have all others too."""
        return sorted([*self.train, *self.unlogged], key=lambda line: line["step"])

    @property
    def iterations(self) -> int:
        return self.rewards[-1]["step"] if self.rewards else 0

    @property
    def scores(self) -> list[str]:
        """Names of the reward's scores, such as VQ, in file order."""
        keys = dict.fromkeys(key for line in (*self.rewards, *self.validations) for key in line)
        names = [key.removeprefix("reward/") for key in keys if key.startswith("reward/")]
        return [
            name for name in names if name not in BATCH_STATISTICS and not name.endswith("_stderr")
        ]

    @property
    def holdouts(self) -> set[str]:
        """The metrics of a reward that training never sees."""
        keys = {key for line in self.validations for key in line if key.startswith("holdout/")}
        return {key for key in keys if not key.endswith(("_stderr", "/diverged"))}

    def has(self, key: str) -> bool:
        """Whether the metric has a value in training."""
        return bool(np.isfinite(column(self.rewards, key)).any())

    def measured(self, key: str) -> bool:
        """Whether the metric has a value in training or in validation."""
        return self.has(key) or bool(np.isfinite(column(self.validations, key)).any())

    def grid(self, key: str) -> np.ndarray:
        """A metric by iteration and denoising step, (N, T); T is 0 if no line has it."""
        rows = [numbers((line.get("per_step") or {}).get(key), key) for line in self.train]
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
    return float(value) if abs(value) < LARGEST else math.nan


def text_of(file: Path) -> str:
    """A text file of a run folder; empty if it is missing."""
    if not file.is_file():
        return ""
    return read_bytes(file, MOST_TEXT).decode(errors="replace")


@contextmanager
def about(*folders: Path) -> Iterator[None]:
    """Context of work on run folders: an error that numbers in them cause names the folders."""
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
    by_step: dict[str, dict[int, Line]] = {"train": {}, "reward": {}, "validation": {}}
    for line in _read_lines(path):
        kind, step = line["kind"], line["step"]
        if kind != "run":
            by_step[kind][step] = line
            continue
        starts.append(line)
        # a resume repeats iterations: what an earlier start wrote after this one is void
        for name, lines in by_step.items():
            by_step[name] = {n: earlier for n, earlier in lines.items() if n <= step}

    train = list(by_step["train"].values())
    unlogged = list(by_step["reward"].values())
    validations = list(by_step["validation"].values())
    if not (starts or train or unlogged or validations):
        raise RunError(f"{path} holds no metrics yet")
    return RunHistory(folder, starts, train, validations, unlogged)


def _read_lines(path: Path) -> list[Line]:
    """All lines, except a last one cut short by a crash."""
    texts = read_bytes(path, MOST_BYTES).splitlines()
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
        if field_type is int and value is not None and not abs(value) < LARGEST_INTEGER:
            raise ValueError(f"{key} is too large")
    if line["kind"] not in KINDS or line["step"] is None:
        raise ValueError(f"kind {line['kind']!r:.20}, step {line['step']!r:.20}")
