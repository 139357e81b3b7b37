"""Means over a few clips or runs, with confidence intervals."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

# Two-sided 95 % quantiles of Student's t by degrees of freedom; between them they are almost linear in 1 / freedom.
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

MIN_PAIRS = 8  # pairs that a verdict takes


@dataclass(frozen=True)
class Interval:
    """A mean with its 95 % interval, mean +- half; `half` is NaN for fewer than 3 values, which say too little."""

    mean: float
    half: float
    count: int = field(default=0, compare=False)  # values behind it

    @property
    def sign(self) -> int:
        """+1 or -1 if the interval excludes 0, else 0."""
        excludes_zero = abs(self.mean) > self.half
        return int(np.sign(self.mean)) if excludes_zero else 0


def interval(values: Iterable[float]) -> Interval:
    """Mean and interval of the finite values; the mean of none is NaN."""
    finite = np.array([value for value in values if math.isfinite(value)])
    count = len(finite)
    mean = float(finite.mean()) if count else math.nan
    half = math.nan
    if count > 2:
        half = student_95(count - 1) * float(finite.std(ddof=1)) / math.sqrt(count)
    return Interval(mean, half, count)


def student_95(freedom: float) -> float:
    """Two-sided 95 % quantile of Student's t with `freedom` degrees of freedom."""
    inverses = [1 / known for known in STUDENT_95]
    return float(np.interp(1 / freedom, inverses, list(STUDENT_95.values())))
