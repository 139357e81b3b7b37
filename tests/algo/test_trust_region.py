"""Strategies of the trust region, estimators of the velocity KL, and the controller of its coefficient."""

import json

import pytest
import torch

from sage_grpo.algo.sde import build_schedule, flow_sigmas
from sage_grpo.algo.trust_region import KLController, TrustRegion, rollout_kl, trust_region

SCHEDULE = build_schedule("sage_grpo", flow_sigmas(20, 5.0), 0.5)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"kl_weight": 0.0}, TrustRegion(None, 0.0, 0.0)),
        ({"use_moving_KL": False, "use_dual_kl": False}, TrustRegion("fixed", 1.0, 0.0)),
        ({"dual_kl_moving_weight": 0.0}, TrustRegion(None, 0.0, 0.1)),
        ({"use_dual_kl": False}, TrustRegion("moving", 1.0, 0.0)),
        ({}, TrustRegion("moving", 1.0, 0.1)),
        ({"use_moving_KL": False}, TrustRegion("fixed", 1.0, 0.1)),
    ],
    ids=["none", "fixed", "step-wise", "moving", "dual moving", "dual fixed"],
)
def test_flags_name_the_strategy(flags, expected):
    defaults = {
        "kl_weight": 1e-5,
        "use_moving_KL": True,
        "use_dual_kl": True,
        "dual_kl_moving_weight": 1.0,
        "dual_kl_step_weight": 0.1,
    }
    region = trust_region(**{**defaults, **flags})
    assert region == expected
    assert region.kl(2.0, 3.0) == expected.position_weight * 2.0 + expected.velocity_weight * 3.0


def test_contradictory_weights_are_refused():
    with pytest.raises(ValueError, match="both KL terms weigh 0"):
        trust_region(1e-5, True, False, 0.0, 0.1)
    with pytest.raises(ValueError, match=r"dual_kl_step_weight is -0\.1"):
        trust_region(1e-5, True, True, 1.0, -0.1)


def test_a_step_on_the_kl_pulls_towards_the_anchor():
    generator = torch.Generator().manual_seed(0)
    v, v_ref = (torch.randn(4, 8, 3, generator=generator) for _ in range(2))
    v.requires_grad_()
    before = (v - v_ref).square().sum().item()
    SCHEDULE.kl(5, v, v_ref).sum().backward()
    with torch.no_grad():
        after = (v - 1e-2 * v.grad - v_ref).square().sum().item()
        away = (v + 1e-2 * v.grad - v_ref).square().sum().item()
    assert after < before < away


def test_rollout_kl_estimators_on_policy():
    """On-policy both are 0. The exact one is at its minimum there; the published one has the gradient of -log_prob."""
    generator = torch.Generator().manual_seed(0)
    x, v_rollout, noise = (torch.randn(4, 64, generator=generator) for _ in range(3))
    x_next, log_prob_rollout = SCHEDULE.step(5, x, v_rollout, noise)
    gradients = {}
    for estimator in ("exact", "logprob"):
        v = v_rollout.clone().requires_grad_()
        log_prob = SCHEDULE.log_prob(5, x, v, x_next)
        kl = rollout_kl(estimator, SCHEDULE.kl(5, v, v_rollout), log_prob, log_prob_rollout)
        assert torch.equal(kl, torch.zeros(4))
        (gradients[estimator],) = torch.autograd.grad(kl.sum(), v)
    assert torch.equal(gradients["exact"], torch.zeros(4, 64))
    expected = -SCHEDULE.b[5] / SCHEDULE.std[5] * noise / 64
    torch.testing.assert_close(gradients["logprob"], expected, rtol=1e-3, atol=1e-6)
    with pytest.raises(ValueError, match="step_kl_estimator is 'exakt'"):
        rollout_kl("exakt", x, x, x)


def test_exact_and_logprob_agree_in_expectation_off_policy():
    generator = torch.Generator().manual_seed(0)
    x, v_rollout, noise = (
        torch.randn(4000, 16, generator=generator, dtype=torch.float64) for _ in range(3)
    )
    v = v_rollout + 2.0
    x_next, log_prob_rollout = SCHEDULE.step(5, x, v_rollout, noise)
    log_prob = SCHEDULE.log_prob(5, x, v, x_next)
    kl = SCHEDULE.kl(5, v, v_rollout)
    estimate = rollout_kl("logprob", kl, log_prob, log_prob_rollout)
    exact = rollout_kl("exact", kl, log_prob, log_prob_rollout).mean().item()
    assert estimate.mean().item() == pytest.approx(exact, abs=4 * estimate.std().item() / 4000**0.5)
    # the sample is large enough to tell it from 0
    assert exact > 10 * estimate.std().item() / 4000**0.5


