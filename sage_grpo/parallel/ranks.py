"""The ranks of a run and how they communicate. A single process needs no process group.

The `sp_size` ranks of a sequence-parallel group work on the same clips; the first one, the leader, does what only one
rank per group has to do. The groups are data-parallel: this rank's group is number `dp_rank` of `dp_size`.
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from sage_grpo.escape import terminal_text
from sage_grpo.parallel.device import choose_device

# Seconds by which a collective outlasts the run's watchdog, so that the watchdog acts first and records what it ended.
NCCL_GRACE = 60

S = TypeVar("S")
T = TypeVar("T")


class RankError(RuntimeError):
    """A failure on one rank, raised on all of them, in one sentence."""


@dataclass(eq=False)
class Ranks:
    """This rank's place in the run, and its communication with the others."""

    dp_rank: int  # number of this rank's data-parallel group
    dp_size: int  # number of data-parallel groups
    device: torch.device
    sp_rank: int = 0  # within the sequence-parallel group
    sp_size: int = 1
    mesh: DeviceMesh | None = None  # (dp, sp)
    shard_mesh: DeviceMesh | None = None  # (shard,) or (replicate, shard), if the model is sharded

    def __post_init__(self) -> None:
        # position
        self.is_leader = self.sp_rank == 0  # of its sequence-parallel group
        self.is_first = self.is_leader and self.dp_rank == 0  # the rank that writes shared files
        self.world_size = self.dp_size * self.sp_size
        self.world_rank = self.dp_rank * self.sp_size + self.sp_rank

        # process groups
        self._dp = None if self.mesh is None else self.mesh["dp"].get_group()
        self.sequence_group = None
        if self.mesh is not None and self.sp_size > 1:
            self.sequence_group = self.mesh["sp"].get_group()

        # whether this rank saves its shards: one copy of each is enough
        if self.shard_mesh is None:
            self.writes_shards = self.is_first
        elif self.shard_mesh.ndim == 1:
            self.writes_shards = True
        else:
            self.writes_shards = self.shard_mesh.get_local_rank("replicate") == 0

    def _gather_objects(self, value: T, group: dist.ProcessGroup | None, count: int) -> list[T]:
        """One object from each of the `count` ranks of a group."""
        values = [value] * count
        if count > 1 and self.mesh is not None:  # the doctor is one process that stands for many
            dist.all_gather_object(values, value, group)
        return values

    def gather(self, values: Tensor) -> Tensor:
        """Tensors (N, ...) of equal shape from all data-parallel ranks, joined in their order: (dp_size * N, ...)."""
        if self.dp_size == 1:
            return values
        local = values.to(self.device).contiguous()
        parts = [torch.empty_like(local) for _ in range(self.dp_size)]
        dist.all_gather(parts, local, self._dp)
        return torch.cat(parts).to(values.device)

    def sum(self, values: Tensor) -> Tensor:
        """Sum over data-parallel ranks; the argument is not modified."""
        if self.dp_size == 1:
            return values
        total = values.to(self.device, copy=True)
        dist.all_reduce(total, group=self._dp)
        return total.to(values.device)

    def take(self, rows: Sequence[Tensor], wanted: Sequence[Sequence[int]]) -> list[Tensor]:
        """Rows from a list that is spread over the data-parallel ranks, n on each, numbered in their order.

        rows: this rank's n rows. wanted: for each rank, the numbers of the rows that it gets. A row that is on this
        rank already is returned as it is; only the others travel, which have the shape of the receiver's own rows. All
        ranks must call.
        """
        n = len(rows)
        empty = torch.empty_like(rows[0], memory_format=torch.contiguous_format)
        taken = []
        transfers = []
        for receiver, numbers in enumerate(wanted):
            for number in numbers:
                sender = number // n
                if receiver == self.dp_rank:
                    row = rows[number % n] if sender == self.dp_rank else empty.clone()
                    taken.append(row)
                if (
                    sender == receiver
                    or self.dp_rank not in (sender, receiver)
                    or not rows[0].numel()
                ):
                    continue
                if sender == self.dp_rank:
                    row = rows[number % n].contiguous()
                    transfers.append(self._transfer(dist.isend, row, receiver))
                else:
                    transfers.append(self._transfer(dist.irecv, taken[-1], sender))
        if transfers:
            for work in dist.batch_isend_irecv(transfers):
                work.wait()
        return taken

    def _transfer(self, operation: Callable[..., Any], row: Tensor, other: int) -> dist.P2POp:
        """A row to or from the data-parallel rank `other`."""
        return dist.P2POp(operation, row, dist.get_global_rank(self._dp, other), self._dp)

    def texts(self, text: str) -> list[str]:
        """One text from every data-parallel rank."""
        return self._gather_objects(text, self._dp, self.dp_size)

    def from_leader(self, call: Callable[[], T]) -> T:
        """Run a call on the leader; all ranks of the sequence-parallel group get its result or its exception."""
        result = None
        failure = None
        if self.is_leader:
            try:
                result = call()
            except Exception as error:
                failure = error
        outcomes = self._gather_objects((result, failure), self.sequence_group, self.sp_size)
        result, failure = outcomes[0]
        if failure is not None:
            raise failure
        return result

    def shared(self, items: Sequence[S], work: Callable[[Sequence[S]], list[T]]) -> list[T]:
        """`work(items)`, split across the ranks of the sequence-parallel group; every rank gets all results."""
        if self.sequence_group is None:
            return work(items)
        per_rank = -(-len(items) // self.sp_size)  # rounded up
        own_items = items[self.sp_rank * per_rank :][:per_rank]
        own_results = work(own_items) if own_items else []
        parts = self._gather_objects(own_results, self.sequence_group, self.sp_size)
        return [result for part in parts for result in part]

    def on_all(self, call: Callable[[], T]) -> list[T]:
        """Results of a call from every rank. If it fails on one, it fails on all, so that none is left waiting."""
        result = None
        failure = ""
        try:
            result = call()
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
            if self.world_size == 1:
                raise RankError(failure) from error
            failure = f"rank {self.world_rank}: {failure}"
        outcomes = self._gather_objects((result, failure), None, self.world_size)
        for _, text in outcomes:
            if text:
                raise RankError(text)
        return [result for result, _ in outcomes]

    def any(self, flag: bool) -> bool:
        """Whether `flag` is true on any rank."""
        if self.world_size == 1:
            return flag
        highest = torch.tensor(int(flag), device=self.device)
        dist.all_reduce(highest, dist.ReduceOp.MAX)
        return bool(highest)

    def log_once(self, text: str) -> None:
        """Print a note for the operator, on one rank only."""
        if self.is_first:
            print(f"note: {terminal_text(text)}", file=sys.stderr, flush=True)

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sum the gradients over all ranks in place, in one message; those of a sharded model are already summed.

        A parameter may have a gradient on some ranks only, whose clips alone used it; on the others it counts as 0.
        """
        parameters = [p for p in parameters if not isinstance(p, DTensor)]
        if self.world_size == 1 or not parameters:
            return
        has_gradient = torch.tensor([p.grad is not None for p in parameters], device=self.device)
        used = has_gradient.int()
        dist.all_reduce(used, dist.ReduceOp.MAX)
        gradients = []
        for parameter, is_used in zip(parameters, used.tolist(), strict=True):
            if is_used:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                gradients.append(parameter.grad)
        if not gradients:
            return
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat)
        totals = flat.split([gradient.numel() for gradient in gradients])
        for gradient, total in zip(gradients, totals, strict=True):
            gradient.copy_(total.view_as(gradient))

    def set_timeout(self, seconds: float) -> None:
        """Set how long ranks wait for each other from now on; until then, loading a model may take longer."""
        meshes = [mesh for mesh in (self.mesh, self.shard_mesh) if mesh is not None]
        if not meshes:
            return
        groups = [None, *(group for mesh in meshes for group in mesh.get_all_groups())]
        if self.device.type == "cuda":
            seconds += NCCL_GRACE
        for group in groups:
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.world_size > 1:
            dist.barrier(device_ids=[self.device.index] if self.device.type == "cuda" else None)

    def abandon(self, code: int) -> None:
        """Exit immediately: a normal exit can hang while NCCL waits for collectives that others may never join."""
        if self.world_size > 1 and self.device.type == "cuda":
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
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    rank = int(os.environ.get("RANK", 0))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    check_layout(world_size, sp_size, sharded, replicas)

    device = torch.device("cpu")
    if choose_device(device_type, lambda: 0) == "cuda":
        device = torch.device("cuda", local_rank)
        if local_rank >= torch.cuda.device_count():
            raise ValueError(
                f"process {local_rank + 1} of this machine finds {torch.cuda.device_count()} GPUs; start fewer"
            )
        torch.cuda.set_device(device)
    if world_size == 1 and not sharded:
        yield Ranks(dp_rank=0, dp_size=1, device=device)
        return

    backend = "nccl" if device.type == "cuda" else "gloo"
    alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1} if world_size == 1 else {}
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout), **alone)
    try:
        mesh = init_device_mesh(
            device.type, (world_size // sp_size, sp_size), mesh_dim_names=("dp", "sp")
        )
        yield Ranks(
            dp_rank=rank // sp_size,
            dp_size=world_size // sp_size,
            device=device,
            sp_rank=rank % sp_size,
            sp_size=sp_size,
            mesh=mesh,
            shard_mesh=_shard_mesh(device, world_size, replicas) if sharded else None,
        )
    finally:
        dist.destroy_process_group()


def _shard_mesh(device: torch.device, world_size: int, replicas: int) -> DeviceMesh:
    """The mesh (shard,) or, with several replicas, (replicate, shard)."""
    if replicas == 1:
        return init_device_mesh(device.type, (world_size,), mesh_dim_names=("shard",))
    sizes = (replicas, world_size // replicas)
    return init_device_mesh(device.type, sizes, mesh_dim_names=("replicate", "shard"))


def check_layout(world_size: int, sp_size: int, sharded: bool, replicas: int) -> None:
    """Reject sizes that do not divide each other."""
    if world_size % sp_size:
        raise ValueError(
            f"sp_size is {sp_size}; it must divide the number of processes, which is {world_size}:"
            " set it to 1, or start more with a launcher"
        )
    if replicas > 1 and not sharded:
        raise ValueError(f"dp_replicate is {replicas}; that needs enable_fsdp True")
    if world_size % replicas or world_size // replicas % sp_size:
        raise ValueError(
            f"dp_replicate is {replicas}; each of the replicas must have an equal part of the {world_size} processes, "
            f"a multiple of sp_size ({sp_size})"
        )
