"""Means over a few clips or runs, with confidence intervals."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

# two-sided 95 % quantiles of Student's t, by degrees of freedom; between them it is almost linear in 1 / freedom
STUDENT_95 = {
    math.inf: 1.960,
    30: 2.042,
    15: 2.131,
    10: 2.228,
    7: 2.365,
    5: 2.571,
    4: 2.776,
    3: 3.182,
    2: 4.303,
}

FEWEST = 8  # pairs below which there is no verdict


@dataclass(frozen=True)
class Interval:
    """A mean with its 95 % interval of +- `half`, which is NaN for fewer than 3 values: too few to be informative."""

    mean: float
    half: float
    count: int = field(default=0, compare=False)  # values behind it

    @property
    def sign(self) -> int:
        """+1 or -1 if the interval excludes 0, else 0."""
        return int(np.sign(self.mean)) if abs(self.mean) > self.half else 0


def interval(values: Iterable[float]) -> Interval:
    """Mean and interval of the finite values; the mean of none is NaN."""
    found = np.array([value for value in values if math.isfinite(value)])
    count, mean = len(found), float(found.mean()) if len(found) else math.nan
    half = (
        student_95(count - 1) * float(found.std(ddof=1)) / math.sqrt(count)
        if count > 2
        else math.nan
    )
    return Interval(mean, half, count)


def student_95(freedom: int) -> float:
    return float(
        np.interp(1 / freedom, [1 / known for known in STUDENT_95], list(STUDENT_95.values()))
    )
