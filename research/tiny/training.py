"""What the trainers of the embedded models share: steps that a GPU replays."""

from collections.abc import Callable

import torch
from torch import Tensor


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
