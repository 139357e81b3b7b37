"""Advantages, the clipped loss and the diagnostics, by hand and in closed form."""

import math

import pytest
import torch

from sage_grpo.algo.grpo import (
    Advantages,
    centered,
    group_advantages,
    normalized_log_ratio,
    objective,
    policy_loss,
    policy_metrics,
    score_advantages,
)
from sage_grpo.algo.sde import build_schedule, flow_sigmas

NAN = math.nan


def advantages(rewards, groups, **options):
    return group_advantages(
        torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups), **options
    )


def test_two_groups_by_hand():
    """(1, 2, 3, 6): mean 3, population std sqrt(3.5). (0, 1): mean and std 0.5."""
    result = advantages([1.0, 2.0, 3.0, 6.0, 0.0, 1.0], [0, 0, 0, 0, 7, 7])
    expected = [-2 / 3.5**0.5, -1 / 3.5**0.5, 0.0, 3 / 3.5**0.5, -1.0, 1.0]
    torch.testing.assert_close(
        result.values, torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=0
    )
    assert result.trained.all()
    assert (result.failed, result.starved_groups, result.flat_groups) == (0, 0, 0)


def test_failed_rewards_leave_the_statistics():
    result = advantages([1.0, NAN, 3.0, math.inf], [0, 0, 0, 0])
    torch.testing.assert_close(
        result.values, torch.tensor([-1.0, 0.0, 1.0, 0.0], dtype=torch.float64), rtol=1e-5, atol=0
    )
    assert result.trained.tolist() == [True, False, True, False] and result.failed == 2


def test_one_survivor_gives_no_gradient():
    result = advantages([NAN, 5.0, NAN, 1.0, 2.0], [0, 0, 0, 1, 1])
    assert result.trained.tolist() == [False, False, False, True, True]
    assert result.values[:3].tolist() == [0.0, 0.0, 0.0] and result.starved_groups == 1


def test_a_group_that_failed_whole():
    result = advantages([NAN, NAN, NAN], [0, 0, 0])
    assert not result.trained.any() and result.values.tolist() == [0.0] * 3
    assert (result.failed, result.starved_groups, result.flat_groups) == (3, 1, 0)


@pytest.mark.parametrize("mode", ["group", "batch", "none"])
def test_zero_spread_gives_no_gradient(mode):
    """0.1 three times: its mean is not exactly 0.1, and that rounding must not become an advantage."""
    result = advantages([0.1, 0.1, 0.1, NAN, 0.0, 4.0], [0, 0, 0, 0, 1, 1], advantage_std=mode)
    assert result.values[:4].tolist() == [0.0] * 4
    assert not result.trained[:4].any() and result.trained[4:].all()
    assert (result.flat_groups, result.starved_groups, result.failed) == (1, 0, 1)


def test_one_std_for_the_batch_and_none():
    rewards = [0.0, 2.0, 10.0, 20.0]
    groups = [0, 0, 1, 1]
    std = torch.tensor(rewards).double().std(correction=0).item()
    batch = advantages(rewards, groups, advantage_std="batch").values
    torch.testing.assert_close(
        batch, torch.tensor([-1.0, 1.0, -5.0, 5.0]).double() / std, rtol=1e-5, atol=0
    )
    plain = advantages(rewards, groups, advantage_std="none", adv_clip_max=100.0).values
    assert plain.tolist() == [-1.0, 1.0, -5.0, 5.0]


def test_outliers_are_clipped():
    rewards = [0.0] * 99 + [1.0]
    result = advantages(rewards, [0] * 100)
    assert result.values.max() == 5.0 and result.values.min() > -1


def test_groups_split_over_ranks():
    """Ranks hold parts of groups. Gathered, every rank finds for its part what one process finds for the whole."""
    generator = torch.Generator().manual_seed(0)
    rewards = torch.randn(24, generator=generator)
    rewards[[2, 9]] = NAN
    groups = torch.arange(24) // 4
    whole = group_advantages(rewards, groups)
    order = torch.randperm(24, generator=generator)
    for held in (order.chunk(4), order.chunk(8), order.chunk(3)):  # any split, any order
        gathered = group_advantages(
            torch.cat([rewards[p] for p in held]), torch.cat([groups[p] for p in held])
        )
        torch.testing.assert_close(gathered.values, whole.values[torch.cat(held)])
        assert torch.equal(gathered.trained, whole.trained[torch.cat(held)])
    local = group_advantages(rewards[:2], groups[:2])  # without the gather, statistics differ
    assert not torch.allclose(local.values, whole.values[:2])


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="advantage_std is 'prompt'"):
        advantages([1.0, 2.0], [0, 0], advantage_std="prompt")
    with pytest.raises(ValueError, match="two equal lists"):
        advantages([1.0, 2.0], [0])
    with pytest.raises(ValueError, match=r"rewards are torch\.int64"):
        group_advantages(torch.tensor([1, 2, 5]), torch.tensor([0, 0, 0]))


