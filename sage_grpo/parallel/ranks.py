"""The ranks of a run and how they communicate. A single process needs no process group.

The `sp_size` ranks of a sequence-parallel group work on the same clips; the first one, the leader, does what only one
rank per group has to do. The groups are data-parallel: this rank's group is number `rank` of `count`.
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from sage_grpo.parallel.device import choose_device

NCCL_GRACE = (
    60  # seconds by which a collective outlasts the run's watchdog, which records what it ended
)

S = TypeVar("S")
T = TypeVar("T")


class RankError(RuntimeError):
    """A failure on one rank, raised on all of them, in one sentence."""


@dataclass(eq=False)
class Ranks:
    rank: int  # data-parallel
    count: int
    device: torch.device
    sp_rank: int = 0
    sp_size: int = 1
    mesh: DeviceMesh | None = None  # (dp, sp)
    shards: DeviceMesh | None = None  # (shard,) or (replicate, shard), if the model is sharded

    def __post_init__(self) -> None:
        self.leader = self.sp_rank == 0  # of its sequence-parallel group
        self.first = self.leader and self.rank == 0  # the rank that writes shared files
        self.world, self.world_rank = (
            self.count * self.sp_size,
            self.rank * self.sp_size + self.sp_rank,
        )
        self.sequence_group = (
            self.mesh["sp"].get_group() if self.mesh is not None and self.sp_size > 1 else None
        )
        self._dp = self.mesh["dp"].get_group() if self.mesh is not None else None
        self.writes_shards = self.first  # its part of the model: one copy of each is enough
        if self.shards is not None:
            self.writes_shards = (
                self.shards.ndim == 1 or self.shards.get_local_rank("replicate") == 0
            )

    def _objects(self, mine: T, group: dist.ProcessGroup | None, count: int) -> list[T]:
        """One object from each of the `count` ranks of a group."""
        found = [mine] * count
        if count > 1 and self.mesh is not None:  # the doctor is one process that stands for many
            dist.all_gather_object(found, mine, group)
        return found

    def gather(self, values: Tensor) -> Tensor:
        """Tensors (N, ...) of equal shape from all data-parallel ranks, joined in their order: (count * N, ...)."""
        if self.count == 1:
            return values
        home = values.to(self.device)
        parts = [torch.empty_like(home) for _ in range(self.count)]
        dist.all_gather(parts, home.contiguous(), self._dp)
        return torch.cat(parts).to(values.device)

    def sum(self, values: Tensor) -> Tensor:
        """Sum over data-parallel ranks; the argument is not modified."""
        if self.count == 1:
            return values
        total = values.to(self.device, copy=True)
        dist.all_reduce(total, group=self._dp)
        return total.to(values.device)

    def texts(self, mine: str) -> list[str]:
        """One text from every data-parallel rank."""
        return self._objects(mine, self._dp, self.count)

    def from_leader(self, call: Callable[[], T]) -> T:
        """Run a call on the leader; all ranks of the sequence-parallel group get its result or its exception."""
        try:
            mine = (call() if self.leader else None, None)
        except Exception as error:
            mine = (None, error)
        result, failure = self._objects(mine, self.sequence_group, self.sp_size)[0]
        if failure is not None:
            raise failure
        return result

    def shared(self, items: Sequence[S], work: Callable[[Sequence[S]], list[T]]) -> list[T]:
        """`work(items)`, split across the ranks of the sequence-parallel group; every rank gets all results."""
        if self.sequence_group is None:
            return work(items)
        per_rank = -(-len(items) // self.sp_size)
        mine = items[self.sp_rank * per_rank :][:per_rank]
        found = self._objects(work(mine) if mine else [], self.sequence_group, self.sp_size)
        return [result for part in found for result in part]

    def together(self, call: Callable[[], T]) -> list[T]:
        """Results of a call from every rank. If it fails on one, it fails on all, so that none is left waiting."""
        try:
            mine: tuple[T | None, str] = (call(), "")
        except Exception as error:
            if self.world == 1:
                raise RankError(f"{type(error).__name__}: {error}") from error
            mine = (None, f"rank {self.world_rank}: {type(error).__name__}: {error}")
        found = self._objects(mine, None, self.world)
        if failed := [text for _, text in found if text]:
            raise RankError(failed[0])
        return [result for result, _ in found]

    def any(self, mine: bool) -> bool:
        """Whether `mine` is true on any rank."""
        if self.world == 1:
            return mine
        flag = torch.tensor(int(mine), device=self.device)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag)

    def log_once(self, text: str) -> None:
        """Print a note for the operator, on one rank only."""
        if self.first:
            print(f"note: {text}", file=sys.stderr, flush=True)

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sum the gradients over all ranks in place, in one message; those of a sharded model are already summed."""
        gradients = [
            p.grad for p in parameters if p.grad is not None and not isinstance(p.grad, DTensor)
        ]
        if self.world == 1 or not gradients:
            return
        flat = torch.cat([g.flatten() for g in gradients])
        dist.all_reduce(flat)
        for gradient, total in zip(
            gradients, flat.split([g.numel() for g in gradients]), strict=True
        ):
            gradient.copy_(total.view_as(gradient))

    def set_timeout(self, seconds: float) -> None:
        """Set how long ranks wait for each other from now on; until then, loading a model may take long."""
        meshes = [mesh for mesh in (self.mesh, self.shards) if mesh is not None]
        patience = timedelta(seconds=seconds + NCCL_GRACE * (self.device.type == "cuda"))
        for group in (
            (None, *(group for mesh in meshes for group in mesh.get_all_groups())) if meshes else ()
        ):
            dist.distributed_c10d._set_pg_timeout(patience, group)

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier(device_ids=[self.device.index] if self.device.type == "cuda" else None)

    def abandon(self, code: int) -> None:
        """Exit immediately: a normal exit can hang while NCCL waits for collectives that others may never join."""
        if self.world > 1 and self.device.type == "cuda":
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


