"""Exploration SDEs: every sampler is a table of three numbers per denoising step.

    x_next ~ N(a x + b v, std^2 I)            a, b, std depend only on (sigma, sigma_next, eta)

sigma is the noise level, 1 = pure noise, 0 = video; x = (1 - sigma) x0 + sigma z; the model predicts v = E[z - x0 | x].
A step goes from `sigma` to `sigma_next` < sigma; delta = sigma - sigma_next. The variance defines the sampler, together
with one of two means:

    Euler-Maruyama (Eq. 7)     x - delta v + std^2/2 score            with the exact score -(x + (1 - sigma) v) / sigma
    coefficient preserving     (1 - sigma_next) x0_hat + r z_hat      with r^2 = sigma_next^2 - std^2

Equation numbers refer to SAGE-GRPO (arXiv 2603.21872). docs/method.md lists where we deviate from the paper.
To try a sampler, give --sde_type FILE.py:NAME; to keep it, add a row to SDES, and its name to SDE_TYPES in
config/fields.py.

Shapes: B samples, T steps, ... any sample shape.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

Step = int | Tensor  # a denoising step for all samples, or one per sample as a LongTensor (B,)
SIGMA_CEILING = 0.997  # (1 - sigma) >= 3e-3, the paper's Appendix A.2
MIN_STD = 1e-6  # less noise than this is lost to fp32 rounding: the step counts as deterministic


@dataclass(frozen=True)
class Schedule:
    """The transition tables of one sampler; fp32, one row per step. Build it with `build_schedule`."""

    sigmas: Tensor  # (T+1,) decreasing to 0
    a: Tensor  # (T,)
    b: Tensor  # (T,)
    std: Tensor  # (T,), 0 at deterministic steps
    inv_std: Tensor  # (T,), 1/std, and 0 at deterministic steps
    log_norm: Tensor  # (T,), log of the density's peak, and 0 at deterministic steps

    @property
    def num_steps(self) -> int:
        return len(self.std)

    @property
    def stochastic(self) -> Tensor:
        """(T,) bool: the steps that have a log-probability. The others are never trained."""
        return self.std > 0

    def to(self, device: torch.device | str) -> "Schedule":
        return Schedule(
            **{field.name: getattr(self, field.name).to(device) for field in fields(self)}
        )

    def mean(self, i: Step, x: Tensor, v: Tensor) -> Tensor:
        """Mean of the next state, (B, ...)."""
        return _per_sample(self.a, i, x) * x + _per_sample(self.b, i, x) * v

    def step(self, i: Step, x: Tensor, v: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Next state (B, ...) and its log-probability (B,).

        The log-probability is computed from the rounded next state, not from the noise: only then does `log_prob`
        return the same bits during training, so that the first ratio is exactly 1.
        """
        x_next = self.mean(i, x, v) + _per_sample(self.std, i, x) * noise
        return x_next, self.log_prob(i, x, v, x_next)

    def log_prob(self, i: Step, x: Tensor, v: Tensor, x_next: Tensor) -> Tensor:
        """Gaussian log-density of the transition, averaged over the elements of a sample: (B,).

        0, with a zero gradient, at deterministic steps.
        """
        z = (x_next - self.mean(i, x, v)) * _per_sample(self.inv_std, i, x)
        return self.log_norm[i] - 0.5 * z.square().flatten(1).mean(1)

    def kl(self, i: Step, v: Tensor, v_ref: Tensor) -> Tensor:
        """KL between the transitions of two velocities from the same state, averaged over elements: (B,).

        With equal covariances: b^2 (v - v_ref)^2 / (2 std^2) (Eq. 11 with the variance in its denominator).
        """
        wide = torch.promote_types(v.dtype, torch.float32)
        gap = _per_sample(self.b * self.inv_std, i, v) * (v.to(wide) - v_ref)
        return 0.5 * gap.square().flatten(1).mean(1)

    def window(self, steps: Sequence[int]) -> "Schedule":
        """This sampler with noise only in `steps`; the others run the ODE."""
        inside = torch.tensor(
            [step in steps for step in range(self.num_steps)], device=self.std.device
        )
        ode = build_schedule("ode", self.sigmas, 0.0)
        rows = {
            f.name: torch.where(inside, getattr(self, f.name), getattr(ode, f.name))
            for f in fields(self)[1:]
        }
        return Schedule(sigmas=self.sigmas, **rows)


