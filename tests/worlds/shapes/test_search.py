"""The coarse search: its errors are true errors, and its shortlist holds the truth."""

from dataclasses import replace

import torch

from sage_grpo.worlds.shapes.scenes import (
    ATTRIBUTES,
    BACKGROUNDS,
    object_mask,
    render,
    sample_scenes,
)
from sage_grpo.worlds.shapes.search import (
    grid_errors,
    make_grid,
    pair_errors,
    project_on_pair,
    shortlist,
)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def everything(count):
    return {
        name: torch.ones(count, len(words), dtype=torch.bool) for name, words in ATTRIBUTES.items()
    }


def test_its_pair_of_colors_alone_explains_a_rendered_clip():
    scenes = sample_scenes(60, seeded())
    errors = pair_errors(render(scenes, 5, 32, 32))
    true_pair = scenes.colour * len(BACKGROUNDS) + scenes.background
    assert torch.equal(errors.argmin(1), true_pair)
    smallest, second = errors.topk(2, largest=False).values.unbind(1)
    assert smallest.max() < 1e-6
    assert second.min() > 1e-6


def test_projection_splits_the_squared_error():
    scenes = sample_scenes(10, seeded())
    others = sample_scenes(10, seeded(1))
    clips = render(scenes, 5, 16, 16).double()
    target, length, rest = project_on_pair(clips, others.colour, others.background)
    mask = object_mask(others, 5, 16, 16).double()
    direct = (render(others, 5, 16, 16) - clips).square().flatten(1).sum(1)
    split = rest + length * (target - mask).square().flatten(1).sum(1)
    torch.testing.assert_close(split, direct, rtol=1e-5, atol=1e-5)


def test_grid_errors_are_the_true_errors_of_rendered_scenes():
    grid = make_grid(9, 20, 24, torch.zeros(()))
    clips = torch.rand(2, 9, 20, 24, 3, generator=seeded())
    colour = torch.tensor([3, 1])
    background = torch.tensor([0, 2])
    target, length, rest = project_on_pair(clips, colour, background)
    errors, places = grid_errors(grid, target, length, rest)
    for i in range(2):
        placed = replace(
            grid.cells,
            x=grid.x[places[i] % 24],
            y=grid.y[places[i] // 24],
            colour=colour[i].expand(len(grid.cells)),
            background=background[i].expand(len(grid.cells)),
        )
        direct = (render(placed, 9, 20, 24) - clips[i]).square().flatten(1).sum(1)
        torch.testing.assert_close(errors[i], direct, rtol=1e-2, atol=1e-2)


def test_shortlist_holds_the_true_classes():
    scenes = sample_scenes(60, seeded())
    owner, listed = shortlist(render(scenes, 9, 32, 32), everything(60), pairs=2, count=5)
    assert torch.equal(owner, torch.arange(60).repeat_interleave(5))
    equal = [getattr(listed, name) == getattr(scenes, name)[owner] for name in ATTRIBUTES]
    is_true = torch.stack(equal).all(0)
    assert is_true.view(60, 5).any(1).all()


def test_shortlist_keeps_to_the_allowed_classes():
    scenes = sample_scenes(20, seeded())
    allowed = everything(20)
    allowed["shape"][:] = torch.arange(7) == 4
    allowed["colour"][:] = torch.arange(6) == 2
    owner, listed = shortlist(render(scenes, 5, 32, 32), allowed, pairs=2, count=5)
    assert (listed.shape == 4).all()
    assert (listed.colour == 2).all()
    assert torch.equal(owner.unique(), torch.arange(20))
