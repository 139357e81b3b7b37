"""Shares with 95 % intervals that respect ties, prompts and raters; agreement; how many more prompts would decide.

An answer is 1, 0, or 1/2 for a tie. Answers about one prompt are alike, and so are those of one rater: treating them as
independent makes intervals too narrow. The variance of a share is therefore estimated between clusters (Liang and
Zeger, 1986): prompts, and with at least MANY_RATERS also raters, in both directions at once (Cameron, Gelbach and
Miller, 2011). With fewer raters their spread cannot be estimated, and the interval is about these raters. The interval
itself is Wilson's with the number of independent answers that has this variance, and with Student's quantile for the
number of clusters (of two variances: by Satterthwaite, 1946). It stays inside 0 to 1 and has a width even if all
answers, or the means of all prompts, agree. tests/tools/prefer/test_statistics.py holds its coverage against
simulations.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from sage_grpo.intervals import student_95

MANY_RATERS = 8  # this many or more count as a sample of all raters
Z_POWER = 0.8416  # normal quantile of 80 % power
MAX_PAIRS = 1_000_000  # beyond it, the comparison counts as undecidable
ROUNDING = 1e-12  # variances of a mean below this are rounding errors of 0


@dataclass(frozen=True)
class Share:
    """A mean of answers between 0 and 1 with its 95 % interval; NaN without answers."""

    mean: float
    low: float
    high: float
    count: int  # answers
    clusters: int  # independent groups behind them: prompts, or raters if these are fewer

    @property
    def decided(self) -> bool:
        """Whether the interval excludes 1/2."""
        return self.low > 0.5 or self.high < 0.5


def share(
    values: Sequence[float], prompts: Sequence[Hashable], raters: Sequence[Hashable] = ()
) -> Share:
    """Mean of values in [0, 1] with its interval; one prompt, and one rater if given, for each value."""
    x = np.asarray(values, dtype=float)
    if not len(x):
        return Share(math.nan, math.nan, math.nan, 0, 0)
    mean = float(x.mean())
    by_prompt = _numbered(prompts)
    by_rater = _numbered(raters) if len(raters) else np.zeros(len(x), dtype=int)
    clusters = _num_clusters(by_prompt, by_rater)
    if clusters < 2:
        return Share(mean, 0.0, 1.0, len(x), clusters)

    variance, freedom = _variance(x - mean, by_prompt, by_rater)
    # how many independent answers, none of them ties, have this variance
    effective = float(clusters)
    if variance > ROUNDING and 0 < mean < 1:
        effective = mean * (1 - mean) / variance
    low, high = _wilson(mean, effective, student_95(freedom))
    return Share(mean, low, high, len(x), clusters)


def _numbered(labels: Sequence[Hashable]) -> np.ndarray:
    """Whole numbers from 0 that stand for the labels."""
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(label, len(numbers)) for label in labels])


def _num_clusters(prompts: np.ndarray, raters: np.ndarray) -> int:
    num_prompts = int(prompts.max()) + 1
    num_raters = int(raters.max()) + 1
    return num_prompts if num_raters < MANY_RATERS else min(num_prompts, num_raters)


def _variance(
    residuals: np.ndarray, prompts: np.ndarray, raters: np.ndarray
) -> tuple[float, float]:
    """Variance of a mean from its residuals (N,), and the degrees of freedom of that variance."""
    prompt_freedom = int(prompts.max())
    num_raters = int(raters.max()) + 1
    between_prompts = _between(residuals, prompts)
    if num_raters < MANY_RATERS:
        return between_prompts, prompt_freedom

    between_raters = _between(residuals, raters)
    within_both = _between(residuals, prompts * num_raters + raters)
    both = between_prompts + between_raters - within_both
    spread = between_prompts**2 / prompt_freedom + between_raters**2 / (num_raters - 1)
    freedom = (between_prompts + between_raters) ** 2 / spread if spread else prompt_freedom
    return max(both, between_prompts, between_raters), freedom


def _between(residuals: np.ndarray, clusters: np.ndarray) -> float:
    """Cluster-robust variance of a mean: of the sums of residuals in each cluster."""
    sums = np.bincount(clusters, residuals)
    count = len(np.unique(clusters))
    if count < 2:
        return 0.0
    return float(count / (count - 1) * np.square(sums).sum() / len(residuals) ** 2)


def _wilson(mean: float, count: float, quantile: float) -> tuple[float, float]:
    """Wilson's interval of a share of `count` answers."""
    squared = quantile**2 / count
    center = (mean + squared / 2) / (1 + squared)
    half = math.sqrt(squared * mean * (1 - mean) + squared**2 / 4) / (1 + squared)
    return max(0.0, center - half), min(1.0, center + half)


# how many pairs


def more_prompts(result: Share, prompts: int) -> int | None:
    """Prompts beyond those asked that decide a share which stays as it is, with 80 % power; None: no number does.

    0 if it is decided already. The variance falls with the number of prompts, if each gets as many answers as now; more
    answers about the same prompts would repeat what is known of them. From MANY_RATERS on, raters must grow likewise.
    """
    if result.decided:
        return 0
    distance = abs(result.mean - 0.5)
    if not result.count or distance == 0:
        return None
    standard_error = (result.high - result.low) / 2 / 1.96
    factor = ((1.96 + Z_POWER) * standard_error / distance) ** 2
    return math.ceil(prompts * factor) - prompts if result.count * factor < MAX_PAIRS else None


def pairs_for(win_rate: float, ties: float = 0.0) -> int:
    """Independent answers that show a true win rate (ties count half) with 80 % power; ties: their share."""
    distance = win_rate - 0.5
    if not 0 <= ties < 1 or not 0 < abs(distance) <= (1 - ties) / 2:
        raise ValueError(f"a win rate of {win_rate:g} with {ties:.0%} ties cannot be told from 1/2")
    deviation_equal = math.sqrt((1 - ties) / 4)
    deviation_true = math.sqrt(max(0.0, (1 - ties) / 4 - distance**2))
    return math.ceil(((1.96 * deviation_equal + Z_POWER * deviation_true) / distance) ** 2)


# agreement


def krippendorff(units: Sequence[Sequence[float]]) -> float:
    """Krippendorff's alpha, interval metric: 1 for full agreement, 0 for that of chance; NaN if there is no overlap.

    units: for each pair, the outcomes (1, 1/2, 0) that different raters gave; a tie is halfway between the others.
    """
    shared = [np.asarray(unit, dtype=float) for unit in units if len(unit) > 1]
    if not shared:
        return math.nan
    values = np.concatenate(shared)
    observed = sum(_disagreement(unit) / (len(unit) - 1) for unit in shared) / len(values)
    expected = _disagreement(values) / (len(values) * (len(values) - 1))
    return 1 - observed / expected if expected else math.nan


def _disagreement(values: np.ndarray) -> float:
    """Sum of squared differences over all ordered pairs of values."""
    return float(2 * (len(values) * np.square(values).sum() - values.sum() ** 2))
