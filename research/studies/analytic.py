"""Data distributions with a closed-form velocity field: what a perfect model would predict.

Sampling with them isolates the sampler: any error in a finished sample comes from the SDE and its discretization.
With x = (1 - sigma) x0 + sigma z and x0 = c + width * noise around a center c of the manifold, everything is Gaussian
given c, so only the posterior mean of c is needed. Shapes: N samples, D dimensions, K modes.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

Level = float | Tensor  # one value for all samples, or (N, 1)


class AnalyticWorld(Protocol):
    """A manifold of centers, thickened by Gaussian noise of std `width` in every dimension."""

    dim: int
    width: float

    def sample_centers(self, n: int, generator: torch.Generator) -> Tensor: ...

    def posterior_center(self, y: Tensor, signal: Level, var: Level) -> Tensor:
        """E[c | y] for y = signal c + N(0, var): (N, D)."""

    def nearest(self, x: Tensor) -> Tensor:
        """The nearest center of each x: (N, D)."""

    def moments(self) -> tuple[Tensor, float]:
        """Mean (D,) of the centers, and their variance averaged over dimensions."""


@dataclass(frozen=True)
class Mixture:
    """K equally likely modes."""

    modes: Tensor  # (K, D)
    width: float

    @property
    def dim(self) -> int:
        return self.modes.shape[1]

    def sample_centers(self, n: int, generator: torch.Generator) -> Tensor:
        return self.modes[torch.randint(len(self.modes), (n,), generator=generator)]

    def posterior_center(self, y: Tensor, signal: Level, var: Level) -> Tensor:
        # |y|^2 is common to all modes and drops out of the softmax
        energies = 0.5 * signal**2 * self.modes.square().sum(1)
        logits = (signal * y @ self.modes.T - energies) / var
        return logits.softmax(1) @ self.modes

    def nearest(self, x: Tensor) -> Tensor:
        return self.modes[self.nearest_mode(x)]

    def nearest_mode(self, x: Tensor) -> Tensor:
        return torch.cdist(x, self.modes).argmin(1)

    def moments(self) -> tuple[Tensor, float]:
        return self.modes.mean(0), self.modes.var(0, correction=0).mean().item()


@dataclass(frozen=True)
class Ring:
    """A curved one-dimensional manifold: a circle of the given radius in the first two of D dimensions."""

    dim: int
    radius: float
    width: float

    def sample_centers(self, n: int, generator: torch.Generator) -> Tensor:
        angle = 2 * torch.pi * torch.rand(n, generator=generator, dtype=torch.float64)
        return self._embed(torch.stack([angle.cos(), angle.sin()], 1))

    def posterior_center(self, y: Tensor, signal: Level, var: Level) -> Tensor:
        # the angle's posterior is von Mises, whose mean resultant length is I1(k)/I0(k)
        length = y[:, :2].norm(dim=1, keepdim=True)
        k = signal * self.radius * length / var
        shrink = torch.special.i1e(k) / torch.special.i0e(k)
        return self._embed(shrink * y[:, :2] / length)

    def nearest(self, x: Tensor) -> Tensor:
        return self._embed(torch.nn.functional.normalize(x[:, :2], dim=1))

    def moments(self) -> tuple[Tensor, float]:
        return torch.zeros(self.dim, dtype=torch.float64), self.radius**2 / self.dim

    def _embed(self, plane: Tensor) -> Tensor:
        return torch.nn.functional.pad(self.radius * plane, (0, self.dim - 2))


def velocity(world: AnalyticWorld, x: Tensor, sigma: Level) -> Tensor:
    """v = E[z - x0 | x] at noise level sigma in (0, 1]: (N, D)."""
    signal = 1 - sigma
    var = signal**2 * world.width**2 + sigma**2
    center = world.posterior_center(x, signal, var)
    gap = x - signal * center  # = signal * width * noise + sigma z
    return (sigma - signal * world.width**2) / var * gap - center


def sample_data(world: AnalyticWorld, n: int, generator: torch.Generator) -> Tensor:
    """True data x0: (N, D)."""
    centers = world.sample_centers(n, generator)
    noise = torch.randn(centers.shape, generator=generator, dtype=centers.dtype)
    return centers + world.width * noise


def marginal(world: AnalyticWorld, sigma: float) -> tuple[Tensor, float]:
    """Mean (D,) and per-dimension variance of x at noise level sigma."""
    mean, var = world.moments()
    return (1 - sigma) * mean, (1 - sigma) ** 2 * (var + world.width**2) + sigma**2


def off_manifold(world: AnalyticWorld, x: Tensor) -> Tensor:
    """Distance to the nearest center, per sqrt(D): (N,)."""
    return (x - world.nearest(x)).norm(dim=1) / world.dim**0.5
