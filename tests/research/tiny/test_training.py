"""The learning rate of the embedded model's training."""

import pytest

from research.tiny.training import warm_cosine


@pytest.mark.parametrize("steps", [3, 20, 21, 200])
def test_the_learning_rate_rises_and_falls_whatever_the_number_of_steps(steps):
    rates = [warm_cosine(step, steps) for step in range(steps)]
    assert max(rates) <= 1 and rates[-1] < max(rates) and (steps < 40 or rates[0] < max(rates))
    assert steps < 200 or rates[-1] < 0.03
