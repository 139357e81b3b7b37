"""Blocks that take turns on a device compute what they compute without, forward and backward."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from sage_grpo.models.swap import BlockSwap
from tests.shared_fixtures import DEVICE

BLOCKS = 3
BATCH = 2


class Block(nn.Module):
    """A frozen layer, whose size is no multiple of the alignment, and a trained one."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.trained = nn.Linear(5, 5)

    def forward(self, x):
        return torch.tanh(self.trained(self.frozen(x)) + x)


@pytest.fixture
def stacks():
    torch.manual_seed(0)
    return [nn.ModuleList([Block() for _ in range(BLOCKS)]) for _ in range(2)]


def on_device(stacks):
    """The stacks with a swap: trained weights on the device, frozen ones taking turns."""
    values = [stack.state_dict() for stack in copy.deepcopy(stacks)]
    swap = BlockSwap(stacks, DEVICE)
    for stack, own_values in zip(stacks, values, strict=True):
        stack.load_state_dict(own_values)
        for block in stack:
            block.trained.to(DEVICE)
    swap.lock()
    return swap


def run(swap, stack, x, recomputed):
    for block in stack:
        swap.fetch(block)
        x = checkpoint(block, x, use_reentrant=False) if recomputed else block(x)
        x = swap.before_backward(block, x)
    return x


@pytest.mark.parametrize("recomputed", [False, True])
def test_both_stacks_in_one_backward(stacks, recomputed):
    """The second stack evicts the first before the first one's backward, which gets it back."""
    plain = [stack.to(DEVICE) for stack in copy.deepcopy(stacks)]
    x = torch.randn(BATCH, 5, device=DEVICE)
    rows = torch.tensor([True, False], device=DEVICE)[:, None]

    outputs = [nn.Sequential(*stack)(x) for stack in plain]
    torch.where(rows, *outputs).square().sum().backward()

    swap = on_device(stacks)
    swapped = [run(swap, stack, x, recomputed) for stack in stacks]
    for output, expected in zip(swapped, outputs, strict=True):
        assert torch.equal(output, expected)
    torch.where(rows, *swapped).square().sum().backward()
    for stack, expected in zip(stacks, plain, strict=True):
        for name, parameter in stack.named_parameters():
            grad = dict(expected.named_parameters())[name].grad
            assert (
                (grad is None)
                == (parameter.grad is None)
                == name.endswith(("frozen.weight", "frozen.bias"))
            )
            assert grad is None or torch.equal(parameter.grad, grad)


def test_only_a_change_of_stacks_copies(stacks):
    values = [[block.frozen.weight.clone() for block in stack] for stack in stacks]
    swap = on_device(stacks)
    x = torch.randn(BATCH, 5, device=DEVICE)
    copies = []
    for number in (0, 0, 1, 1, 0):
        run(swap, stacks[number], x, recomputed=False)
        copies.append(swap.num_copies)
        assert swap.residents == [number] * BLOCKS
    assert copies == [3, 3, 6, 6, 9]

    # weights are views of a place on the device, or of host memory, with the values that they had
    for number, stack in enumerate(stacks):
        for position, block in enumerate(stack):
            place = swap.on_device[position] if number == 0 else swap.host[block]
            weight = block.frozen.weight
            assert weight.untyped_storage().data_ptr() == place.untyped_storage().data_ptr()
            assert torch.equal(weight.cpu(), values[number][position])


def test_the_next_block_is_copied_while_one_computes(stacks):
    swap = on_device(stacks)
    swap.fetch(stacks[1][0])
    assert swap.residents == [1, 1, None]
    swap.fetch(stacks[0][2], direction=-1)
    assert swap.residents == [1, 0, 0]
