"""Graphs on a CPU that record operations and repeat them in the same memory, as CUDA's do."""

from contextlib import contextmanager, nullcontext

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Recorded(TorchDispatchMode):
    """A graph: operations, and the tensors that they wrote."""

    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, function, types, arguments=(), settings=None):
        found = function(*arguments, **(settings or {}))
        self.operations.append((function, arguments, settings or {}, found))
        return found

    def replay(self):
        for function, arguments, settings, written in self.operations:
            for old, new in zip(
                tree_leaves(written), tree_leaves(function(*arguments, **settings)), strict=True
            ):
                if (
                    isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr()
                ):  # views need no copy
                    old.detach().copy_(new.detach())


class Stream:
    def wait_stream(self, other):
        pass


@contextmanager
def recording(graph, pool, stream, capture_error_mode):
    assert pool == "pool" and isinstance(stream, Stream) and capture_error_mode == "thread_local"
    with graph:
        yield


def record_graphs(monkeypatch):
    """Let CUDA graphs be recorded ones."""
    replaced = {
        "CUDAGraph": Recorded,
        "graph": recording,
        "Stream": Stream,
        "current_stream": Stream,
    }
    replaced |= {"graph_pool_handle": lambda: "pool", "stream": lambda _: nullcontext()}
    for name, function in replaced.items():
        monkeypatch.setattr(torch.cuda, name, function)
