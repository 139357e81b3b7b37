"""What the trainers of the embedded models share: a schedule of the learning rate, and steps that a GPU replays."""

import math
from collections.abc import Callable

import torch
from torch import Tensor


def warm_cosine(step: int, steps: int) -> float:
    """Factor of the learning rate at step 0, 1, ...: up during a twentieth of the steps, then down to a fiftieth."""
    warmup = min(1.0, 20 * (step + 1) / steps)
    return warmup * (0.51 + 0.49 * math.cos(math.pi * step / steps))


class Recorder:
    """Makes training steps over static buffers fast: on a GPU each is recorded once as a CUDA graph and replayed.

    The models are so small that a GPU would mostly wait for kernel launches. Before it is recorded a step runs twice;
    the learning rate must be 0 then, and `zero_state` resets the optimizer afterwards. All graphs share stream and
    memory.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream() if device.type == "cuda" else None
        self.pool = torch.cuda.graph_pool_handle() if self.stream else None

    def __call__(self, step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        if self.stream is None:
            return step
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for _ in range(2):  # library handles, optimizer state
                step()
        torch.cuda.current_stream().wait_stream(self.stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
            result = step()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


def zero_state(optimizer: torch.optim.Optimizer) -> None:
    """Zero the optimizer's state in place: graphs hold these tensors."""
    for state in optimizer.state.values():
        for value in state.values():
            value.zero_()
