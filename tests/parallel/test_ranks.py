"""Communication between ranks: across data-parallel groups, within sequence-parallel groups, and across all ranks."""

import os

import pytest
import torch
from torch import nn

from sage_grpo.parallel.ranks import Ranks, check_layout, join_ranks
from tests.dist import run_ranks


def talk(ranks):
    """What this rank gets from each kind of communication."""
    values = torch.tensor([ranks.dp_rank + 1.0])
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.full((2,), 1.0 + ranks.world_rank)
    # one that only the clips of the last rank used, and one that none did
    others = [nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))]
    if ranks.world_rank == ranks.world_size - 1:
        others[0].grad = torch.ones(1)
    ranks.sum_gradients([*others, parameter])
    try:
        ranks.from_leader(lambda: int("not a number"))
        error = None
    except ValueError as caught:
        error = str(caught)
    return {
        "where": (ranks.dp_rank, ranks.sp_rank, ranks.is_first, ranks.is_leader),
        "gathered": ranks.gather(values).tolist(),
        "sum": ranks.sum(values).tolist(),
        "values": values.tolist(),
        "texts": ranks.texts(f"group {ranks.dp_rank}"),
        "leader": ranks.from_leader(lambda: f"leader {ranks.dp_rank}, {ranks.sp_rank}"),
        "error": error,
        "shared": ranks.shared(
            [1, 2, 3], lambda items: [(ranks.sp_rank, 10 * item) for item in items]
        ),
        "gradient": parameter.grad.tolist(),
        "others": [other.grad for other in others],
    }


def test_two_groups_of_two():
    ranks = run_ranks(4, talk, sp_size=2)
    assert [answers["where"] for answers in ranks] == [
        (0, 0, True, True),
        (0, 1, False, False),
        (1, 0, False, True),
        (1, 1, False, False),
    ]
    for number, answers in enumerate(ranks):
        group = number // 2
        assert answers["gathered"] == [1.0, 2.0] and answers["sum"] == [3.0]
        assert answers["values"] == [group + 1.0]  # a reduction leaves its argument alone
        assert answers["texts"] == ["group 0", "group 1"]
        assert answers["leader"] == f"leader {group}, 0"
        assert "not a number" in answers["error"]
        assert answers["shared"] == [(0, 10), (0, 20), (1, 30)]
        assert answers["gradient"] == [10.0, 10.0]  # 1 + 2 + 3 + 4: gradients are summed over all
        assert answers["others"] == [torch.ones(1), None]


@pytest.mark.parametrize("world, sp_size, sharded, replicas, words", [
    (4, 3, False, 1, "sp_size is 3; it must divide the number of processes, which is 4"),
    (4, 1, False, 2, "needs enable_fsdp True"),
    (6, 1, True, 4, "dp_replicate is 4; each of the replicas"),
    (8, 4, True, 4, "a multiple of sp_size"),
])  # fmt: skip
def test_layouts_that_do_not_divide_are_refused(world, sp_size, sharded, replicas, words):
    with pytest.raises(ValueError, match=words):
        check_layout(world, sp_size, sharded, replicas)


@pytest.mark.parametrize(
    "layout", [(64, 2, True, 8), (8, 8, True, 1), (1, 1, True, 1), (4, 2, True, 2)]
)
def test_layouts_that_divide_pass(layout):
    check_layout(*layout)


def test_more_processes_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name, value in (("WORLD_SIZE", "2"), ("RANK", "1"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    with (
        pytest.raises(ValueError, match="process 2 of this machine finds 1 GPUs; start fewer"),
        join_ranks(1.0),
    ):
        pass


@pytest.mark.parametrize(
    "device, count, ended", [("cuda", 2, [1]), ("cuda", 1, []), ("cpu", 2, [])]
)
def test_a_failed_rank_does_not_wait_for_nccl(monkeypatch, device, count, ended):
    codes = []
    monkeypatch.setattr(os, "_exit", codes.append)
    Ranks(0, count, torch.device(device)).abandon(1)
    assert codes == ended
