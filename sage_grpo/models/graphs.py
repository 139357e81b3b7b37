"""A module's forward and backward as CUDA graphs, for models so small that the GPU waits for Python.

A graph holds the kernels that the module itself would run, so the results are the same to the bit, and rollout and
training replay the same one. There is a pair of graphs for each set of shapes, captured when it first occurs. All pairs
share their memory, so a backward has to come before the next forward.
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
        """Takes the place of the module's forward. Parameters may change later, but not move."""
        self.run, self.trained = module.forward, [p for p in module.parameters() if p.requires_grad]
        self.pairs: dict[tuple[torch.Size, ...], Pair] = {}
        self.memory, self.stream, self.replays = (
            torch.cuda.graph_pool_handle(),
            torch.cuda.Stream(),
            0,
        )
        self.differentiable = torch.zeros(
            (), requires_grad=True
        )  # lets autograd call a replay's backward
        module.forward = self

    def __call__(self, *inputs: Tensor) -> Tensor:
        shapes = tuple(x.shape for x in inputs)
        if shapes not in self.pairs:
            self.pairs[shapes] = self.captured([x.detach().clone() for x in inputs])
        return Replay.apply(self, self.pairs[shapes], self.differentiable, *inputs)

    @torch.enable_grad()
    def captured(self, inputs: list[Tensor]) -> Pair:
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for _ in range(WARM_UPS):
                output = self.run(*inputs)
                self.differentiated(output, torch.zeros_like(output))
        torch.cuda.current_stream().wait_stream(self.stream)
        forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        # one stream for all: autograd keeps that of a parameter's first gradient; a thread may be writing a checkpoint
        settings = {
            "pool": self.memory,
            "stream": self.stream,
            "capture_error_mode": "thread_local",
        }
        with torch.cuda.graph(forward, **settings):
            output = self.run(*inputs)
        d_output = torch.zeros_like(output)
        with torch.cuda.graph(backward, **settings):
            gradients = self.differentiated(output, d_output)
        return Pair(inputs, forward, output.detach(), d_output, backward, list(gradients))

    def differentiated(self, output: Tensor, d_output: Tensor) -> tuple[Tensor | None, ...]:
        return torch.autograd.grad(output, self.trained, d_output, allow_unused=True)

    def accumulate(self, gradients: list[Tensor | None]) -> None:
        found = [
            (p, gradient)
            for p, gradient in zip(self.trained, gradients, strict=True)
            if gradient is not None
        ]
        for parameter, gradient in found:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(gradient)
        torch._foreach_add_(
            [parameter.grad for parameter, _ in found], [gradient for _, gradient in found]
        )


class Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, graphs: Graphs, pair: Pair, _: Tensor, *inputs: Tensor) -> Tensor:
        torch._foreach_copy_(pair.inputs, inputs)
        pair.forward.replay()
        graphs.replays += 1
        ctx.graphs, ctx.pair, ctx.number, ctx.count = graphs, pair, graphs.replays, 3 + len(inputs)
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
        return (None,) * ctx.count
