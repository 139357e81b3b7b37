"""Sharded parameters: which rows a rank has, and that stale values are never used."""

import torch
from torch import nn

from sage_grpo.parallel.fsdp import (
    copy_into,
    full_tensor,
    gathered,
    local_shard,
    reduce_gradients_in_next_backward,
    rows,
    shard,
    shard_like,
)
from tests.dist import run_ranks


def model():
    """Rows that two ranks cannot halve."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3)).double()


def inputs(rank):
    return torch.full((2, 3), rank + 1.0, dtype=torch.float64)


def parts(ranks):
    sharded = model()
    shard(sharded, list(sharded), ranks.shards, torch.float64)
    weight = sharded[0].weight
    start, stop = rows(weight)
    again = shard_like(weight, local_shard(weight).detach().clone())
    return (
        (start, stop),
        local_shard(weight).detach(),
        full_tensor(weight).detach(),
        full_tensor(again),
    )


def test_each_rank_has_its_rows_and_all_have_the_whole():
    found, plain = run_ranks(2, parts, sharded=True), model()[0].weight
    assert [where for where, *_ in found] == [(0, 3), (3, 5)]
    for (start, stop), mine, all_of_it, again in found:
        assert torch.equal(mine, plain[start:stop])
        assert torch.equal(all_of_it, plain) and torch.equal(again, plain)


def outputs(ranks):
    """Before and after the weights change, inside and outside of the context that keeps them gathered."""
    sharded = model()
    shard(sharded, list(sharded), ranks.shards, torch.float64)
    x, seen = inputs(0), []
    with torch.no_grad():
        with gathered(sharded):
            seen += [sharded(x), sharded(x)]
        doubled = {name: 2 * local_shard(p) for name, p in sharded.named_parameters()}
        copy_into(dict(sharded.named_parameters()), doubled)
        seen.append(sharded(x))
        with gathered(sharded, wanted=False):
            copy_into(
                dict(sharded.named_parameters()),
                {name: value / 2 for name, value in doubled.items()},
            )
            seen.append(sharded(x))
    return seen


def test_changed_weights_are_seen_by_the_next_forward():
    plain, x = model(), inputs(0)
    with torch.no_grad():
        before = plain(x)
        for parameter in plain.parameters():
            parameter.mul_(2)
        after = plain(x)
    for first, second, third, fourth in run_ranks(2, outputs, sharded=True):
        assert (
            torch.equal(first, before)
            and torch.equal(second, before)
            and torch.equal(fourth, before)
        )
        assert torch.equal(third, after) and not torch.equal(after, before)


def reduced(ranks, once):
    sharded = model()
    shard(sharded, list(sharded), ranks.shards, torch.float64)
    for number in range(3):
        reduce_gradients_in_next_backward(sharded, not once or number == 2)
        sharded(inputs(ranks.rank) + number).square().sum().backward()
    return full_tensor(sharded[0].weight.grad)


def test_gradients_are_the_sum_over_ranks_and_backward_passes():
    plain = model()
    for rank in range(2):
        for number in range(3):
            plain(inputs(rank) + number).square().sum().backward()
    for once in (False, True):
        for found in run_ranks(2, reduced, once, sharded=True):
            torch.testing.assert_close(found, plain[0].weight.grad, rtol=1e-12, atol=0)