def flow_sigmas(num_steps: int, shift: float, start: float = 1.0) -> Tensor:
    """Noise levels (T+1,) from `start` to 0, fp64: u evenly spaced, sigma = shift u / (1 + (shift - 1) u)."""
    if num_steps < 1:
        raise ValueError(f"num_sampling_steps is {num_steps}; at least 1 step is needed")
    if not 0 < shift < math.inf:
        raise ValueError(f"timestep_shift is {shift}; it must be positive (5 for 480p, 9 for 720p)")
    u = torch.linspace(start / (shift - (shift - 1) * start), 0, num_steps + 1, dtype=torch.float64)
    return shift * u / (1 + (shift - 1) * u)


def sage_variance(
    sigma: Tensor, sigma_next: Tensor, eta: float, ceiling: float = SIGMA_CEILING
) -> Tensor:
    """Eq. 5: the integral of eta^2 s/(1-s) over the step, eta^2 (-delta + log((1 - sigma_next) / (1 - sigma))).

    The logarithm starts at `ceiling`; a step above it would get a negative variance, so it gets no noise.
    """
    top = sigma.clamp(max=ceiling)
    log_ratio = torch.log1p((top - sigma_next) / (1 - top))
    return eta**2 * (log_ratio - (sigma - sigma_next)).clamp(min=0)


def dance_variance(sigma: Tensor, sigma_next: Tensor, eta: float) -> Tensor:
    """DanceGRPO: constant diffusion coefficient."""
    return eta**2 * (sigma - sigma_next)


def flow_variance(
    sigma: Tensor, sigma_next: Tensor, eta: float, ceiling: float | None = None
) -> Tensor:
    """Flow-GRPO: the integrand of Eq. 5 at the start of the step, times delta.

    At sigma = 1 it would be infinite; the published code uses the schedule's second sigma in the denominator.
    """
    if ceiling is None:
        ceiling = float(sigma[sigma < 1].max()) if (sigma < 1).any() else 0.0
    return eta**2 * sigma / (1 - sigma.clamp(max=ceiling)) * (sigma - sigma_next)


def cps_split(sigma: Tensor, sigma_next: Tensor, eta: float) -> tuple[Tensor, Tensor]:
    """Flow-CPS: the noise part of the next state, `sigma_next`, split into (std, r) on a circle."""
    return sigma_next * math.sin(eta * math.pi / 2), sigma_next * math.cos(eta * math.pi / 2)


def precise_split(sigma: Tensor, sigma_next: Tensor, eta: float) -> tuple[Tensor, Tensor]:
    """(std, r) of the exact solution of the SDE of Eq. 5 for a frozen x0_hat (arXiv 2605.23522).

    std^2 = sigma_next^2 (1 - rho^(eta^2)) and r = sigma_next rho^(eta^2/2), both without cancellation; xlogy because
    rho = 0 at the ends of the schedule, and eta may be 0.
    """
    rho = sigma_next * (1 - sigma) / (sigma * (1 - sigma_next))
    log_power = torch.special.xlogy(eta**2, rho)
    return sigma_next * (-torch.expm1(log_power)).sqrt(), sigma_next * (log_power / 2).exp()


Table = tuple[Tensor, Tensor, Tensor]  # a, b, std
Variance = Callable[[Tensor, Tensor, float], Tensor]  # of sigma, sigma_next and eta
Sampler = Callable[[Tensor, Tensor, float], Table]


