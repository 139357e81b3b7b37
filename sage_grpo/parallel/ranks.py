"""The data-parallel ranks of a run, and the few things that they tell each other. One process needs no group."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True)
class Ranks:
    rank: int
    count: int
    device: torch.device

    @property
    def first(self) -> bool:
        """Whether this rank writes what exists once."""
        return self.rank == 0

    def gather(self, values: Tensor) -> Tensor:
        """Tensors (N, ...) of equal shape from all ranks, joined in rank order: (count * N, ...)."""
        if self.count == 1:
            return values
        home = values.to(self.device)
        parts = [torch.empty_like(home) for _ in range(self.count)]
        dist.all_gather(parts, home.contiguous())
        return torch.cat(parts).to(values.device)

    def sum(self, values: Tensor) -> Tensor:
        """Sum over ranks; the argument is left as it is."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: Tensor) -> Tensor:
        """Largest over ranks."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def _reduce(self, values: Tensor, how: dist.ReduceOp) -> Tensor:
        if self.count == 1:
            return values
        total = values.to(self.device, copy=True)
        dist.all_reduce(total, how)
        return total.to(values.device)

    def texts(self, mine: str) -> list[str]:
        """One text from every rank."""
        if self.count == 1:
            return [mine]
        found: list[str] = [""] * self.count
        dist.all_gather_object(found, mine)
        return found

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Add up the gradients of all ranks in place, as one message. Each rank ran the same modules."""
        if self.count == 1:
            return
        gradients = [p.grad for p in parameters if p.grad is not None]
        flat = torch.cat([g.flatten() for g in gradients])
        dist.all_reduce(flat)
        for gradient, total in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(total.view_as(gradient))

    def set_timeout(self, seconds: float) -> None:
        """How long ranks wait for each other from now on; before, loading a model may take its time."""
        if self.count > 1:
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds))

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.count > 1:
            dist.barrier()


@contextmanager
def join_ranks(timeout: float) -> Iterator[Ranks]:
    """The ranks that torchrun started, or this process alone; they wait `timeout` seconds for each other."""
    count, rank, local = (int(os.environ.get(name, default)) for name, default in
                          (("WORLD_SIZE", 1), ("RANK", 0), ("LOCAL_RANK", 0)))  # fmt: skip
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if count > 1:
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    try:
        yield Ranks(rank, count, device)
    finally:
        if count > 1:
            dist.destroy_process_group()
