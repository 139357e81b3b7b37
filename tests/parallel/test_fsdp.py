"""Sharded parameters: which rows a rank has, and that stale values are never used."""

import torch
from torch import nn

from sage_grpo.parallel.fsdp import (
    copy_into,
    full_tensor,
    keep_unsharded,
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
    """Which rows of a weight this rank has, these, and the full tensors of the weight and of a copy of its shards."""
    sharded = model()
    shard(sharded, list(sharded), ranks.shard_mesh, torch.float64)
    weight = sharded[0].weight
    copy = shard_like(weight, local_shard(weight).detach().clone())
    return {
        "rows": rows(weight),
        "shard": local_shard(weight).detach(),
        "full": full_tensor(weight).detach(),
        "full_copy": full_tensor(copy),
    }


def test_each_rank_has_its_rows_and_all_have_the_whole():
    weight = model()[0].weight
    ranks = run_ranks(2, parts, sharded=True)
    assert [rank["rows"] for rank in ranks] == [(0, 3), (3, 5)]
    for rank in ranks:
        start, stop = rank["rows"]
        assert torch.equal(rank["shard"], weight[start:stop])
        assert torch.equal(rank["full"], weight)
        assert torch.equal(rank["full_copy"], weight)


def outputs(ranks):
    """Before and after the weights change, inside and outside of the context that keeps them unsharded."""
    sharded = model()
    shard(sharded, list(sharded), ranks.shard_mesh, torch.float64)
    parameters = dict(sharded.named_parameters())
    x = inputs(0)
    seen = []
    with torch.no_grad():
        with keep_unsharded(sharded):
            seen.append(sharded(x))
            seen.append(sharded(x))
        doubled = {name: 2 * local_shard(p) for name, p in parameters.items()}
        copy_into(parameters, doubled)
        seen.append(sharded(x))
        with keep_unsharded(sharded, wanted=False):
            copy_into(parameters, {name: value / 2 for name, value in doubled.items()})
            seen.append(sharded(x))
    return seen


def test_changed_weights_are_seen_by_the_next_forward():
    plain = model()
    x = inputs(0)
    with torch.no_grad():
        before = plain(x)
        for parameter in plain.parameters():
            parameter.mul_(2)
        after = plain(x)
    for first, second, third, fourth in run_ranks(2, outputs, sharded=True):
        assert torch.equal(first, before) and torch.equal(second, before)
        assert torch.equal(third, after) and not torch.equal(after, before)
        assert torch.equal(fourth, before)


def reduced(ranks, once):
    """The gradient of a weight after three backward passes, reduced after each or once."""
    sharded = model()
    shard(sharded, list(sharded), ranks.shard_mesh, torch.float64)
    for number in range(3):
        reduce_gradients_in_next_backward(sharded, not once or number == 2)
        sharded(inputs(ranks.dp_rank) + number).square().sum().backward()
    return full_tensor(sharded[0].weight.grad)


def test_gradients_are_the_sum_over_ranks_and_backward_passes():
    plain = model()
    for rank in range(2):
        for number in range(3):
            plain(inputs(rank) + number).square().sum().backward()
    for once in (False, True):
        for gradient in run_ranks(2, reduced, once, sharded=True):
            torch.testing.assert_close(gradient, plain[0].weight.grad, rtol=1e-12, atol=0)