def euler_maruyama(variance: Variance) -> Sampler:
    def table(sigma: Tensor, sigma_next: Tensor, eta: float) -> Table:
        var = variance(sigma, sigma_next, eta)
        return (
            1 - var / (2 * sigma),
            sigma_next - sigma - var * (1 - sigma) / (2 * sigma),
            var.sqrt(),
        )

    return table


def coefficient_preserving(
    split: Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]],
) -> Sampler:
    def table(sigma: Tensor, sigma_next: Tensor, eta: float) -> Table:
        std, r = split(sigma, sigma_next, eta)
        return 1 - sigma_next + r, (1 - sigma) * r - sigma * (1 - sigma_next), std

    return table


SDES: dict[str, Sampler] = {
    "sage_grpo": euler_maruyama(sage_variance),
    "dance_grpo": euler_maruyama(dance_variance),
    "flow_grpo": euler_maruyama(flow_variance),
    "cps": coefficient_preserving(cps_split),
    "precise": coefficient_preserving(precise_split),
    "ode": euler_maruyama(lambda sigma, sigma_next, eta: torch.zeros_like(sigma)),
}


def build_schedule(
    sde_type: str | Sampler | Variance, sigmas: Tensor | Sequence[float], eta: float
) -> Schedule:
    """Tables of one sampler over the noise levels `sigmas` (T+1,), computed in fp64 and stored in fp32.

    `sde_type` is a row of SDES, or a function of your own that returns a table, or only a variance for Euler-Maruyama.
    """
    sigmas = torch.as_tensor(sigmas, dtype=torch.float64)
    _check(sde_type, sigmas, eta)
    sampler = SDES[sde_type] if isinstance(sde_type, str) else sde_type
    sigma = sigmas[:-1]
    sigma_next = sigmas[1:]
    result = sampler(sigma, sigma_next, eta)
    if isinstance(result, Tensor):
        variance = result
        result = euler_maruyama(lambda *_: variance)(sigma, sigma_next, eta)
    a, b, std = result

    for name, column in (("a", a), ("b", b), ("std", std)):
        if column.shape != sigma_next.shape or not bool(column.isfinite().all()):
            raise ValueError(
                f"the sampler's {name} is {column.tolist()}; it must be a finite number for each step"
            )

    noisy = std >= MIN_STD
    std = torch.where(noisy, std, 0.0)
    inv_std = torch.where(noisy, 1 / std, 0.0)
    log_norm = torch.where(noisy, -std.log() - 0.5 * math.log(2 * math.pi), 0.0)
    return Schedule(*(column.float() for column in (sigmas, a, b, std, inv_std, log_norm)))


def _check(sde_type: object, sigmas: Tensor, eta: float) -> None:
    if isinstance(sde_type, str) and sde_type not in SDES:
        raise ValueError(f"sde_type is {sde_type!r}; choose one of {', '.join(SDES)}")
    if not 0 <= eta < math.inf:
        raise ValueError(f"eta is {eta}; the exploration scale must be finite and at least 0")
    if sde_type == "cps" and eta > 1:
        raise ValueError(
            f"eta is {eta} with sde_type cps; it is a share of a quarter circle there, at most 1"
        )
    if sigmas.ndim != 1 or len(sigmas) < 2 or not bool(torch.isfinite(sigmas).all()):
        raise ValueError(
            f"sigmas must be a list of at least two finite noise levels, not {sigmas.tolist()}"
        )
    if sigmas[0] > 1 or sigmas[-1] != 0 or not bool((sigmas.diff() < 0).all()):
        raise ValueError(
            f"sigmas must fall from at most 1 to exactly 0, each below the one before: {sigmas.tolist()}"
        )


def _per_sample(column: Tensor, i: Step, like: Tensor) -> Tensor:
    """Row i of a table, shaped to scale `like` (B, ...). Never 0-dim, so that a bf16 velocity is promoted to fp32."""
    return column[i].reshape(-1, *[1] * (like.ndim - 1))