@contextmanager
def join_ranks(
    timeout: float,
    sp_size: int = 1,
    sharded: bool = False,
    replicas: int = 1,
    device_type: str = "auto",
) -> Iterator[Ranks]:
    """Join the ranks that torchrun started, or run this process alone; ranks wait `timeout` seconds for each other.

    sharded: create a mesh to shard the model over, with `replicas` copies; also works with one process.
    device_type: cuda, cpu, or auto: cuda if there is any.
    """
    world, rank, home = (int(os.environ.get(name, default)) for name, default in
                         (("WORLD_SIZE", 1), ("RANK", 0), ("LOCAL_RANK", 0)))  # fmt: skip
    check_layout(world, sp_size, sharded, replicas)
    device = (
        torch.device("cuda", home)
        if choose_device(device_type, lambda: 0) == "cuda"
        else torch.device("cpu")
    )
    if device.type == "cuda":
        if home >= torch.cuda.device_count():
            raise ValueError(
                f"process {home + 1} of this machine finds {torch.cuda.device_count()} GPUs; start fewer"
            )
        torch.cuda.set_device(device)
    if world == 1 and not sharded:
        yield Ranks(0, 1, device)
        return
    alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1} if world == 1 else {}
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo", timeout=timedelta(seconds=timeout), **alone
    )
    try:
        mesh = init_device_mesh(
            device.type, (world // sp_size, sp_size), mesh_dim_names=("dp", "sp")
        )
        axes = (
            {"replicate": replicas, "shard": world // replicas}
            if replicas > 1
            else {"shard": world}
        )
        shards = (
            init_device_mesh(device.type, (*axes.values(),), mesh_dim_names=(*axes,))
            if sharded
            else None
        )
        yield Ranks(
            rank // sp_size, world // sp_size, device, rank % sp_size, sp_size, mesh, shards
        )
    finally:
        dist.destroy_process_group()


def check_layout(world: int, sp_size: int, sharded: bool, replicas: int) -> None:
    """Reject sizes that do not divide each other."""
    if world % sp_size:
        raise ValueError(
            f"sp_size is {sp_size}; it must divide the number of processes, which is {world}"
        )
    if replicas > 1 and not sharded:
        raise ValueError(f"dp_replicate is {replicas}; that needs enable_fsdp True")
    if world % replicas or world // replicas % sp_size:
        part = f"an equal part of the {world} processes, a multiple of sp_size ({sp_size})"
        raise ValueError(f"dp_replicate is {replicas}; each of the replicas must have {part}")
