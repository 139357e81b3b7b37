import math

import pytest
import torch

from sage_grpo.worlds.shapes.geometry import NAMES, THICKNESS, coverage, coverage_slopes


def unit_grid(cx, cy, radius, side=24):
    pixels = torch.arange(side, dtype=torch.float64) + 0.5
    return (pixels - cx) / radius, (pixels[:, None] - cy) / radius, radius


@pytest.mark.parametrize("shape", range(len(NAMES)), ids=NAMES)
def test_slopes_equal_autograd(shape):
    place = tuple(torch.tensor(value, dtype=torch.float64) for value in (11.8, 12.3, 7.3))
    expected = torch.autograd.functional.jacobian(lambda *p: coverage(shape, *unit_grid(*p)), place)
    mask, *slopes = coverage_slopes(shape, *unit_grid(*place))
    torch.testing.assert_close(mask, coverage(shape, *unit_grid(*place)))
    for slope, autograd in zip(slopes, expected, strict=True):
        torch.testing.assert_close(slope, autograd, atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize(
    ("name", "area"),
    [
        ("circle", math.pi),
        ("square", 1.76**2),
        ("triangle", 0.95 * 1.95 + 0.05),  # height 1.95, half base 0.975
        ("L", 2 * THICKNESS * (1.56 + 1.15) + math.pi * THICKNESS**2 * 1.25 - THICKNESS**2),
        ("T", 2 * THICKNESS * (1.5 + 1.56) + 1.5 * math.pi * THICKNESS**2 - 2 * THICKNESS**2),
    ],
)
def test_area_is_that_of_the_outline(name, area):
    side = 400
    mask = coverage(NAMES.index(name), *unit_grid(side / 2, side / 2, torch.tensor(150.0), side))
    assert mask.sum().item() / 150**2 == pytest.approx(area, rel=0.01)


@pytest.mark.parametrize("shape", range(len(NAMES)), ids=NAMES)
def test_outline_lies_within_one_radius_along_each_axis(shape):
    u = torch.linspace(-1.5, 1.5, 301)
    mask = coverage(shape, u, u[:, None], torch.tensor(100.0))
    outside = (u.abs() > 1.02) | (u.abs() > 1.02)[:, None]
    assert mask[outside].max() < 0.02
    assert mask.max() > 0.99
