"""The closed-form velocity fields against brute force."""

import pytest
import torch

from research.studies.analytic import Mixture, Ring, marginal, off_manifold, sample_data, velocity

GENERATOR_SEED = 0
MIXTURE = Mixture(torch.tensor([[1.0, 0.5, 0.0], [-1.0, 0.2, 0.3]], dtype=torch.float64), width=0.3)
RING = Ring(dim=3, radius=1.5, width=0.2)


@pytest.mark.parametrize("world", [MIXTURE, RING], ids=["mixture", "ring"])
@pytest.mark.parametrize("sigma", [1.0, 0.7, 0.3])
def test_velocity_is_the_posterior_mean(world, sigma):
    """E[z - x0 | x] by importance sampling over a million data points: weights are the density of the z that fits."""
    generator = torch.Generator().manual_seed(GENERATOR_SEED)
    x0 = sample_data(world, 1_000_000, generator)
    x = torch.tensor([[0.4, -0.3, 0.2], [1.1, 0.6, -0.1]], dtype=torch.float64)
    for row, v in zip(x, velocity(world, x, sigma), strict=True):
        z = (row - (1 - sigma) * x0) / sigma
        weight = (-0.5 * z.square().sum(1)).softmax(0)
        torch.testing.assert_close(v, weight @ (z - x0), rtol=0, atol=0.02)


@pytest.mark.parametrize("world", [MIXTURE, RING], ids=["mixture", "ring"])
def test_marginal_moments(world):
    generator = torch.Generator().manual_seed(GENERATOR_SEED)
    x0 = sample_data(world, 400_000, generator)
    x = 0.6 * x0 + 0.4 * torch.randn(x0.shape, generator=generator, dtype=torch.float64)
    mean, var = marginal(world, 0.4)
    torch.testing.assert_close(x.mean(0), mean.expand(3), rtol=0, atol=0.01)
    assert (x - mean).square().mean().item() == pytest.approx(var, rel=0.01)


def test_off_manifold_distance_is_exact():
    x = torch.tensor([[3.0, 4.0, 0.0], [1.5, 0.0, 2.0]], dtype=torch.float64)
    torch.testing.assert_close(
        off_manifold(RING, x), torch.tensor([3.5, 2.0], dtype=torch.float64) / 3**0.5
    )
    torch.testing.assert_close(
        off_manifold(MIXTURE, MIXTURE.modes), torch.zeros(2, dtype=torch.float64)
    )
