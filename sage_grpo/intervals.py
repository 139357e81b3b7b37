"""Means of a few clips or runs with an interval that says how much they can be trusted."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

# two-sided 95 % quantiles of Student's t, by degrees of freedom; between them it is almost linear in 1 / freedom
STUDENT_95 = {math.inf: 1.960, 30: 2.042, 15: 2.131, 10: 2.228, 7: 2.365, 5: 2.571, 4: 2.776, 3: 3.182, 2: 4.303}


@dataclass(frozen=True)
class Interval:
    """A mean with its 95 % interval of +- `half`, which is NaN for fewer than 3 values: it would say nothing."""

    mean: float
    half: float

    @property
    def sign(self) -> int:
        """+1 or -1 where the interval leaves out 0, else 0."""
        return int(np.sign(self.mean)) if abs(self.mean) > self.half else 0


def interval(values: Iterable[float]) -> Interval:
    """Over the finite values; the mean of none is NaN."""
    found = np.array([value for value in values if math.isfinite(value)])
    if len(found) < 3:
        return Interval(float(found.mean()) if len(found) else math.nan, math.nan)
    half = student_95(len(found) - 1) * float(found.std(ddof=1)) / math.sqrt(len(found))
    return Interval(float(found.mean()), half)


def student_95(freedom: int) -> float:
    return float(np.interp(1 / freedom, [1 / known for known in STUDENT_95], list(STUDENT_95.values())))


def p_value(values: Iterable[float]) -> float:
    """Two-sided, of a mean of 0, by Student's t over the finite values; NaN for fewer than 3."""
    found = np.array([value for value in values if math.isfinite(value)])
    if len(found) < 3:
        return math.nan
    error = float(found.std(ddof=1)) / math.sqrt(len(found))
    if error == 0:
        return 1.0 if found.mean() == 0 else 0.0
    return student_tails(float(found.mean()) / error, len(found) - 1)


def student_tails(t: float, freedom: int, points: int = 20001) -> float:
    """The probability of |T| > |t|: with t = sqrt(freedom) tan(angle), the density is cos(angle)^(freedom - 1)."""
    angles = np.linspace(0, math.pi / 2, points)
    below = np.concatenate([[0.0], np.cumsum(np.cos((angles[1:] + angles[:-1]) / 2) ** (freedom - 1))])
    reached = np.interp(math.atan(abs(t) / math.sqrt(freedom)), angles, below)
    return float(1 - reached / below[-1])


def holm(p_values: Sequence[float]) -> list[float]:
    """The same for several questions asked together (Holm 1979); a NaN is no question and stays one."""
    asked = sorted((p, i) for i, p in enumerate(p_values) if math.isfinite(p))
    adjusted, largest = [math.nan] * len(p_values), 0.0
    for place, (p, i) in enumerate(asked):
        largest = max(largest, min(1.0, (len(asked) - place) * p))
        adjusted[i] = largest
    return adjusted
