"""A module's forward and backward as CUDA graphs, for models so small that the GPU waits for Python.

A graph holds the kernels that the module itself would run, so the results are the same to the bit, and rollout and
training replay the same graph. Each set of input shapes has a pair of graphs, captured when it first occurs. All pairs
share their memory, so a backward must come before the next forward.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

WARM_UPS = 2  # calls before a capture, in which libraries allocate what they need


@dataclass(frozen=True)
class Pair:
    """Both graphs for inputs of one set of shapes, and the tensors at fixed addresses that they read and write."""

    inputs: list[Tensor]
    forward: torch.cuda.CUDAGraph
    output: Tensor
    d_output: Tensor
    backward: torch.cuda.CUDAGraph
    gradients: list[Tensor | None]


class Graphs:
    """Replays the forward of a module, whose gradients are added to its parameters'; no input gets one."""

    def __init__(self, module: nn.Module) -> None:
        """Replaces the module's forward. Parameters may change later, but not move."""
        self.run = module.forward
        self.trained = [p for p in module.parameters() if p.requires_grad]
        self.pairs: dict[tuple[torch.Size, ...], Pair] = {}
        self.memory = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream()
        self.replays = 0
        # an input that requires gradients, so that autograd calls a replay's backward
        self.differentiable = torch.zeros((), requires_grad=True)
        module.forward = self

    def __call__(self, *inputs: Tensor) -> Tensor:
        shapes = tuple(x.shape for x in inputs)
        if shapes not in self.pairs:
            self.pairs[shapes] = self.captured([x.detach().clone() for x in inputs])
        return Replay.apply(self, self.pairs[shapes], self.differentiable, *inputs)

    @torch.enable_grad()
    def captured(self, inputs: list[Tensor]) -> Pair:
        """Capture both graphs for inputs of these shapes."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for _ in range(WARM_UPS):
                output = self.run(*inputs)
                self.differentiated(output, torch.zeros_like(output))
        torch.cuda.current_stream().wait_stream(self.stream)

        settings = {
            "pool": self.memory,
            # one stream for all: autograd keeps that of a parameter's first gradient
            "stream": self.stream,
            # another thread may be writing a checkpoint
            "capture_error_mode": "thread_local",
        }
        forward = torch.cuda.CUDAGraph()
        backward = torch.cuda.CUDAGraph()
        with torch.cuda.graph(forward, **settings):
            output = self.run(*inputs)
        d_output = torch.zeros_like(output)
        with torch.cuda.graph(backward, **settings):
            gradients = self.differentiated(output, d_output)
        return Pair(
            inputs=inputs,
            forward=forward,
            output=output.detach(),
            d_output=d_output,
            backward=backward,
            gradients=list(gradients),
        )

    def differentiated(self, output: Tensor, d_output: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the trained parameters; None for those that the output does not depend on."""
        return torch.autograd.grad(output, self.trained, d_output, allow_unused=True)

    def accumulate(self, gradients: list[Tensor | None]) -> None:
        """Add gradients to those of the trained parameters."""
        totals = []
        additions = []
        for parameter, gradient in zip(self.trained, gradients, strict=True):
            if gradient is None:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(gradient)
            totals.append(parameter.grad)
            additions.append(gradient)
        torch._foreach_add_(totals, additions)


class Replay(torch.autograd.Function):
    """Replays a pair of graphs as one differentiable operation."""

    @staticmethod
    def forward(ctx: FunctionCtx, graphs: Graphs, pair: Pair, _: Tensor, *inputs: Tensor) -> Tensor:
        torch._foreach_copy_(pair.inputs, inputs)
        pair.forward.replay()
        graphs.replays += 1
        ctx.graphs = graphs
        ctx.pair = pair
        ctx.number = graphs.replays
        ctx.num_inputs = 3 + len(inputs)  # of this function, none of which gets a gradient
        return pair.output.clone()

    @staticmethod
    def backward(ctx: FunctionCtx, d_output: Tensor) -> tuple[None, ...]:
        if ctx.number != ctx.graphs.replays:
            raise RuntimeError(
                "cuda_graphs: another forward has overwritten what this backward needs"
            )
        ctx.pair.d_output.copy_(d_output)
        ctx.pair.backward.replay()
        ctx.graphs.accumulate(ctx.pair.gradients)
        return (None,) * ctx.num_inputs