def test_fixed_holds():
    controller = KLController(kl_schedule="fixed")
    assert [controller.update(kl) for kl in (0.0, 1.0, 5.0)] == [1e-5] * 3


@pytest.mark.parametrize("schedule", ["fixed", "two_stage", "adaptive"])
def test_no_kl_stays_none(schedule):
    controller = KLController(kl_weight=0.0, kl_schedule=schedule, kl_warmup_steps=2)
    assert [controller.kl_lambda, *(controller.update(kl) for kl in (0.0, 1.0, 0.0, 1.0))] == [
        0.0
    ] * 5


def test_a_fixed_coefficient_may_be_smaller_than_the_default_floor():
    assert KLController(kl_weight=1e-9, kl_schedule="fixed").update(1.0) == 1e-9


def test_two_stage_warms_up_linearly_and_holds():
    controller = KLController(kl_schedule="two_stage", kl_warmup_steps=4)
    coefficients = [controller.kl_lambda, *(controller.update(1.0) for _ in range(6))]
    ramp = [1e-7 + (1e-5 - 1e-7) * k / 4 for k in range(5)]
    assert coefficients == pytest.approx([*ramp, 1e-5, 1e-5], rel=1e-12)


@pytest.mark.parametrize(
    ("feedback", "when_high", "when_low"), [("paper", 0.9, 1.1), ("trust_region", 1.1, 0.9)]
)
def test_adaptive_follows_its_rule_step_by_step(feedback, when_high, when_low):
    """Hand-kept copy of the rule: warm-up of 2, then the mean of the last 10 values against 0.5 and 1.5 x target."""
    controller = KLController(kl_warmup_steps=2, kl_feedback=feedback, kl_target=1e-4)
    values = [3e-4] * 5 + [1e-4] * 14 + [0.0] * 20 + [2e-3] * 12
    coef = None
    seen = []
    for step, kl in enumerate(values, start=1):
        seen.append(kl)
        if step <= 2:
            coef = 1e-7 + (1e-5 - 1e-7) * step / 2
        else:
            mean = sum(seen[-10:]) / len(seen[-10:])
            factor = when_high if mean > 1.5e-4 else when_low if mean < 0.5e-4 else 1.0
            coef = min(max(coef * factor, 1e-7), 1e-5)
        assert controller.update(kl) == pytest.approx(coef, rel=1e-12)
    if feedback == "paper":
        assert controller.kl_lambda != 1e-5
    else:
        assert controller.kl_lambda > 1e-7


def test_the_published_rule_loosens_when_the_policy_runs_away():
    runaway = [1.0] * 60
    published, multiplier = (
        KLController(kl_warmup_steps=0, kl_feedback=name) for name in ("paper", "trust_region")
    )
    for kl in runaway:
        published.update(kl)
        multiplier.update(kl)
    assert published.kl_lambda == 1e-7 and multiplier.kl_lambda == 1e-5


def test_state_survives_json_exactly():
    values = [3e-4] * 25 + [1e-4] * 35  # right after the cut the old values still decide
    whole, first, second = (KLController(kl_warmup_steps=7) for _ in range(3))
    expected = [whole.update(kl) for kl in values]
    head = [first.update(kl) for kl in values[:25]]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.state_dict() == first.state_dict()
    assert head + [second.update(kl) for kl in values[25:]] == expected
    assert second.state_dict() == whole.state_dict()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"kl_schedule": "adaptiv"},
            "kl_schedule is 'adaptiv'; choose one of fixed, two_stage, adaptive",
        ),
        ({"kl_feedback": "pid"}, "kl_feedback is 'pid'"),
        ({"kl_coef": 1e-4}, "kl_coef is 0.0001; it must lie between 0 and kl_weight"),
        ({"kl_min_coef": 1e-4}, "kl_min_coef is 0.0001"),
        ({"kl_target": 0.0}, "kl_target is 0.0"),
        ({"kl_warmup_steps": -1}, "kl_warmup_steps is -1"),
    ],
)
def test_bad_settings_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        KLController(**arguments)


@pytest.mark.parametrize("kl", [float("nan"), float("inf"), -1.0])
def test_a_broken_kl_never_enters_the_history(kl):
    controller = KLController()
    with pytest.raises(ValueError, match="the KL is"):
        controller.update(kl)
    assert controller.state_dict() == KLController().state_dict()
