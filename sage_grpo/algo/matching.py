"""Likelihood-free alternatives to GRPO: sample clips without exploration noise, then re-noise and match them.

A clip x0 and noise z give the state x = (1 - sigma) x0 + sigma z. Flow matching would regress its velocity onto the
target z - x0. Relative to the old policy, match good clips more closely and bad ones less:

    awm (arXiv 2509.25050)     GRPO's clipped ratio, with log p = -|v - target|^2 as the log-probability
    nft (arXiv 2509.16117)     r |v+ - target|^2 + (1 - r) |v- - target|^2      with v+- = v_old +- beta (v - v_old)

v_old is the old policy's velocity, and r in [0, 1] rises with the advantage.
Shapes: B samples, T noise levels, ... any sample shape.
"""

import torch
from torch import Tensor

from sage_grpo.algo.sde import Schedule


def matching_schedule(sigmas: Tensor) -> Schedule:
    """Tables with which a `Schedule` scores matches at the noise levels `sigmas` (T+1,), except the last.

    The target takes the place of the next state, as a sample of a Gaussian with mean v and variance 1/2. Its
    log-probability is then -|v - target|^2 and the KL of two velocities |v - v_ref|^2, both averaged over elements,
    with the same weight at every step.
    """
    zeros = torch.zeros(len(sigmas) - 1)
    ones = torch.ones(len(sigmas) - 1)
    return Schedule(
        sigmas.float(),
        a=zeros,
        b=ones,
        std=0.5**0.5 * ones,
        inv_std=2**0.5 * ones,
        log_norm=zeros,
    )


def noised(x0: Tensor, sigma: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """States and targets, (B, ...) each, of clips x0 (B, ...) at their noise levels sigma (B,)."""
    level = sigma.view(-1, *[1] * (x0.ndim - 1))
    state = (1 - level) * x0 + level * noise
    target = noise - x0
    return state, target


def nft_loss(
    v: Tensor,
    v_old: Tensor,
    target: Tensor,
    sigma: Tensor,
    advantages: Tensor,
    beta: float,
    largest: float,
) -> Tensor:
    """DiffusionNFT's loss of each sample, (B,); r is 1/2 at advantage 0, and 1 at `largest`.

    v, v_old, target: (B, ...). sigma, advantages: (B,). A sample whose advantage is 0 adds 0.
    """
    # r: how much of the sample counts as positive (the paper's optimality probability)
    r = 0.5 + 0.5 * (advantages / largest).clamp(-1, 1)

    # implicit policies v+- = v_old +- beta (v - v_old)
    change = beta * (v - v_old)
    positive = _clip_error(v_old + change, target, sigma)
    negative = _clip_error(v_old - change, target, sigma)

    # r |v+ - target|^2 + (1 - r) |v- - target|^2
    loss = r * positive + (1 - r) * negative
    return torch.where(advantages != 0, loss, 0.0)


def _clip_error(v: Tensor, target: Tensor, sigma: Tensor) -> Tensor:
    """Error of the predicted clip, e = sigma (v - target), as mean(e^2) / mean(|e|): (B,).

    The denominator carries no gradient: it is the paper's weight, which balances noise levels. One factor of sigma
    cancels.
    """
    gap = (v - target).flatten(1)
    weight = gap.detach().abs().mean(1).clamp_min(1e-5)
    return sigma * gap.square().mean(1) / weight
