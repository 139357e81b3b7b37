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


def test_own_pair_of_colours_explains_a_rendered_clip():
    scenes = sample_scenes(60, seeded())
    errors = pair_errors(render(scenes, 5, 32, 32))
    own = scenes.colour * len(BACKGROUNDS) + scenes.background
    assert torch.equal(errors.argmin(1), own)
    assert (
        errors.gather(1, own[:, None]).max()
        < 1e-6
        < errors.topk(2, largest=False).values[:, 1].min()
    )


def test_projection_splits_the_squared_error():
    scenes, others = sample_scenes(10, seeded()), sample_scenes(10, seeded(1))
    clips = render(scenes, 5, 16, 16).double()
    target, length, rest = project_on_pair(clips, others.colour, others.background)
    mask = object_mask(others, 5, 16, 16).double()
    direct = (render(others, 5, 16, 16) - clips).square().flatten(1).sum(1)
    torch.testing.assert_close(
        rest + length * (target - mask).square().flatten(1).sum(1), direct, rtol=1e-5, atol=1e-5
    )


def test_grid_errors_are_the_true_errors_of_rendered_scenes():
    grid = make_grid(9, 20, 24, torch.zeros(()))
    clips = torch.rand(2, 9, 20, 24, 3, generator=seeded())
    colour, background = torch.tensor([3, 1]), torch.tensor([0, 2])
    errors, places = grid_errors(grid, *project_on_pair(clips, colour, background))
    for i in range(2):
        fields = dict(grid.cells.items())
        fields |= {"x": grid.x[places[i] % 24], "y": grid.y[places[i] // 24]}
        fields |= {
            "colour": colour[i].expand(len(grid.cells)),
            "background": background[i].expand(len(grid.cells)),
        }
        direct = (
            (render(type(grid.cells)(**fields), 9, 20, 24) - clips[i]).square().flatten(1).sum(1)
        )
        torch.testing.assert_close(errors[i], direct, rtol=1e-2, atol=1e-2)


def test_shortlist_holds_the_true_classes():
    scenes = sample_scenes(60, seeded())
    owner, found = shortlist(render(scenes, 9, 32, 32), everything(60), pairs=2, count=5)
    assert torch.equal(owner, torch.arange(60).repeat_interleave(5))
    same = torch.stack(
        [getattr(found, name) == getattr(scenes, name)[owner] for name in ATTRIBUTES]
    ).all(0)
    assert same.view(60, 5).any(1).all()


def test_shortlist_keeps_to_the_allowed_classes():
    scenes = sample_scenes(20, seeded())
    allowed = everything(20)
    allowed["shape"][:] = torch.arange(7) == 4
    allowed["colour"][:] = torch.arange(6) == 2
    owner, found = shortlist(render(scenes, 5, 32, 32), allowed, pairs=2, count=5)
    assert (found.shape == 4).all() and (found.colour == 2).all()
    assert torch.equal(owner.unique(), torch.arange(20))
