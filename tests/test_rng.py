"""Draws are pure functions of their keys."""

import hashlib

import pytest
import torch

from sage_grpo import rng

SHAPE = (4, 3, 5)


def test_a_draw_depends_on_each_part_of_its_key():
    base = {"seed": 1, "purpose": "rollout_sde", "step": 2, "prompt": 3, "sample": 4, "index": 5}
    other = {"seed": 2, "purpose": "rollout_init", "step": 3, "prompt": 4, "sample": 5, "index": 6}
    draws = [rng.normal(SHAPE, **base)]
    draws += [rng.normal(SHAPE, **base | {part: value}) for part, value in other.items()]
    # parts must not run together either: (step 1, prompt 23) is not (step 12, prompt 3)
    draws.append(rng.normal(SHAPE, 1, "rollout_sde", step=1, prompt=23))
    draws.append(rng.normal(SHAPE, 1, "rollout_sde", step=12, prompt=3))
    assert len({hashlib.sha256(draw.numpy().tobytes()).digest() for draw in draws}) == len(draws)
    assert torch.equal(draws[0], rng.normal(SHAPE, **base))


def test_seeds_32_bits_apart_differ():
    """torch's CPU generator cannot tell these two seeds apart."""
    assert not torch.equal(
        rng.normal(SHAPE, 5, "rollout_init"), rng.normal(SHAPE, 5 + 2**32, "rollout_init")
    )


def test_the_global_generators_are_neither_read_nor_moved():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = rng.normal(SHAPE, 0, "rollout_init")
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(1)
    assert torch.equal(first, rng.normal(SHAPE, 0, "rollout_init"))


def test_values_are_pinned():
    """A change here would change every run and break resuming old ones."""
    values = rng.normal((3,), 42, "rollout_init", step=1, prompt=2, sample=3)
    torch.testing.assert_close(
        values, torch.tensor([-0.11331990, 0.95656484, -0.55006832]), rtol=1e-6, atol=0
    )
    assert rng.permutation(6, 42, "permutation", step=1).tolist() == [5, 3, 0, 4, 2, 1]


def test_normal_moments():
    draw = rng.normal((200, 500), 0, "rollout_init")
    assert draw.dtype == torch.float32
    assert abs(draw.mean().item()) < 0.013
    assert abs(draw.std().item() - 1) < 0.01


def test_permutation_and_integer():
    assert sorted(rng.permutation(20, 0, "permutation").tolist()) == list(range(20))
    drawn = {rng.integer(4, 0, "window", step=step) for step in range(100)}
    assert drawn == {0, 1, 2, 3}


def test_unknown_purpose_is_refused():
    with pytest.raises(
        ValueError, match="purpose is 'noise'; choose one of rollout_init, rollout_sde"
    ):
        rng.normal(SHAPE, 0, "noise")
