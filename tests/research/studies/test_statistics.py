"""P-values against tables of Student's t, and their correction computed by hand."""

import math

import pytest

from research.studies.statistics import holm, p_value, student_tails
from sage_grpo.intervals import STUDENT_95


@pytest.mark.parametrize("freedom", [freedom for freedom in STUDENT_95 if math.isfinite(freedom)])
def test_tails_beyond_the_tabled_quantiles(freedom):
    assert student_tails(STUDENT_95[freedom], freedom) == pytest.approx(
        0.05, abs=6e-5
    )  # the table has three decimals
    assert student_tails(-STUDENT_95[freedom], freedom) == student_tails(
        STUDENT_95[freedom], freedom
    )


def test_p_values_by_hand():
    """Two degrees of freedom have a closed form: 1 - t / sqrt(2 + t^2)."""
    t = 2.0 / (1 / math.sqrt(3))
    assert p_value([1.0, 2.0, 3.0, math.nan]) == pytest.approx(
        1 - t / math.sqrt(2 + t * t), rel=1e-6
    )
    assert (
        math.isnan(p_value([1.0, 2.0]))
        and p_value([1.0, 1.0, 1.0]) == 0
        and p_value([0.0, 0.0, 0.0]) == 1
    )


def test_holm_by_hand():
    """The smallest counts for all three questions, the next for two; none becomes smaller than the one before it."""
    assert holm([0.03, math.nan, 0.01, 0.02])[2] == pytest.approx(0.03)
    found = holm([0.03, math.nan, 0.01, 0.02])
    assert [found[0], found[3]] == pytest.approx([0.04, 0.04]) and math.isnan(found[1])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
