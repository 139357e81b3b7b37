"""The sampler tables against other publications, the paper's numbers, and properties over random schedules."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sage_grpo.algo.sde import SDES, build_schedule, flow_sigmas, precise_split

FIXTURES = Path(__file__).parents[1] / "fixtures" / "sde"
CASES = json.loads((FIXTURES / "index.json").read_text())
NOISY = [name for name in SDES if name != "ode"]


def gaussian_batch(batch: int = 3, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, 4, 3, 5, generator=generator) for _ in range(4)]


@pytest.mark.parametrize("name", CASES)
def test_equals_published_code(name):
    """Mean, std, |b| and log-prob of the flow, dance, cps and precise samplers as their own code gave them."""
    case = CASES[name]
    data = np.load(FIXTURES / f"{name}.npz")
    torch.testing.assert_close(
        flow_sigmas(case["num_steps"], case["shift"]).float(),
        torch.tensor(data["sigmas"]),
        rtol=1e-6,
        atol=1e-7,
    )
    schedule = build_schedule(case["sde_type"], data["sigmas"], case["eta"])
    # published code floors the std of a deterministic last step at 1e-6; here it is 0, and the step is not trained
    torch.testing.assert_close(schedule.std, torch.tensor(data["std"]), rtol=1e-5, atol=1.1e-6)
    torch.testing.assert_close(schedule.b.abs(), torch.tensor(data["jac"]), rtol=1e-5, atol=0)
    x = torch.tensor(data["x"])
    v = torch.tensor(data["v"])
    for i in case["steps"]:
        expected = {key: torch.tensor(data[f"{key}_{i}"]) for key in ("next", "mean", "logp")}
        torch.testing.assert_close(schedule.mean(i, x, v), expected["mean"], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(
            schedule.log_prob(i, x, v, expected["next"]), expected["logp"], rtol=1e-5, atol=0
        )


def test_sage_std_of_the_default_schedule():
    std = build_schedule("sage_grpo", flow_sigmas(20, 5.0), 0.5).std
    torch.testing.assert_close(
        std[:4], torch.tensor([0.556, 0.426, 0.331, 0.283]), rtol=0, atol=5e-4
    )
    assert abs(std[-1].item() - 0.080) < 5e-4


def test_sage_stays_real_where_the_clamp_of_sigma_alone_does_not():
    """T = 80: the first steps lie above 0.997 whole. They are deterministic, and noise starts below."""
    schedule = build_schedule("sage_grpo", flow_sigmas(80, 5.0), 0.5)
    above = schedule.sigmas[1:] > 0.997
    assert above.any() and not schedule.stochastic[above].any()
    assert schedule.stochastic[~above].all()


def test_flow_uses_the_second_sigma_at_pure_noise():
    sigmas = flow_sigmas(20, 5.0)
    schedule = build_schedule("flow_grpo", sigmas, 0.7)
    second = sigmas[1].item()
    expected = 0.7 * math.sqrt((1 - second) / (1 - second))
    assert schedule.std[0].item() == pytest.approx(expected, rel=1e-6)
    late = build_schedule("flow_grpo", sigmas[1:], 0.7)  # starts below 1: no substitute is needed
    assert late.std[0].item() == pytest.approx(schedule.std[1].item(), rel=1e-6)


def test_precise_forgets_its_start_at_pure_noise():
    schedule = build_schedule("precise", flow_sigmas(20, 5.0), 0.3)
    assert schedule.std[0] == schedule.sigmas[1]
    assert schedule.std[-1] == 0


def test_precise_is_real_between_neighboring_floats():
    """rho = next (1 - sigma) / (sigma (1 - next)) stays at most 1 when rounded, so it needs no clamp."""
    sigma = torch.linspace(0.001, 0.999, 9999, dtype=torch.float64)
    std, r = precise_split(sigma, torch.nextafter(sigma, torch.zeros_like(sigma)), 0.5)
    assert std.isfinite().all() and r.isfinite().all()


def test_noise_below_fp32_resolution_counts_as_none():
    schedule = build_schedule("sage_grpo", flow_sigmas(20, 5.0), 1e-7)
    assert not schedule.stochastic.any() and torch.equal(schedule.inv_std, torch.zeros(20))


@pytest.mark.parametrize("sde_type", SDES)
def test_eta_zero_is_the_ode(sde_type):
    sigmas = flow_sigmas(20, 5.0)
    schedule = build_schedule(sde_type, sigmas, 0.0)
    ode = build_schedule("ode", sigmas, 0.0)
    assert not schedule.stochastic.any()
    torch.testing.assert_close(schedule.a, torch.ones(20))
    torch.testing.assert_close(schedule.b, -(sigmas[:-1] - sigmas[1:]).float())
    torch.testing.assert_close((ode.a, ode.b), (schedule.a, schedule.b))


def test_log_prob_is_the_gaussian_density():
    x, v, noise, _ = gaussian_batch()
    schedule = build_schedule("sage_grpo", flow_sigmas(20, 5.0), 0.5)
    x_next, log_prob = schedule.step(7, x, v, noise)
    density = torch.distributions.Normal(schedule.mean(7, x, v), schedule.std[7]).log_prob(x_next)
    torch.testing.assert_close(log_prob, density.flatten(1).mean(1))


def test_deterministic_steps_have_no_log_prob_and_no_gradient():
    x, v, noise, v_ref = gaussian_batch()
    v.requires_grad_()
    schedule = build_schedule("precise", flow_sigmas(20, 5.0), 0.5)
    x_next, log_prob = schedule.step(19, x, v, noise)
    (log_prob.sum() + schedule.kl(19, v, v_ref).sum()).backward()
    assert torch.equal(log_prob, torch.zeros(3)) and torch.equal(v.grad, torch.zeros_like(v))
    torch.testing.assert_close(x_next, x - schedule.sigmas[19] * v)  # the last step lands on x0_hat


@pytest.mark.parametrize("sde_type", NOISY)
def test_steps_per_sample_equal_single_steps(sde_type):
    """A LongTensor of steps gives, row by row, the very bits of an int."""
    x, v, noise, v_ref = gaussian_batch()
    schedule = build_schedule(sde_type, flow_sigmas(20, 5.0), 0.5)
    steps = torch.tensor([0, 18, 7])
    x_next, log_prob = schedule.step(steps, x, v, noise)
    kl = schedule.kl(steps, v, v_ref)
    for number, i in enumerate(steps.tolist()):
        row = slice(number, number + 1)
        single_next, single_log_prob = schedule.step(i, x[row], v[row], noise[row])
        assert torch.equal(x_next[row], single_next)
        torch.testing.assert_close(log_prob[row], single_log_prob, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(kl[row], schedule.kl(i, v[row], v_ref[row]), rtol=1e-6, atol=0)


def test_a_bf16_velocity_is_widened_not_the_latents_narrowed():
    x, v, noise, v_ref = gaussian_batch()
    schedule = build_schedule("sage_grpo", flow_sigmas(20, 5.0), 0.5)
    for i in (4, torch.tensor([4, 4, 4])):
        x_next, log_prob = schedule.step(i, x, v.bfloat16(), noise)
        expected_next, expected_log_prob = schedule.step(4, x, v.bfloat16().float(), noise)
        assert torch.equal(x_next, expected_next) and torch.equal(log_prob, expected_log_prob)
        kl = schedule.kl(i, v.bfloat16(), v_ref.bfloat16())
        expected_kl = schedule.kl(4, v.bfloat16().float(), v_ref.bfloat16().float())
        torch.testing.assert_close(kl, expected_kl, rtol=1e-6, atol=0)


def test_window_runs_the_ode_outside():
    sigmas = flow_sigmas(20, 5.0)
    sage = build_schedule("sage_grpo", sigmas, 0.5)
    ode = build_schedule("ode", sigmas, 0.5)
    windowed = sage.window([3, 4])
    inside = torch.zeros(20, dtype=torch.bool)
    inside[3:5] = True
    assert torch.equal(windowed.stochastic, inside)
    assert torch.equal(sage.window(range(3, 5)).std, windowed.std)
    for column in ("a", "b", "std"):
        assert torch.equal(getattr(windowed, column)[inside], getattr(sage, column)[inside])
        torch.testing.assert_close(
            getattr(windowed, column)[~inside], getattr(ode, column)[~inside]
        )
    assert not sage.window([]).stochastic.any()


@pytest.mark.parametrize("sde_type", NOISY)
def test_kl_equals_torch_distributions(sde_type):
    x, v, _, v_ref = gaussian_batch()
    schedule = build_schedule(sde_type, flow_sigmas(20, 5.0), 0.5)
    for i in schedule.stochastic.nonzero().flatten().tolist():
        policy, reference = (
            torch.distributions.Normal(schedule.mean(i, x, w), schedule.std[i]) for w in (v, v_ref)
        )
        expected = torch.distributions.kl_divergence(policy, reference).flatten(1).mean(1)
        torch.testing.assert_close(schedule.kl(i, v, v_ref), expected, rtol=1e-3, atol=0)


@pytest.mark.parametrize(
    ("sde_type", "sigmas", "eta", "message"),
    [
        (
            "sega_grpo",
            [1.0, 0.0],
            0.5,
            "sde_type is 'sega_grpo'; choose one of sage_grpo, dance_grpo",
        ),
        ("sage_grpo", [1.0, 0.0], -0.1, "eta is -0.1"),
        ("sage_grpo", [1.0, 0.0], math.nan, "eta is nan"),
        ("cps", [1.0, 0.0], 1.01, "eta is 1.01 with sde_type cps"),
        ("sage_grpo", [1.1, 0.5, 0.0], 0.5, "from at most 1 to exactly 0"),
        ("sage_grpo", [1.0, 0.5, 0.1], 0.5, "from at most 1 to exactly 0"),
        ("sage_grpo", [0.5, 0.5, 0.0], 0.5, "each below the one before"),
        ("sage_grpo", [0.5, 0.9, 0.0], 0.5, "each below the one before"),
        ("sage_grpo", [1.0], 0.5, "at least two finite"),
        ("sage_grpo", [1.0, math.nan, 0.0], 0.5, "at least two finite"),
    ],
)
def test_bad_schedules_are_refused(sde_type, sigmas, eta, message):
    with pytest.raises(ValueError, match=message):
        build_schedule(sde_type, sigmas, eta)


@pytest.mark.parametrize(
    ("steps", "shift", "message"), [(0, 5.0, "num_sampling_steps is 0"), (20, 0.0, "shift is 0")]
)
def test_bad_sigmas_are_refused(steps, shift, message):
    with pytest.raises(ValueError, match=message):
        flow_sigmas(steps, shift)


@st.composite
def schedules(draw):
    levels = draw(st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=30, unique=True))
    sde_type = draw(st.sampled_from(sorted(SDES)))
    eta = draw(st.floats(0.0, 1.0 if sde_type == "cps" else 10.0))
    return sde_type, build_schedule(sde_type, [*sorted(levels, reverse=True), 0.0], eta)


@given(schedules(), st.integers(0, 2**31))
def test_any_valid_schedule_is_finite_and_consistent(drawn, seed):
    sde_type, schedule = drawn
    columns = torch.stack(
        [schedule.a, schedule.b, schedule.std, schedule.inv_std, schedule.log_norm]
    )
    assert columns.isfinite().all() and (schedule.std >= 0).all()
    assert torch.equal(schedule.stochastic, schedule.inv_std > 0)
    if sde_type in ("precise", "cps"):
        assert (schedule.std <= schedule.sigmas[1:] * (1 + 1e-6)).all()
    x, v, noise, v_ref = gaussian_batch(seed=seed)
    for i in range(schedule.num_steps):
        x_next, log_prob = schedule.step(i, x, v, noise)
        assert torch.equal(log_prob, schedule.log_prob(i, x, v, x_next))
        assert x_next.isfinite().all() and log_prob.isfinite().all()
        assert schedule.kl(i, v, v_ref).isfinite().all()
