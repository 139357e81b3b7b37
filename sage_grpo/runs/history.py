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

from sage_grpo.config.fields import ConfigError

# metrics under reward/ that are not scores
BATCH_STATISTICS = ("total", "std", "group_std", "failed", "starved_groups", "flat_groups", "error")
KINDS = ("run", "train", "validation")  # of line in metrics.jsonl
FIELDS = dict.fromkeys(("time", "device", "world"), str) | dict.fromkeys(
    ("step", "ranks", "trainable_parameters"), int
)
FIELDS |= dict.fromkeys(("versions", "perfect", "vae_floor", "schedule", "per_step"), dict)
LARGEST_STEP, LARGEST = (
    2**53,
    1e100,
)  # beyond LARGEST a value is shown as missing: axes and squares would overflow


class RunError(ConfigError):
    """Why a folder cannot be reported on, in one sentence."""


@dataclass(frozen=True)
class RunHistory:
    folder: Path
    starts: list[dict[str, Any]]  # the "run" lines: the start and each resume
    train: list[dict[str, Any]]  # one line per iteration, in order
    validations: list[dict[str, Any]]  # by iteration

    @property
    def head(self) -> dict[str, Any]:
        return self.starts[-1] if self.starts else {}

    @property
    def iterations(self) -> int:
        return self.train[-1]["step"] if self.train else 0

    @property
    def scores(self) -> list[str]:
        """Names of the reward's scores, such as VQ, in file order."""
        keys = dict.fromkeys(key for line in (*self.train, *self.validations) for key in line)
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
        return bool(np.isfinite(column(self.train, key)).any())

    def measured(self, key: str) -> bool:
        """Whether the metric has a value in training or in validation."""
        return self.has(key) or bool(np.isfinite(column(self.validations, key)).any())

    def grid(self, key: str) -> np.ndarray:
        """A metric by iteration and denoising step, (N, T); T is 0 if no line has it."""
        rows = [numbers((line.get("per_step") or {}).get(key), key) for line in self.train]
        steps = max(map(len, rows), default=0)
        return np.array([[*row, *[math.nan] * (steps - len(row))] for row in rows]).reshape(
            len(rows), steps
        )


def column(lines: Sequence[Mapping[str, Any]], key: str) -> np.ndarray:
    """A metric over lines, (N,); NaN where a line lacks it."""
    return np.array([as_float(line.get(key), key) for line in lines])


def numbers(values: Any, name: str) -> list[float]:
    """A list of numbers from a file; nothing stands for an empty one."""
    if not isinstance(values or [], list):
        raise RunError(f"{name} is {values!r:.100}; a list of numbers is expected")
    return [as_float(value, name) for value in values or ()]


def as_float(value: Any, name: str = "a metric") -> float:
    """A number from a file; NaN for null and for what is too large to be shown."""
    if value is not None and not isinstance(value, (int, float)):
        raise RunError(f"{name} is {value!r:.100}; a number is expected")
    return math.nan if value is None or not abs(value) < LARGEST else float(value)


def read_run(folder: Path) -> RunHistory:
    path = folder / "metrics.jsonl"
    if not path.is_file():
        raise RunError(f"{folder} is not a run folder: it holds no metrics.jsonl")
    starts, kept = [], {"train": {}, "validation": {}}
    for kind, step, line in _lines(path):
        if kind == "run":  # a resume repeats iterations: later lines of an earlier start are void
            starts.append(line)
            kept = {
                name: {n: old for n, old in lines.items() if n <= step}
                for name, lines in kept.items()
            }
        else:
            kept[kind][step] = line
    if not (starts or kept["train"] or kept["validation"]):
        raise RunError(f"{path} holds no metrics yet")
    return RunHistory(
        folder, starts, list(kept["train"].values()), list(kept["validation"].values())
    )


def _lines(path: Path) -> list[tuple[str, int, dict[str, Any]]]:
    """Kind, step and content of each line, except a last line cut short by a crash."""
    raw, lines = path.read_bytes().splitlines(), []
    for number, text in enumerate(raw, 1):
        try:
            line = json.loads(text)
            wrong = [
                key for key, kind in FIELDS.items() if not isinstance(line.get(key), kind | None)
            ]
            if wrong or line["kind"] not in KINDS or not abs(line["step"]) < LARGEST_STEP:
                raise ValueError(wrong)
            lines.append((line["kind"], line["step"], line))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            if number < len(raw):
                raise RunError(
                    f"{path}, line {number} is damaged; fix or delete that line"
                ) from error
    return lines
