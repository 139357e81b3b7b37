"""Intervals against tables of Student's t."""

import math

import pytest

from sage_grpo.intervals import Interval, interval, student_95


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(2, 4.303), (6, 2.447), (13, 2.160), (20, 2.086), (63, 1.998)]
)
def test_student(freedom, quantile):
    assert student_95(freedom) == pytest.approx(quantile, rel=0.003)


def test_by_hand():
    computed = interval([1.0, 2.0, math.nan, 3.0, 4.0])
    assert computed.count == 4
    assert computed.mean == 2.5
    assert computed.half == pytest.approx(3.182 * math.sqrt(5 / 3) / 2, rel=0.01)


def test_two_values_have_no_interval_and_none_no_mean():
    two = interval([1.0, 3.0])
    assert two.mean == 2
    assert math.isnan(two.half)
    assert math.isnan(interval([math.nan]).mean)


@pytest.mark.parametrize(
    ("mean", "half", "sign"), [(1, 0.9, 1), (-1, 0.9, -1), (1, 1.1, 0), (1, math.nan, 0), (0, 0, 0)]
)
def test_what_counts_as_a_change(mean, half, sign):
    assert Interval(mean, half).sign == sign
