"""Solvers of the ODE dx/dsigma = v: Euler, DPM-Solver++ (arXiv 2211.01095) and UniPC (arXiv 2302.04867) in flow form.

All but Euler move x by the model's clean video m = x - sigma v over steps h of the half log-SNR
lambda = log((1 - sigma) / sigma). For x = (1 - sigma) x0 + sigma z their first order is exactly Euler's x - delta v.
Higher orders add differences of m to what it was one and two steps before, m_1 and m_2:

    dpm      second order, multistep       x_next = x - delta v + w_1 (m - m_1)
    dpm3     third order, multistep        x_next = x - delta v + w_1 (m - m_1) + w_2 (m - m_2)
    unipc    dpm as predictor, corrected once the model has seen the next state: its m_next costs no further forward
             x_next = x - delta v + c_1 (m - m_1) + c (m_next - m)

The first step has nothing before it, and at sigma = 1 and sigma = 0 lambda is infinite: there the order is lower.

Shapes: n steps; ... nothing, or B clips that each have noise levels of their own.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

SOLVERS = ("euler", "dpm", "dpm3", "unipc")


@dataclass(frozen=True)
class OdeTables:
    """Numbers of each step, fp64; a solver uses as many earlier predictions as `history` has columns."""

    delta: Tensor  # (..., n) decrease of the noise level
    ratio: Tensor  # (..., n) next noise level over this one: x - delta v = ratio x + (1 - ratio) m
    history: Tensor  # (..., n, k) weights of m - m_j, for j = 1 to k
    # (..., n, k+1) of a corrector: weights of m - m_j, and of m_next - m; None if the solver has none
    correction: Tensor | None = None

    def to(self, x: Tensor) -> "OdeTables":
        """In the precision and on the device of x, by way of fp32."""
        correction = self.correction
        if correction is not None:
            correction = correction.float().to(x)
        return OdeTables(
            delta=self.delta.float().to(x),
            ratio=self.ratio.float().to(x),
            history=self.history.float().to(x),
            correction=correction,
        )


def ode_tables(sigmas: Tensor, solver: str = "euler") -> OdeTables:
    """The tables of a solver for noise levels `sigmas` (..., n+1).

    A level may be repeated: repeated levels give a zero-length step.
    """
    if solver not in SOLVERS:
        raise ValueError(f"solver is {solver!r}; choose one of {', '.join(SOLVERS)}")
    sigmas = sigmas.double()
    delta = -sigmas.diff()
    ratio = torch.where(sigmas[..., :-1] > 0, sigmas[..., 1:] / sigmas[..., :-1], 1.0)
    if solver == "euler":
        return OdeTables(delta, ratio, history=delta.new_zeros(*delta.shape, 0))

    h = torch.logit(1 - sigmas).diff()
    second = _second_order(sigmas, delta, h)
    if solver == "dpm":
        return OdeTables(delta, ratio, history=second[..., None])
    if solver == "dpm3":
        return OdeTables(delta, ratio, history=_third_order(ratio, h, second))
    return OdeTables(
        delta, ratio, history=second[..., None], correction=_correction(sigmas, ratio, h)
    )


def _second_order(sigmas: Tensor, delta: Tensor, h: Tensor) -> Tensor:
    """w_1 (..., n) of DPM-Solver++(2M): delta / sigma * h / (2 h_1), where both steps are finite; else 0."""
    weight = torch.zeros_like(delta)
    found = delta[..., 1:] / sigmas[..., 1:-1] * h[..., 1:] / (2 * h[..., :-1])
    weight[..., 1:] = torch.where(_usable(h[..., 1:]) & _usable(h[..., :-1]), found, 0.0)
    return weight


def _third_order(ratio: Tensor, h: Tensor, second: Tensor) -> Tensor:
    """w_1 and w_2 (..., n, 2) of DPM-Solver++(3M); the second order's where a step is not finite.

    With r_1 = h_1 / h and r_2 = h_2 / h, the first and second derivative of m, in units of h, are
    D_1 = (1 + q) (m - m_1) / r_1 - q (m_1 - m_2) / r_2 with q = r_1 / (r_1 + r_2), and
    D_2 = 2 ((m - m_1) / r_1 - (m_1 - m_2) / r_2) / (r_1 + r_2). They enter as a D_1 - b D_2. The published code
    lacks the 2 in D_2, which makes it second-order; with it, this is UniPC's predictor of third order.
    """
    weights = torch.stack([second, torch.zeros_like(second)], -1)
    step = h[..., 2:]
    one_before = h[..., 1:-1]
    two_before = h[..., :-2]
    a, b = _integrals(ratio[..., 2:], step)
    r_1 = one_before / step
    r_2 = two_before / step
    q = r_1 / (r_1 + r_2)

    curvature = 2 * b / (r_1 + r_2)
    # weights of (m - m_1) / r_1 and of (m_1 - m_2) / r_2, where m_1 - m_2 = (m - m_2) - (m - m_1)
    first_slope = a * (1 + q) - curvature
    second_slope = curvature - a * q
    found = torch.stack([first_slope / r_1 - second_slope / r_2, second_slope / r_2], -1)

    usable = _usable(step) & _usable(one_before) & _usable(two_before)
    weights[..., 2:, :] = torch.where(usable[..., None], found, weights[..., 2:, :])
    return weights


def _correction(sigmas: Tensor, ratio: Tensor, h: Tensor) -> Tensor:
    """c_1 and c (..., n, 2) of UniPC's corrector of second order, B(h) = e^h - 1; of first order without an m_1.

    The last step to sigma = 0 is not corrected: nothing is predicted after it.
    """
    scale = 1 - ratio  # alpha_next (1 - e^-h)
    first_order = torch.where(sigmas[..., 1:] > 0, scale / 2, 0.0)
    weights = torch.stack([torch.zeros_like(first_order), first_order], -1)

    step = h[..., 1:]
    before = h[..., :-1]
    decay = torch.expm1(-step)
    phi = -decay / step - 1
    b_1 = phi / decay
    b_2 = 2 * (-phi / step - 0.5) / decay
    rho = (b_1 - b_2) / (1 + before / step)
    found = torch.stack([rho * step / before, b_1 - rho], -1) * scale[..., 1:, None]

    usable = _usable(step) & _usable(before)
    weights[..., 1:, :] = torch.where(usable[..., None], found, weights[..., 1:, :])
    return weights


def _integrals(ratio: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """alpha_next times the integrals that weigh slope and curvature of m: (e^-h - 1) / h + 1 and its next term.

    alpha_next (1 - e^-h) = 1 - ratio gives alpha_next without the noise levels.
    """
    decay = torch.expm1(-h)
    alpha = -(1 - ratio) / decay
    return alpha * (decay / h + 1), alpha * ((decay + h) / h.square() - 0.5)


def _usable(h: Tensor) -> Tensor:
    return h.isfinite() & (h > 0)
