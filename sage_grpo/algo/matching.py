"""Likelihood-free rivals of GRPO: clips are sampled without exploration noise, then noised again and matched.

A clip x0 and noise z give the state x = (1 - sigma) x0 + sigma z, where flow matching would teach the velocity z - x0,
the target. Good clips shall be matched better, bad ones worse than the old policy does, whose velocity is v_old:

    awm (arXiv 2509.25050)     GRPO's clipped ratio, with log p = -|v - target|^2 as the log-probability
    nft (arXiv 2509.16117)     r |v+ - target|^2 + (1 - r) |v- - target|^2      with v+- = v_old +- beta (v - v_old)

where r in [0, 1] rises with the advantage. Shapes: B samples, T noise levels, ... any sample shape.
"""

import torch
from torch import Tensor

from sage_grpo.algo.sde import Schedule


def matching_schedule(sigmas: Tensor) -> Schedule:
    """Tables with which a `Schedule` measures matches at the noise levels `sigmas` (T+1,), except the last.

    The target takes the place of the next state, whose mean is v and whose variance 1/2: then its log-probability is
    -|v - target|^2, the KL of two velocities |v - v_ref|^2, both averaged over elements, and all steps push equally.
    """
    zero, one = torch.zeros(len(sigmas) - 1), torch.ones(len(sigmas) - 1)
    return Schedule(
        sigmas.float(), a=zero, b=one, std=0.5**0.5 * one, inv_std=2**0.5 * one, log_norm=zero
    )


def noised(x0: Tensor, sigma: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """States and targets (B, ...) of clips at their noise levels (B,)."""
    level = sigma.view(-1, *[1] * (x0.ndim - 1))
    return (1 - level) * x0 + level * noise, noise - x0


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

    Errors are those of the predicted clip, sigma |v - target|, squared and divided by their mean, which carries no
    gradient: the paper's weight of noise levels. A sample without an advantage adds 0.
    """
    share, change = 0.5 + 0.5 * (advantages / largest).clamp(-1, 1), beta * (v - v_old)
    gaps = ((v_old + sign * change - target).flatten(1) for sign in (1, -1))
    better, worse = (
        sigma * gap.square().mean(1) / gap.detach().abs().mean(1).clamp_min(1e-5) for gap in gaps
    )
    return torch.where(advantages != 0, share * better + (1 - share) * worse, 0.0)
