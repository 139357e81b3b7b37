"""Bradley-Terry with ties against its definition."""

import pytest
import torch

from sage_grpo.algo.preference import THETA, outcome_probabilities, tie_losses


@pytest.mark.parametrize("theta", [1.5, THETA])
def test_probabilities_are_those_of_rao_and_kupper(theta):
    a = torch.linspace(-3, 3, 7, dtype=torch.float64)
    b = torch.tensor(0.4, dtype=torch.float64)
    ea, eb = a.exp(), b.exp()
    expected = torch.stack(
        [
            ea / (ea + theta * eb),
            (theta**2 - 1) * ea * eb / ((ea + theta * eb) * (theta * ea + eb)),
            eb / (theta * ea + eb),
        ],
        -1,
    )
    probabilities = outcome_probabilities(a - b, theta)
    torch.testing.assert_close(probabilities, expected)
    torch.testing.assert_close(probabilities.sum(-1), torch.ones(7, dtype=torch.float64))
    for column, label in enumerate((1, 0, -1)):
        losses = tie_losses(a - b, torch.full((7,), label), theta)
        torch.testing.assert_close(losses, -expected[:, column].log())


def test_extreme_differences_are_finite():
    difference = torch.tensor([-1e4, 1e4])
    for label in (1, 0, -1):
        assert tie_losses(difference, torch.full((2,), label)).isfinite().all()
