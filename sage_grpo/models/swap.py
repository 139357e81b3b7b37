"""Two equal stacks of blocks that take turns on a device: the frozen weights of one are there, others in host memory.

Block i of both stacks shares the i-th place on the device. Whoever is about to run a block calls `fetch`: it copies the
block's weights into its place if the other stack's are there, and on a stream of its own also those of the block that
comes next, while this one still computes. So a change of stacks takes no memory, and no more time than the copy of one
block, as long as a block computes longer than the next one is copied.

Trained weights, such as adapters, stay on the device, and so does everything outside the blocks.
"""

import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

ALIGNMENT = 64  # numbers; each weight begins at a multiple of this, for aligned loads


class Place(NamedTuple):
    """Where a block belongs."""

    stack: int
    number: int


class BlockSwap:
    """Keeps the frozen weights of one block per place on a device."""

    def __init__(self, stacks: Sequence[Sequence[nn.Module]], device: torch.device) -> None:
        """Make places for the blocks' frozen weights in host memory, whose values are then to be filled in.

        stacks: equally many blocks of equal sizes in each.
        """
        self.stacks = [list(blocks) for blocks in stacks]
        self.device = device
        self.places = {
            block: Place(number, position)
            for number, blocks in enumerate(stacks)
            for position, block in enumerate(blocks)
        }
        # kept here: adapters that are added later stay on the device
        self.weights = {block: frozen(block) for block in self.places}
        self.host = {block: host_place(weights) for block, weights in self.weights.items()}
        first_stack = stacks[0]
        self.on_device = [
            torch.empty_like(self.host[block], device=device) for block in first_stack
        ]
        # of each place: the stack whose block is there, if any
        self.residents: list[int | None] = [None] * len(first_stack)
        self.num_copies = 0  # blocks copied to the device until now

        self.stream: torch.cuda.Stream | None = None
        self.arrivals: list[torch.cuda.Event] = []
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)
            self.arrivals = [torch.cuda.Event() for _ in first_stack]

    def lock(self) -> None:
        """Lock the pages of the filled host memory; before, copies from it are correct, but slow."""
        if self.stream is None:
            return
        for flat in self.host.values():
            pin(flat)
        # it keeps the memory until its pages are unlocked
        weakref.finalize(self, unpin, list(self.host.values()))

    def fetch(self, block: nn.Module, direction: int = 1) -> None:
        """Make a block's weights ready for what is launched next, and copy those of its neighbor meanwhile.

        direction: 1 in a forward, in which the next block follows, -1 in a backward.
        """
        stack, position = self.places[block]
        self._copy(stack, position)
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_event(self.arrivals[position])
        neighbor = position + direction
        if 0 <= neighbor < len(self.residents):
            self._copy(stack, neighbor)

    def _copy(self, stack: int, position: int) -> None:
        """Begin to copy a block to the device, unless it is there; what was there is used from host memory again."""
        resident = self.residents[position]
        if resident == stack:
            return
        if resident is not None:
            evicted = self.stacks[resident][position]
            bind(self.weights[evicted], self.host[evicted])

        block = self.stacks[stack][position]
        target = self.on_device[position]
        if self.stream is None:
            target.copy_(self.host[block])
        else:
            # what was launched before may still use the place
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self.stream):
                target.copy_(self.host[block], non_blocking=True)
                self.arrivals[position].record(self.stream)
        bind(self.weights[block], target)
        self.residents[position] = stack
        self.num_copies += 1

    def before_backward(self, block: nn.Module, output: Tensor) -> Tensor:
        """The block's output, whose backward fetches the block first: the other stack may have run in between."""
        return FetchInBackward.apply(self, block, output) if output.requires_grad else output


class FetchInBackward(torch.autograd.Function):
    """Passes on a block's output, and fetches the block's weights before its backward."""

    @staticmethod
    def forward(ctx: FunctionCtx, swap: BlockSwap, block: nn.Module, output: Tensor) -> Tensor:
        ctx.swap = swap
        ctx.block = block
        return output.view_as(output)

    @staticmethod
    def backward(ctx: FunctionCtx, d_output: Tensor) -> tuple[None, None, Tensor]:
        ctx.swap.fetch(ctx.block, direction=-1)
        return None, None, d_output


def frozen(block: nn.Module) -> list[nn.Parameter]:
    """The parameters of a block that are not trained."""
    return [parameter for parameter in block.parameters() if not parameter.requires_grad]


def host_place(parameters: Sequence[nn.Parameter]) -> Tensor:
    """One tensor in host memory for all parameters, which become views of it and lose their values."""
    size = sum(padded(parameter.numel()) for parameter in parameters)
    flat = torch.empty(size, dtype=parameters[0].dtype)
    bind(parameters, flat)
    return flat


def bind(parameters: Sequence[nn.Parameter], flat: Tensor) -> None:
    """Make parameters views of a tensor that `host_place` made, or of a copy of it."""
    begin = 0
    for parameter in parameters:
        parameter.data = flat[begin : begin + parameter.numel()].view(parameter.shape)
        begin += padded(parameter.numel())


def padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def pin(tensor: Tensor) -> None:
    """Lock a tensor's pages, so that copies from it run beside computation; torch itself would round sizes up."""
    runtime = torch.cuda.cudart()
    code = runtime.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)
    if int(code) != 0:
        raise RuntimeError(
            f"{tensor.nbytes / 1e9:.2f} GB of host memory could not be locked (CUDA error {int(code)}): "
            "raise the limit of locked memory (ulimit -l), or free memory"
        )


def unpin(tensors: Sequence[Tensor]) -> None:
    """Unlock the pages of tensors that `pin` locked, once no copy from them is under way."""
    torch.cuda.synchronize()
    runtime = torch.cuda.cudart()
    for tensor in tensors:
        runtime.cudaHostUnregister(tensor.data_ptr())