def per_score(scores, weights, groups, adv_clip_max=5.0):
    scores = {name: torch.tensor(values, dtype=torch.float64) for name, values in scores.items()}
    return score_advantages(scores, weights, torch.tensor(groups), "group", adv_clip_max)


def test_scores_of_different_scales_count_by_their_weights_alone():
    """In each group, a is -1, +1 and b is +1, -1 of its own standard deviations."""
    scores = {"a": [0.0, 2.0, 1.0, 1.02], "b": [500.0, 100.0, 0.0, -7.0]}
    groups = [0, 0, 1, 1]
    values = per_score(scores, {"a": 3.0, "b": 1.0}, groups).values
    expected = torch.tensor([-0.5, 0.5, -0.5, 0.5]).double()
    torch.testing.assert_close(values, expected, rtol=2e-4, atol=0)

    sums = [3 * a + b for a, b in zip(scores["a"], scores["b"], strict=True)]
    signs = advantages(sums, groups).values.sign()
    assert signs.tolist() == [1, -1, 1, -1], "in the sum, the large score drowns the small one"

    doubled = per_score(scores, {"a": 6.0, "b": 2.0, "unused": 0}, groups).values
    torch.testing.assert_close(doubled, values)
    negated = per_score(scores, {"b": -2.0}, groups).values
    torch.testing.assert_close(negated, -advantages(scores["b"], groups).values)
    clipped = per_score(scores, {"a": 3.0, "b": 1.0}, groups, adv_clip_max=0.25).values
    assert clipped.abs().tolist() == [0.25] * 4


@pytest.mark.parametrize("mode", ["group", "batch", "none"])
def test_each_score_is_normalized_as_it_would_be_alone(mode):
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(12, generator=generator)
    b = 40 * torch.rand(12, generator=generator)
    groups = torch.arange(12) // 4
    result = score_advantages({"a": a, "b": b}, {"a": 0.5, "b": 1.5}, groups, mode, 1000.0)
    if mode == "none":  # nothing is divided, so advantages add up as scores do
        expected = group_advantages(0.5 * a + 1.5 * b, groups, mode, 1000.0).values
    else:
        a_alone = group_advantages(a, groups, mode, 1000.0).values
        b_alone = group_advantages(b, groups, mode, 1000.0).values
        expected = 0.25 * a_alone + 0.75 * b_alone
    torch.testing.assert_close(result.values, expected)


def test_a_rollout_that_lacks_one_score_leaves_the_statistics_of_all():
    scores = {"a": [1.0, 3.0, 9.0, 5.0], "b": [2.0, 0.0, NAN, NAN]}
    result = per_score(scores, {"a": 1.0, "b": 0.5}, [0, 0, 0, 1])
    expected = torch.tensor([-1 / 3, 1 / 3, 0, 0]).double()
    torch.testing.assert_close(result.values, expected, rtol=1e-5, atol=1e-12)
    assert result.trained.tolist() == [True, True, False, False]
    assert (result.failed, result.starved_groups, result.flat_groups) == (2, 1, 0)

    scores["b"] = [NAN] * 4  # does not matter without a weight
    unweighted = per_score(scores, {"a": 1.0, "b": 0.0}, [0, 0, 0, 0])
    assert unweighted.failed == 0 and unweighted.trained.all()


def test_a_flat_score_adds_nothing_and_a_group_is_flat_if_all_are():
    scores = {"a": [0.1, 0.1, 0.1, 0.1, 1.0, 2.0], "b": [0.0, 1.0, 7.0, 7.0, 3.0, 4.0]}
    result = per_score(scores, {"a": 1.0, "b": 1.0}, [0, 0, 1, 1, 2, 2])
    expected = torch.tensor([-0.5, 0.5, 0, 0, -1, 1]).double()
    torch.testing.assert_close(result.values, expected, rtol=1e-5, atol=1e-12)
    assert result.flat_groups == 1
    assert result.trained.tolist() == [True, True, False, False, True, True]


def test_clipped_loss_by_hand():
    """A > 0 gains nothing above 1 + c, A < 0 nothing below 1 - c; on the other sides the loss is unclipped."""
    ratio = torch.tensor([0.8, 1.0, 1.2, 0.8, 1.0, 1.2], dtype=torch.float64)
    weight = torch.tensor([2.0, 2.0, 2.0, -2.0, -2.0, -2.0], dtype=torch.float64)
    log_ratio = ratio.log().requires_grad_()
    loss = policy_loss(log_ratio, weight, clip_range=0.1)
    expected = torch.tensor([-1.6, -2.0, -2.2, 1.8, 2.0, 2.4], dtype=torch.float64)
    torch.testing.assert_close(loss, expected)
    loss.sum().backward()
    torch.testing.assert_close(
        log_ratio.grad, torch.tensor([-1.6, -2.0, 0.0, 0.0, 2.0, 2.4], dtype=torch.float64)
    )


