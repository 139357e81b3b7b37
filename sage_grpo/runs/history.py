"""The metrics of a run folder, read back by iteration.

Shapes: N logged iterations, T denoising steps. A null in the file becomes NaN.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

# metrics under reward/ that are not scores
BATCH_STATISTICS = ("total", "std", "group_std", "failed", "starved_groups", "flat_groups", "error")
KINDS = ("run", "train", "validation")  # of line in metrics.jsonl


class RunError(ValueError):
    """Why a folder cannot be reported on, in one sentence."""


@dataclass(frozen=True)
class RunHistory:
    """The metrics of a run by iteration."""

    folder: Path
    starts: list[dict[str, Any]]  # the "run" lines: the start and each resume
    train: list[dict[str, Any]]  # one line per iteration, in order
    validations: list[dict[str, Any]]  # by iteration

    @property
    def head(self) -> dict[str, Any]:
        return self.starts[-1] if self.starts else {}

    @property
    def scores(self) -> list[str]:
        """Names of the reward's scores, such as VQ, in file order."""
        keys = dict.fromkeys(key for line in (*self.train, *self.validations) for key in line)
        names = [key.removeprefix("reward/") for key in keys if key.startswith("reward/")]
        return [name for name in names if name not in BATCH_STATISTICS and not name.endswith("_stderr")]

    @property
    def holdouts(self) -> set[str]:
        """The metrics of a reward that training never sees."""
        keys = {key for line in self.validations for key in line if key.startswith("holdout/")}
        return {key for key in keys if not key.endswith(("_stderr", "/diverged"))}

    def has(self, *keys: str) -> bool:
        """Whether any of the metrics has a value in training."""
        return any(np.isfinite(column(self.train, key)).any() for key in keys)

    def measured(self, key: str) -> bool:
        """Whether the metric has a value in training or in validation."""
        return self.has(key) or bool(np.isfinite(column(self.validations, key)).any())

    def grid(self, key: str) -> np.ndarray:
        """A metric by iteration and denoising step, (N, T); T is 0 if no line has it."""
        rows = [line.get("per_step", {}).get(key) or [] for line in self.train]
        steps = max(map(len, rows), default=0)
        return np.array([row + [None] * (steps - len(row)) for row in rows], dtype=float).reshape(len(rows), steps)


def column(lines: Sequence[Mapping[str, Any]], key: str) -> np.ndarray:
    """A metric over lines, (N,); NaN where a line lacks it."""
    return np.array([as_float(line.get(key)) for line in lines])


def as_float(value: float | None) -> float:
    return math.nan if value is None else float(value)


def read_run(folder: Path) -> RunHistory:
    path = folder / "metrics.jsonl"
    if not path.is_file():
        raise RunError(f"{folder} is not a run folder: it holds no metrics.jsonl")
    starts, kept = [], {"train": {}, "validation": {}}
    for kind, step, line in _lines(path):
        if kind == "run":  # a resume repeats iterations: later lines of an earlier start are void
            starts.append(line)
            kept = {name: {n: old for n, old in lines.items() if n <= step} for name, lines in kept.items()}
        else:
            kept[kind][step] = line
    if not (starts or kept["train"] or kept["validation"]):
        raise RunError(f"{path} holds no metrics yet")
    return RunHistory(folder, starts, list(kept["train"].values()), list(kept["validation"].values()))


def _lines(path: Path) -> list[tuple[str, int, dict[str, Any]]]:
    """Kind, step and content of each line, except a last line cut short by a crash."""
    raw, lines = path.read_bytes().splitlines(), []
    for number, text in enumerate(raw, 1):
        try:
            line = json.loads(text)
            if line["kind"] not in KINDS:
                raise ValueError(line["kind"])
            lines.append((line["kind"], line["step"], line))
        except (ValueError, KeyError, TypeError) as error:
            if number < len(raw):
                raise RunError(f"{path}, line {number} is damaged; fix or delete that line") from error
    return lines
