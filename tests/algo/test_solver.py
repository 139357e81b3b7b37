"""The ODE solvers against closed forms: order of convergence, and DPM-Solver++ as its authors write it."""

from itertools import pairwise

import pytest
import torch

from sage_grpo.algo.sde import flow_sigmas
from sage_grpo.algo.solver import ode_tables

STD = 0.3


def velocity(x, sigma):
    """E[z - x0 | x] for data from N(0.5, STD^2)."""
    variance = (1 - sigma) ** 2 * STD**2 + sigma**2
    rest = x - (1 - sigma) * 0.5
    return (sigma - (1 - sigma) * STD**2) / variance * rest - 0.5


def exact(x, sigma):
    """Where the ODE ends: quantiles are kept."""
    return 0.5 + STD * (x - (1 - sigma) * 0.5) / ((1 - sigma) ** 2 * STD**2 + sigma**2) ** 0.5


def solve(sigmas, x, solver):
    delta, factor = ode_tables(sigmas, solver)
    before = torch.zeros_like(x)
    for i in range(len(delta)):
        v = velocity(x, sigmas[i])
        clean = x - sigmas[i] * v
        x = x - delta[i] * v + factor[i] * (clean - before)
        before = clean
    return x


@pytest.mark.parametrize("solver, order", [("euler", 1), ("dpm", 2)])
def test_errors_fall_with_the_order_of_the_solver(solver, order):
    """Over equal steps of the log-SNR between two finite ones, where both are derived."""
    x = torch.linspace(-2, 2, 9, dtype=torch.float64)
    errors = []
    for n in (40, 80, 160):
        sigmas = torch.sigmoid(torch.linspace(2.5, -2.5, n + 1, dtype=torch.float64))
        end = exact(solve(sigmas, x, solver), sigmas[-1])
        errors.append((end - exact(x, sigmas[0])).abs().max())
    for coarse, fine in pairwise(errors):
        assert 2 ** (order - 0.2) < coarse / fine < 2 ** (order + 0.2)


def test_second_order_is_nearer_than_euler_from_noise_to_data():
    x = torch.linspace(-2, 2, 9, dtype=torch.float64)
    for steps, share in ((20, 0.6), (40, 0.2)):
        second, euler = (
            (solve(flow_sigmas(steps, 3.0), x, name) - exact(x, 1.0)).abs().max()
            for name in ("dpm", "euler")
        )
        assert second < share * euler


def test_it_is_the_published_update():
    """x_t = sigma_t/sigma_s x_s - alpha_t (exp(-h) - 1) D with D = (1 + 1/2r) x0_s - 1/2r x0_before."""
    sigmas = torch.tensor([0.9, 0.7, 0.4, 0.1, 0.0], dtype=torch.float64)
    x = torch.tensor([0.3, -1.2], dtype=torch.float64)
    lam = ((1 - sigmas) / sigmas).log()
    solution = solve(sigmas, x, "dpm")

    before = None
    for s in range(4):
        clean = x - sigmas[s] * velocity(x, sigmas[s])
        h = lam[s + 1] - lam[s]
        guess = clean
        if 0 < s < 3:
            r = (lam[s] - lam[s - 1]) / h
            guess = (1 + 1 / (2 * r)) * clean - 1 / (2 * r) * before
        x = sigmas[s + 1] / sigmas[s] * x - (1 - sigmas[s + 1]) * torch.expm1(-h) * guess
        before = clean
    torch.testing.assert_close(solution, x)


def test_repeated_levels_and_the_ends_are_euler():
    sigmas = torch.tensor([[1.0, 0.8, 0.5, 0.5, 0.5], [0.7, 0.4, 0.0, 0.0, 0.0]])
    delta, factor = ode_tables(sigmas, "dpm")
    assert delta.isfinite().all() and factor.isfinite().all()
    assert delta[0, 2:].tolist() == [0, 0] and delta[1, 2:].tolist() == [0, 0]
    # after sigma 1, and to sigma 0
    assert factor[0, 0] == factor[0, 1] == factor[1, 0] == factor[1, 1] == 0
    assert ode_tables(sigmas)[1].abs().max() == 0
    with pytest.raises(ValueError, match="solver is 'heun'; choose one of euler, dpm"):
        ode_tables(sigmas, "heun")


def test_levels_from_the_middle_continue_the_schedule():
    whole = flow_sigmas(20, 5.0)
    torch.testing.assert_close(flow_sigmas(12, 5.0, whole[8].item()), whole[8:])
    torch.testing.assert_close(flow_sigmas(4, 5.0, whole[8].item()), whole[8::3])
