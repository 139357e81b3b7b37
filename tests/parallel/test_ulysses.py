"""A forward split across ranks equals a single-rank forward, in values and gradients."""

import functools

import pytest
import torch
from torch._dynamo.utils import counters

from sage_grpo.models.hunyuan15.transformer import PackedTransformer
from sage_grpo.parallel.ulysses import Shares, part_sizes
from tests.dist import run_ranks
from tests.narrow_glyphs import GLYPH_DIM
from tests.smallest_run import slow

GRID = (3, 5, 3)  # 45 video tokens: no multiple of 2 or 4


def draw(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def spread(ranks, folder, text_tokens, glyph_tokens, recomputed):
    """Velocity, and the sum over the ranks of each gradient of one loss."""
    model = PackedTransformer.from_pretrained(folder, subfolder="transformer", dtype=torch.float64)
    model.split_sequence(ranks.sequence_group)
    model.prepare_blocks(recomputed, keep_attention=recomputed > 0)
    x = draw(2, 17, *GRID, seed=1)
    timestep = torch.tensor([978.26, 31.5])
    text = draw(1, text_tokens, 64, seed=2)
    glyph = draw(1, glyph_tokens, GLYPH_DIM, seed=3)
    velocity = model(x, timestep, text, glyph)
    (velocity * draw(*velocity.shape, seed=5)).sum().backward()
    ranks.sum_gradients(model.parameters())
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return velocity.detach(), gradients


@pytest.mark.parametrize("world, text_tokens, glyph_tokens, recomputed", [
    (2, 7, 0, 0.0),
    (2, 6, 3, 1.0),
    slow(4, 3, 0, 1.0),  # the last rank has no text
    slow(4, 1, 0, 0.5),
])  # fmt: skip
def test_ranks_give_the_velocity_and_gradients_of_one(
    tiny_folder, world, text_tokens, glyph_tokens, recomputed
):
    case = (tiny_folder, text_tokens, glyph_tokens, recomputed)
    ((expected, expected_gradients),) = run_ranks(1, spread, *case)
    assert len(expected_gradients) > 80
    for velocity, gradients in run_ranks(world, spread, *case, sp_size=world):
        torch.testing.assert_close(velocity, expected, rtol=1e-12, atol=1e-12)
        assert gradients.keys() == expected_gradients.keys()
        for name, gradient in expected_gradients.items():
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-10, atol=1e-10, msg=name)


@pytest.mark.parametrize(
    "num_first, expected", [(0, [0, 0, 0]), (2, [2, 0, 0]), (5, [4, 1, 0]), (10, [4, 3, 3])]
)
def test_the_first_tokens_are_on_the_first_ranks(num_first, expected):
    shares = Shares(10, 0, None, None)
    shares.video = part_sizes(10, 3)
    for shares.rank, count in enumerate(expected):
        assert shares.own_first(num_first) == count


@pytest.mark.parametrize(
    "length, count, sizes",
    [(10, 4, [3, 3, 2, 2]), (3, 4, [1, 1, 1, 0]), (0, 2, [0, 0]), (4, 1, [4])],
)
def test_parts_are_as_even_as_can_be(length, count, sizes):
    assert part_sizes(length, count) == sizes


def refused(ranks, folder):
    model = PackedTransformer.from_pretrained(folder, subfolder="transformer")
    try:
        model.split_sequence(ranks.sequence_group)
    except ValueError as error:
        return str(error)


def test_heads_that_cannot_be_shared_are_refused(tiny_folder):
    assert set(run_ranks(3, refused, tiny_folder, sp_size=3)) == {
        "sp_size is 3; it must divide the model's 4 heads"
    }


def compiled(ranks, folder, wanted):
    """Velocities of three lengths of text without and with gradients, and the graphs that were made for them."""
    # this process has no other work
    torch.compile = functools.partial(torch.compile, backend="eager")
    model = PackedTransformer.from_pretrained(folder, subfolder="transformer", dtype=torch.float64)
    model.split_sequence(ranks.sequence_group)
    model.prepare_blocks(recomputed=1.0, keep_attention=True, compiled=wanted)
    x = draw(1, 17, *GRID, seed=1)
    timestep = torch.tensor([500.0])
    glyph = draw(1, 0, GLYPH_DIM, seed=3)
    pairs = []
    for length in (7, 5, 6):
        text = draw(1, length, 64, seed=length)
        with torch.no_grad():
            rollout = model(x, timestep, text, glyph)
        velocity = model(x, timestep, text, glyph)
        velocity.square().sum().backward()
        pairs.append((rollout, velocity.detach()))
    return pairs, counters["stats"]["unique_graphs"], len(counters["graph_break"])


@pytest.mark.slow
def test_compiled_blocks_of_a_split_sequence_run_one_arithmetic(tiny_folder):
    """Slow: compiles on two ranks; test_transformer.py compiles in one process."""
    ((expected, *_),) = run_ranks(1, compiled, tiny_folder, False)
    for pairs, graphs, breaks in run_ranks(2, compiled, tiny_folder, True, sp_size=2):
        for (rollout, velocity), (_, plain) in zip(pairs, expected, strict=True):
            assert torch.equal(rollout, velocity)
            torch.testing.assert_close(velocity, plain, rtol=1e-12, atol=1e-12)
        assert graphs <= 4 and not breaks  # two kinds of blocks, one length and then any
