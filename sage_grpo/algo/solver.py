"""Solvers of the ODE dx/dsigma = v: Euler, and DPM-Solver++(2M) (arXiv 2211.01095) in its flow form.

DPM-Solver++ moves x by the model's clean video x0_hat = x - sigma v over steps h of the half log-SNR
lambda = log((1 - sigma) / sigma). For x = (1 - sigma) x0 + sigma z its first order is exactly Euler's x - delta v, and
its second order adds what x0_hat changed since the step before:

    x_next = x - delta v + delta / sigma * h / (2 h_before) * (x0_hat - x0_hat_before)

The first step has nothing before it, and at sigma = 1 and sigma = 0 lambda is infinite: those steps are Euler's.

Shapes: n steps; ... nothing, or B clips that each have noise levels of their own.
"""

import torch
from torch import Tensor

SOLVERS = ("euler", "dpm")


def ode_tables(sigmas: Tensor, solver: str = "euler") -> tuple[Tensor, Tensor]:
    """delta (..., n) and the factor of x0_hat - x0_hat_before (..., n), fp64, for noise levels `sigmas` (..., n+1).

    A level may be repeated: repeated levels give a zero-length step.
    """
    if solver not in SOLVERS:
        raise ValueError(f"solver is {solver!r}; choose one of {', '.join(SOLVERS)}")
    sigmas = sigmas.double()
    delta, factor = -sigmas.diff(), torch.zeros_like(sigmas[..., 1:])
    if solver == "dpm":
        h = torch.logit(1 - sigmas).diff()
        found = delta[..., 1:] / sigmas[..., 1:-1] * h[..., 1:] / (2 * h[..., :-1])
        factor[..., 1:] = torch.where(
            h[..., 1:].isfinite() & h[..., :-1].isfinite() & (h[..., :-1] > 0), found, 0.0
        )
    return delta, factor
