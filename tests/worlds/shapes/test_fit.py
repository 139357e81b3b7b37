"""The fit: its equations against differences, and that it finds scenes again within bounds."""

from dataclasses import replace
from itertools import pairwise

import torch

from sage_grpo.worlds.shapes.fit import (
    bounds,
    fit,
    normal_equations,
    parameters,
    project,
    with_parameters,
)
from sage_grpo.worlds.shapes.scenes import object_mask, sample_scenes


def doubles(count, seed=0):
    scenes = sample_scenes(count, torch.Generator().manual_seed(seed))
    return with_parameters(scenes, parameters(scenes).double())


def test_normal_equations_equal_differences():
    scenes = doubles(6)
    target = object_mask(doubles(6, seed=1), 5, 20, 16)

    def errors(values):
        return (object_mask(with_parameters(scenes, values), 5, 20, 16) - target).flatten(1)

    values = parameters(scenes)
    steps = 1e-6 * torch.eye(4, dtype=values.dtype)
    columns = [(errors(values + step) - errors(values - step)) / 2e-6 for step in steps]
    jacobian = torch.stack(columns, -1)  # (N,pixels,P)
    error = errors(values)
    cost, gradient, matrix = normal_equations(scenes, target)
    torch.testing.assert_close(cost, error.square().sum(1))
    torch.testing.assert_close(gradient, (jacobian * error[..., None]).sum(1), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(matrix, jacobian.transpose(1, 2) @ jacobian, atol=1e-5, rtol=1e-6)


def test_fit_finds_the_scene_again_from_the_middle_of_its_classes():
    scenes = doubles(40)
    target = object_mask(scenes, 9, 32, 32)
    low, high = bounds(scenes)
    middle = (low + high)[:, 2:] / 2
    start = replace(
        scenes, x=scenes.x + 0.01, y=scenes.y - 0.01, radius=middle[:, 0], travel=middle[:, 1]
    )
    fitted, cost = fit(start, target, 10)
    assert cost.max() < 1e-12
    torch.testing.assert_close(parameters(fitted), parameters(scenes), atol=1e-6, rtol=0)


def test_fit_stays_within_the_classes_and_never_gets_worse():
    truth = doubles(40)
    start = replace(doubles(40, seed=1), shape=truth.shape)
    target = object_mask(truth, 9, 32, 32)
    costs = [fit(start, target, steps)[1] for steps in range(6)]
    assert all((later <= earlier).all() for earlier, later in pairwise(costs))
    assert costs[-1].sum() < 0.9 * costs[0].sum()
    fitted, _ = fit(start, target, 10)
    low, high = bounds(fitted)
    assert (parameters(fitted) >= low - 1e-12).all()
    assert (parameters(fitted) <= high + 1e-12).all()


def test_project_moves_only_what_is_out_of_bounds():
    scenes = doubles(20)
    torch.testing.assert_close(parameters(project(scenes)), parameters(scenes), atol=0, rtol=0)
    moved = project(replace(scenes, radius=scenes.radius + 1, x=scenes.x - 1))
    low, high = bounds(moved)
    torch.testing.assert_close(moved.radius, high[:, 2])
    torch.testing.assert_close(moved.x, low[:, 0])