@pytest.mark.parametrize("broken", [NAN, math.inf, 200.0, -math.inf])
def test_a_rollout_without_advantage_cannot_poison_the_loss(broken):
    log_ratio = torch.tensor([0.0, broken], requires_grad=True)
    loss = policy_loss(log_ratio, torch.tensor([1.0, 0.0]))
    loss.sum().backward()
    assert loss.tolist() == [-1.0, 0.0] and log_ratio.grad.tolist() == [-1.0, 0.0]


def test_centered_advantages_of_each_group_add_up_to_0():
    """Groups of three: a skewed one, one in which a reward has failed, one without advantages."""
    values = torch.tensor([2.0, -0.5, -0.6, 1.0, 0.0, -3.0, 0.0, 0.0, 0.0])
    trained = torch.tensor([1, 1, 1, 1, 0, 1, 0, 0, 0], dtype=torch.bool)
    some = Advantages(values, trained, failed=1, starved_groups=0, flat_groups=1)
    expected = torch.tensor([1.7, -0.8, -0.9, 2.0, 0.0, -2.0, 0.0, 0.0, 0.0])
    torch.testing.assert_close(centered(some, group_size=3).values, expected)


def test_on_policy_gradient_is_the_policy_gradient():
    log_prob = torch.tensor([0.3, -0.7], requires_grad=True)
    weight = torch.tensor([1.5, -0.5])
    policy_loss(log_prob - log_prob.detach(), weight).sum().backward()
    assert torch.equal(log_prob.grad, -weight)


def test_objective_adds_the_kl_and_parts_add_up():
    policy = torch.tensor([1.0, -2.0, 3.0])
    scale = torch.tensor([1.0, 0.5, 2.0])
    kl = torch.tensor([4.0, 5.0, 6.0])
    whole = objective(policy, scale, kl, kl_lambda=0.1, num_pairs=3)
    assert whole.item() == pytest.approx((1.0 - 1.0 + 6.0 + 0.1 * 15.0) / 3)
    parts = sum(objective(policy[p], scale[p], kl[p], 0.1, 3) for p in (slice(0, 1), slice(1, 3)))
    assert parts.item() == pytest.approx(whole.item())


def test_ratio_norm_removes_the_mean_and_the_spread_of_std():
    """Off-policy the log-ratio has mean -KL. Normalized, its mean is 0 and its std |b| rms(dv) / sqrt(D)."""
    generator = torch.Generator().manual_seed(0)
    schedule = build_schedule("sage_grpo", flow_sigmas(20, 5.0), 0.5)
    x, v_old, noise = (
        torch.randn(20000, 16, generator=generator, dtype=torch.float64) for _ in range(3)
    )
    v = v_old + 0.3
    for i in (1, 18):
        x_next, old_log_prob = schedule.step(i, x, v_old, noise)
        log_ratio = schedule.log_prob(i, x, v, x_next) - old_log_prob
        kl = schedule.kl(i, v, v_old)
        assert log_ratio.mean().item() == pytest.approx(
            -kl.mean().item(), abs=4 * log_ratio.std().item() / 20000**0.5
        )
        normal = normalized_log_ratio(log_ratio, kl, schedule.std[i])
        spread = schedule.b[i].abs().item() * 0.3 / 4
        assert abs(normal.mean().item()) < 4 * spread / 20000**0.5
        assert normal.std().item() == pytest.approx(spread, rel=0.03)


def test_diagnostics_by_hand():
    log_ratio = torch.tensor([1.0, 1.2, 0.8, 1.05, 0.7], dtype=torch.float64).log()
    advantages = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0])
    columns = policy_metrics(log_ratio, advantages, clip_range=0.1)
    assert columns["ratio_mean"].tolist() == pytest.approx([1.0, 1.2, 0.8, 1.05, 0.7])
    assert torch.equal(columns["log_ratio_mean"], log_ratio)
    expected_kl = log_ratio.exp() - 1 - log_ratio
    assert columns["approx_kl"].tolist() == pytest.approx(expected_kl.tolist())
    assert columns["clip_fraction"].tolist() == [0, 1, 1, 0, 1]
    assert columns["clip_high"].tolist() == [0, 1, 0, 0, 0]
    assert columns["clip_low"].tolist() == [0, 0, 0, 0, 1]


def test_on_policy_diagnostics_are_exact():
    columns = policy_metrics(torch.zeros(6), torch.randn(6), 1e-4)
    assert torch.equal(columns.pop("ratio_mean"), torch.ones(6, dtype=torch.float64))
    assert not any(values.any() for values in columns.values())
