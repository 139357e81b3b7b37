"""awm and nft: closed forms of their values and gradients, and what they teach in a world with known answers."""

import pytest
import torch

from sage_grpo.algo.grpo import policy_loss
from sage_grpo.algo.matching import matching_schedule, nft_loss, noised
from sage_grpo.algo.sde import flow_sigmas


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_table_measures_matches():
    schedule = matching_schedule(flow_sigmas(4, 3.0))
    x, v, v_ref, target = (drawn(2, 3, 4, seed=i) for i in range(4))
    steps = torch.tensor([0, 3])
    expected = -(v - target).square().mean((1, 2))
    torch.testing.assert_close(schedule.log_prob(steps, x, v, target), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(
        schedule.kl(steps, v, v_ref), (v - v_ref).square().mean((1, 2)), rtol=1e-6, atol=0
    )
    assert schedule.stochastic.all() and schedule.num_steps == 4


def test_states_lie_between_clip_and_noise_and_move_along_the_target():
    x0 = drawn(3, 5)
    z = drawn(3, 5, seed=1)
    levels = (torch.full((3,), sigma, dtype=torch.float64) for sigma in (0.0, 1.0, 0.3))
    (clean, target), (noise, _), (between, _) = (noised(x0, level, z) for level in levels)
    assert torch.equal(clean, x0) and torch.equal(noise, z)
    torch.testing.assert_close(between, x0 + 0.3 * target)


def test_awm_pushes_matches_of_good_clips_on_policy():
    """At ratio 1 the gradient is A times that of |v - target|^2."""
    schedule = matching_schedule(flow_sigmas(2, 1.0))
    steps = torch.tensor([0, 1])
    v = drawn(2, 6).requires_grad_()
    target = drawn(2, 6, seed=1)
    advantages = torch.tensor([1.5, -0.5], dtype=torch.float64)
    log_prob = schedule.log_prob(steps, v.detach(), v, target)
    policy_loss(log_prob - log_prob.detach(), advantages).sum().backward()
    torch.testing.assert_close(
        v.grad, advantages[:, None] * 2 * (v.detach() - target) / 6, rtol=1e-6, atol=0
    )


def nft_by_hand(v, v_old, target, sigma, advantage, beta, largest):
    """The loss of one sample, as the paper writes it."""

    def clip_error(velocity):
        error = sigma * (velocity - target)
        return (error**2).mean() / error.abs().mean().detach()

    r = 0.5 + 0.5 * max(-1.0, min(1.0, advantage / largest))
    positive = (1 - beta) * v_old + beta * v
    negative = (1 + beta) * v_old - beta * v
    return r * clip_error(positive) + (1 - r) * clip_error(negative)


@pytest.mark.parametrize("beta", [0.1, 1.0, 2.0])
def test_nft_is_the_papers_loss(beta):
    v = drawn(4, 8).requires_grad_()
    v_old = drawn(4, 8, seed=1)
    target = drawn(4, 8, seed=2)
    sigma = drawn(4, seed=3).abs()
    advantages = torch.tensor([2.0, -1.0, 9.0, 0.1], dtype=torch.float64)

    loss = nft_loss(v, v_old, target, sigma, advantages, beta, 5.0)
    samples = zip(v, v_old, target, sigma, advantages.tolist(), strict=True)
    expected = torch.stack([nft_by_hand(*sample, beta, 5.0) for sample in samples])
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)

    (gradient,) = torch.autograd.grad(loss.sum(), v)
    (expected_gradient,) = torch.autograd.grad(expected.sum(), v)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-12, atol=1e-15)


def test_nft_on_policy_moves_towards_targets_of_good_clips_alone():
    v = drawn(3, 8).requires_grad_()
    target = drawn(3, 8, seed=1)
    advantages = torch.tensor([2.0, -2.0, 0.0], dtype=torch.float64)
    nft_loss(v, v.detach(), target, torch.ones(3), advantages, 1.0, 5.0).sum().backward()
    along = (v.grad * (v.detach() - target)).sum(1)
    assert along[0] > 0 > along[1]
    assert not v.grad[2].any()


@pytest.mark.parametrize("algorithm", ["awm", "nft"])
def test_a_gaussian_world_moves_to_where_the_reward_is_higher(algorithm):
    """Clips of one number, x0 ~ N(m, 1), reward x0: the exact velocity is linear in x, and m must rise, spread kept.

    v(x, sigma) = E[z - x0 | x] = ((sigma - (1 - sigma)) (x - (1 - sigma) m)) / (sigma^2 + (1 - sigma)^2) - m.
    """
    generator = torch.Generator().manual_seed(0)
    schedule = matching_schedule(flow_sigmas(8, 1.0))
    m = torch.zeros((), dtype=torch.float64, requires_grad=True)

    def velocity(x, sigma, mean):
        variance = sigma**2 + (1 - sigma) ** 2
        return (2 * sigma - 1) * (x - (1 - sigma) * mean) / variance - mean

    for _ in range(60):
        x0 = m.detach() + torch.randn(256, 1, generator=generator, dtype=torch.float64)
        advantages = ((x0 - x0.mean()) / x0.std())[:, 0].clamp(-5, 5)
        steps = torch.randint(8, (256,), generator=generator)
        sigma = schedule.sigmas[steps].double()
        x, target = noised(x0, sigma, torch.randn(256, 1, generator=generator, dtype=torch.float64))
        v = velocity(x, sigma[:, None], m)
        if algorithm == "awm":
            log_prob = schedule.log_prob(steps, x, v, target)
            loss = policy_loss(log_prob - log_prob.detach(), advantages, 10.0)
        else:
            loss = nft_loss(v, v.detach(), target, sigma, advantages, 1.0, 5.0)
        (gradient,) = torch.autograd.grad(loss.mean(), m)
        m = (m - 0.05 * gradient).detach().requires_grad_()
    assert m > 0.3
