"""Significance of a mean, and of several means tested together; intervals of validations."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from sage_grpo.intervals import student_95
from sage_grpo.runs.history import column


def halves_95(validations: Sequence[Mapping[str, Any]], key: str) -> np.ndarray:
    """Half of the 95 % interval of a metric's mean at each validation; NaN for fewer than 3 clips."""
    counts = column(validations, "count")
    factors = [student_95(count - 1) if count > 2 else math.nan for count in counts]
    return column(validations, f"{key}_stderr") * factors


def p_value(values: Iterable[float]) -> float:
    """Two-sided p-value of a mean of 0, by Student's t over the finite values; NaN for fewer than 3."""
    finite = np.array([value for value in values if math.isfinite(value)])
    if len(finite) < 3:
        return math.nan
    mean = float(finite.mean())
    error = float(finite.std(ddof=1)) / math.sqrt(len(finite))
    if error == 0:
        return 1.0 if mean == 0 else 0.0
    return student_tails(mean / error, len(finite) - 1)


def student_tails(t: float, freedom: int, points: int = 20001) -> float:
    """The probability of |T| > |t|: with t = sqrt(freedom) tan(angle), the density is cos(angle)^(freedom - 1)."""
    angles = np.linspace(0, math.pi / 2, points)
    density = np.cos((angles[1:] + angles[:-1]) / 2) ** (freedom - 1)
    below = np.concatenate([[0.0], np.cumsum(density)])
    reached = np.interp(math.atan(abs(t) / math.sqrt(freedom)), angles, below)
    return float(1 - reached / below[-1])


def corrected(p_values: Sequence[float], asked: int) -> list[float]:
    """P-values corrected over all `asked` tests of a study; one that could not be made counts with a p-value of 1."""
    known = [1.0 if math.isnan(p) else p for p in p_values]
    return holm(known + [1.0] * (asked - len(known)))[: len(known)]


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values corrected for multiple testing (Holm 1979); NaN is not a test and stays NaN."""
    tests = sorted((p, i) for i, p in enumerate(p_values) if math.isfinite(p))
    adjusted = [math.nan] * len(p_values)
    largest = 0.0
    for place, (p, i) in enumerate(tests):
        largest = max(largest, min(1.0, (len(tests) - place) * p))
        adjusted[i] = largest
    return adjusted
