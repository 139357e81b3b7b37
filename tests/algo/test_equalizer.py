"""Gradient norms of the log-probability over steps, by autograd, and the factors that equalize them."""

import pytest
import torch

from sage_grpo.algo.equalizer import equalizer, gradient_scale
from sage_grpo.algo.grpo import normalized_log_ratio
from sage_grpo.algo.sde import SDES, Schedule, build_schedule, flow_sigmas

NOISY = [name for name in SDES if name != "ode"]
SAMPLES = 64
ELEMENTS = 256


def gradient_norms(schedule: Schedule, ratio_norm: bool = False) -> torch.Tensor:
    """(T,) mean over samples of |d log_prob / d v| by autograd, in units of its expected value where |b|/std = 1."""
    generator = torch.Generator().manual_seed(0)
    norms = []
    for i in range(schedule.num_steps):
        x, v, noise = (torch.randn(SAMPLES, ELEMENTS, generator=generator) for _ in range(3))
        x_next, rollout_log_prob = schedule.step(i, x, v, noise)
        v = v.requires_grad_()
        value = schedule.log_prob(i, x, v, x_next)
        if ratio_norm:
            value = normalized_log_ratio(
                value - rollout_log_prob, schedule.kl(i, v, v.detach()), schedule.std[i]
            )
        (gradient,) = torch.autograd.grad(value.sum(), v)
        norms.append(gradient.norm(dim=1).mean() * ELEMENTS**0.5)
    return torch.stack(norms)


@pytest.mark.parametrize("ratio_norm", [False, True])
@pytest.mark.parametrize("sde_type", NOISY)
def test_gradient_norm_is_proportional_to_b_over_std(sde_type, ratio_norm):
    schedule = build_schedule(sde_type, flow_sigmas(20, 5.0), 0.5)
    measured = gradient_norms(schedule, ratio_norm)
    predicted = gradient_scale(schedule, ratio_norm)
    # 64 x 256 normal draws per step: relative sampling error 0.6 %
    torch.testing.assert_close(measured, predicted, rtol=0.03, atol=0)
    noisy = schedule.stochastic
    equalized = (equalizer(schedule, ratio_norm=ratio_norm) * measured)[noisy]
    torch.testing.assert_close(
        equalized, equalized.median().expand_as(equalized), rtol=0.03, atol=0
    )
    assert measured[noisy].max() > 5 * measured[noisy].min()  # and without it they are far apart


def test_equalizer_of_the_default_schedule():
    factors = equalizer(build_schedule("sage_grpo", flow_sigmas(20, 5.0), 0.5))
    expected = torch.tensor([8.15, 5.30, 3.73, 1.00, 0.055])
    torch.testing.assert_close(factors[[0, 1, 2, 9, 19]], expected, rtol=1e-3, atol=5e-4)


def test_median_runs_over_the_window_only():
    schedule = build_schedule("sage_grpo", flow_sigmas(20, 5.0), 0.5).window([0, 1, 2])
    factors = equalizer(schedule)
    assert factors[1] == pytest.approx(1.0) and factors[0] > 1 > factors[2] > 0
    assert torch.equal(factors[3:], torch.zeros(17))


def test_disabled_is_one_where_trained():
    schedule = build_schedule("precise", flow_sigmas(20, 5.0), 0.5)
    factors = equalizer(schedule, enabled=False)
    assert torch.equal(factors, schedule.stochastic.float()) and factors[-1] == 0


def test_nothing_to_train_is_refused():
    with pytest.raises(ValueError, match="no stochastic step"):
        equalizer(build_schedule("ode", flow_sigmas(20, 5.0), 0.5))
