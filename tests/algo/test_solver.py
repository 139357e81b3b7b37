"""The ODE solvers against closed forms and diffusers' schedulers: order of convergence, and the published updates."""

from itertools import pairwise

import pytest
import torch
from diffusers import DPMSolverMultistepScheduler, UniPCMultistepScheduler

from sage_grpo.algo.sde import flow_sigmas
from sage_grpo.algo.solver import SOLVERS, ode_tables
from sage_grpo.models.backbone import Guidance
from sage_grpo.models.sample import integrate

STD = 0.3


def velocity(x, sigma):
    """E[z - x0 | x] for data from N(0.5, STD^2)."""
    variance = (1 - sigma) ** 2 * STD**2 + sigma**2
    rest = x - (1 - sigma) * 0.5
    return (sigma - (1 - sigma) * STD**2) / variance * rest - 0.5


def exact(x, sigma):
    """Where the ODE ends: quantiles are kept."""
    return 0.5 + STD * (x - (1 - sigma) * 0.5) / ((1 - sigma) ** 2 * STD**2 + sigma**2) ** 0.5


class KnownVelocity:
    """A backbone whose ODE has a closed form; it works in fp64."""

    def velocity(self, x, sigma, cond, guidance):
        return velocity(x, sigma.double().view(-1, 1))


def solve(sigmas, x, solver):
    """By the code that samples clips, in which numbers of a step are fp32."""
    return integrate(KnownVelocity(), sigmas, x[:, None], None, Guidance(), solver)[:, 0]


@pytest.mark.parametrize("solver, order", [("euler", 1), ("dpm", 2), ("dpm3", 3), ("unipc", 3)])
def test_errors_fall_with_the_order_of_the_solver(solver, order):
    """Over equal steps of the log-SNR between two finite ones, where both are derived."""
    x = torch.linspace(-2, 2, 9, dtype=torch.float64)
    errors = []
    for n in (20, 40, 80):
        sigmas = torch.sigmoid(torch.linspace(2.5, -2.5, n + 1, dtype=torch.float64))
        end = exact(solve(sigmas, x, solver), sigmas[-1])
        errors.append((end - exact(x, sigmas[0])).abs().max())
    for coarse, fine in pairwise(errors):
        assert 2 ** (order - 0.4) < coarse / fine < 2 ** (order + 0.6)


@pytest.mark.parametrize("solver, order", [("dpm", 3), ("dpm3", 4)])
def test_the_error_of_one_step_falls_with_its_order(solver, order):
    """From the exact solution before the step, where no start by Euler interferes."""
    start = torch.linspace(-2, 2, 9, dtype=torch.float64)
    errors = []
    for h in (0.2, 0.1, 0.05):
        sigmas = torch.sigmoid(h * torch.arange(3, -1, -1, dtype=torch.float64))
        tables = ode_tables(sigmas, solver)
        quantile = exact(start, torch.tensor(0.7))

        def on_the_way(sigma, quantile=quantile):
            spread = ((1 - sigma) ** 2 * STD**2 + sigma**2) ** 0.5
            return (1 - sigma) * 0.5 + (quantile - 0.5) / STD * spread

        states = [on_the_way(sigma) for sigma in sigmas]
        cleans = [x - s * velocity(x, s) for x, s in zip(states[:3], sigmas, strict=False)]
        step = tables.ratio[2] * states[2] + (1 - tables.ratio[2]) * cleans[2]
        for weight, before in zip(tables.history[2], (cleans[1], cleans[0]), strict=False):
            step = step + weight * (cleans[2] - before)
        errors.append((step - states[3]).abs().max())
    for coarse, fine in pairwise(errors):
        assert 2 ** (order - 0.5) < coarse / fine < 2 ** (order + 0.5)


STOCK = {
    "dpm": (DPMSolverMultistepScheduler, {"solver_order": 2, "algorithm_type": "dpmsolver++"}),
    # whose DPM-Solver++ of third order lacks a factor of 2
    "dpm3": (UniPCMultistepScheduler, {"solver_order": 3, "disable_corrector": list(range(20))}),
    "unipc": (UniPCMultistepScheduler, {"solver_order": 2, "solver_type": "bh2"}),
}


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize("solver", STOCK)
def test_it_is_what_diffusers_computes(solver):
    kind, settings = STOCK[solver]
    stock = kind(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0, **settings
    )
    stock.set_timesteps(20)
    steps = 18 if solver == "dpm3" else 20  # diffusers lowers its order in the last two steps
    sigmas = stock.sigmas[: steps + 1]
    x = torch.linspace(-2, 2, 9)
    solution = solve(sigmas.double(), x.double(), solver)
    state = x[:, None]
    for sigma, timestep in zip(sigmas[:-1], stock.timesteps, strict=False):
        state = stock.step(velocity(state, sigma), timestep, state).prev_sample
    torch.testing.assert_close(solution.float(), state[:, 0], rtol=0, atol=2e-6)
    euler = solve(sigmas.double(), x.double(), "euler")
    assert (euler.float() - state[:, 0]).abs().max() > 1e-3


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
    torch.testing.assert_close(solution, x, rtol=1e-6, atol=1e-6)


def test_repeated_levels_and_the_ends_are_euler():
    sigmas = torch.tensor([[1.0, 0.8, 0.5, 0.5, 0.5], [0.7, 0.4, 0.0, 0.0, 0.0]])
    for solver in SOLVERS:
        tables = ode_tables(sigmas, solver)
        assert tables.delta[:, 2:].tolist() == [[0, 0], [0, 0]]
        assert tables.ratio.isfinite().all()
        assert tables.history.isfinite().all()
        # after sigma 1, and to sigma 0
        assert not tables.history[0, :2].any()
        assert not tables.history[1, :2].any()
    correction = ode_tables(sigmas, "unipc").correction
    assert correction.isfinite().all()
    assert not correction[:, 2:].any()
    assert not correction[1, 1].any()  # nothing is predicted after sigma 0
    assert ode_tables(sigmas).history.shape == (2, 4, 0)
    with pytest.raises(ValueError, match="solver is 'heun'; choose one of euler, dpm"):
        ode_tables(sigmas, "heun")


def test_levels_from_the_middle_continue_the_schedule():
    whole = flow_sigmas(20, 5.0)
    torch.testing.assert_close(flow_sigmas(12, 5.0, whole[8].item()), whole[8:])
    torch.testing.assert_close(flow_sigmas(4, 5.0, whole[8].item()), whole[8::3])
