"""Intervals against the tables of Student's t."""

import math

import pytest

from sage_grpo.intervals import STUDENT_95, Interval, holm, interval, p_value, student_95, student_tails


@pytest.mark.parametrize(("freedom", "quantile"), [(2, 4.303), (6, 2.447), (13, 2.160), (20, 2.086), (63, 1.998)])
def test_student(freedom, quantile):
    assert student_95(freedom) == pytest.approx(quantile, rel=0.003)


def test_by_hand():
    found = interval([1.0, 2.0, math.nan, 3.0, 4.0])
    assert found.mean == 2.5 and found.half == pytest.approx(3.182 * math.sqrt(5 / 3) / 2, rel=0.01)


def test_two_values_have_no_interval_and_none_no_mean():
    assert interval([1.0, 3.0]).mean == 2 and math.isnan(interval([1.0, 3.0]).half)
    assert math.isnan(interval([math.nan]).mean)


@pytest.mark.parametrize(
    ("mean", "half", "sign"), [(1, 0.9, 1), (-1, 0.9, -1), (1, 1.1, 0), (1, math.nan, 0), (0, 0, 0)]
)
def test_what_counts_as_a_change(mean, half, sign):
    assert Interval(mean, half).sign == sign


@pytest.mark.parametrize("freedom", [freedom for freedom in STUDENT_95 if math.isfinite(freedom)])
def test_tails_beyond_the_tabled_quantiles(freedom):
    assert student_tails(STUDENT_95[freedom], freedom) == pytest.approx(0.05, abs=6e-5)  # the table has three decimals
    assert student_tails(-STUDENT_95[freedom], freedom) == student_tails(STUDENT_95[freedom], freedom)


def test_p_values_by_hand():
    """Two degrees of freedom have a closed form: 1 - t / sqrt(2 + t^2)."""
    t = 2.0 / (1 / math.sqrt(3))
    assert p_value([1.0, 2.0, 3.0, math.nan]) == pytest.approx(1 - t / math.sqrt(2 + t * t), rel=1e-6)
    assert math.isnan(p_value([1.0, 2.0])) and p_value([1.0, 1.0, 1.0]) == 0 and p_value([0.0, 0.0, 0.0]) == 1


def test_holm_by_hand():
    """The smallest counts for all three questions, the next for two; none becomes smaller than the one before it."""
    assert holm([0.03, math.nan, 0.01, 0.02])[2] == pytest.approx(0.03)
    found = holm([0.03, math.nan, 0.01, 0.02])
    assert [found[0], found[3]] == pytest.approx([0.04, 0.04]) and math.isnan(found[1])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
