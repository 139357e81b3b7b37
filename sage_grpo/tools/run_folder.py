"""The metrics of a run folder, read back by iteration.

Shapes: N iterations that left a line, T denoising steps. A null in the file is a NaN here.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

BATCH_STATISTICS = ("total", "std", "group_std", "failed", "starved_groups", "flat_groups")  # of reward/: not scores


class RunError(ValueError):
    """A folder that cannot be reported on, in one sentence."""


@dataclass(frozen=True)
class Run:
    folder: Path
    starts: list[dict[str, Any]]  # the "run" lines: the start and each resume
    train: list[dict[str, Any]]  # one line per iteration, in order
    validations: list[dict[str, Any]]  # in order of their iteration

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def head(self) -> dict[str, Any]:
        return self.starts[-1] if self.starts else {}

    @property
    def scores(self) -> list[str]:
        """Names of the reward's own scores, such as VQ, in the order of the file."""
        keys = dict.fromkeys(key for line in (*self.train, *self.validations) for key in line)
        names = [key.removeprefix("reward/") for key in keys if key.startswith("reward/")]
        return [name for name in names if name not in BATCH_STATISTICS and not name.endswith("_stderr")]

    def has(self, *keys: str) -> bool:
        """Whether any of the metrics has a value in training."""
        return any(np.isfinite(column(self.train, key)).any() for key in keys)

    def measured(self, key: str) -> bool:
        """Whether the metric has a value in training or in validation."""
        return self.has(key) or bool(np.isfinite(column(self.validations, key)).any())

    def grid(self, key: str) -> np.ndarray:
        """A metric by iteration and denoising step, (N, T); T is 0 where no line has it."""
        rows = [line.get("per_step", {}).get(key) or [] for line in self.train]
        grid = np.full((len(rows), max(map(len, rows), default=0)), np.nan)
        for values, row in zip(grid, rows, strict=True):
            values[: len(row)] = [as_float(value) for value in row]
        return grid


def as_float(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else math.nan


def column(lines: Sequence[Mapping[str, Any]], key: str) -> np.ndarray:
    """A metric over lines, (N,), NaN where a line lacks it."""
    return np.array([as_float(line.get(key)) for line in lines])


def read_run(folder: Path) -> Run:
    path = folder / "metrics.jsonl"
    if not path.is_file():
        raise RunError(f"{folder} is no run folder: it holds no metrics.jsonl")
    starts: list[dict[str, Any]] = []
    train: dict[int, dict[str, Any]] = {}
    validations: dict[int, dict[str, Any]] = {}
    for line in _lines(path):
        if line["kind"] == "run":
            starts.append(line)
        elif line["kind"] == "train":  # a resume repeats iterations: what an earlier start wrote from here on is void
            _drop(train, line["step"])
            _drop(validations, line["step"] + 1)
            train[line["step"]] = line
        elif line["kind"] == "validation":
            _drop(validations, line["step"])
            validations[line["step"]] = line
    if not (starts or train or validations):
        raise RunError(f"{path} holds no metrics yet")
    return Run(folder, starts, list(train.values()), list(validations.values()))


def _lines(path: Path) -> list[dict[str, Any]]:
    """All lines but a last one that a crash cut short."""
    raw = path.read_bytes().splitlines()
    lines = []
    for number, text in enumerate(raw, 1):
        try:
            line = json.loads(text)
            if not isinstance(line["step"], int) or not isinstance(line["kind"], str):
                raise ValueError("a line needs a kind and a step")
        except (ValueError, KeyError, TypeError) as error:
            if number == len(raw):
                break
            raise RunError(f"{path}, line {number} is damaged ({error}); mend or delete that line") from error
        lines.append(line)
    return lines


def _drop(lines: dict[int, Any], step: int) -> None:
    """Forget lines from `step` on; the dictionary is in order of steps."""
    while lines and next(reversed(lines)) >= step:
        lines.popitem()
