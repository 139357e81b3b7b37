"""FSDP2 sharding of the transformer: fp32 master weights and reductions, the forward in `compute` precision.

Each block is one unit, the rest of the model another. Losses are divided by the number of pairs on all ranks, and each
rank of a sequence-parallel group holds part of its gradient, so gradients are summed over all ranks, never averaged.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def shard(
    model: nn.Module, blocks: Iterable[nn.Module], mesh: DeviceMesh, compute: torch.dtype
) -> None:
    """Shard in place over a mesh (shard,) or (replicate, shard)."""
    policy = MixedPrecisionPolicy(
        param_dtype=compute,
        reduce_dtype=torch.promote_types(compute, torch.float32),
        cast_forward_inputs=False,  # True would round the rotary tables
    )
    for unit in (*blocks, model):
        fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)


def reduce_gradients_in_next_backward(model: nn.Module, wanted: bool) -> None:
    """If not wanted, each rank accumulates unsharded gradients locally until a backward pass that reduces them."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(wanted)


@contextmanager
def keep_unsharded(model: nn.Module, wanted: bool = True) -> Iterator[None]:
    """Context in which weights stay unsharded between forwards, if wanted; they must not change inside it."""
    units = [module for module in model.modules() if wanted and isinstance(module, FSDPModule)]
    for unit in units:
        unit.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        for unit in units:
            unit.set_reshard_after_forward(True, recurse=False)
            unit.reshard()


def local_shard(tensor: Tensor) -> Tensor:
    """This rank's shard of a tensor, sharing its memory; an unsharded tensor is returned as is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shard_like(tensor: Tensor, part: Tensor) -> Tensor:
    """Wrap `part` as this rank's shard of a tensor with the same sharding as `tensor`."""
    if not isinstance(tensor, DTensor):
        return part
    return DTensor.from_local(
        part,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


@torch.no_grad()
def copy_into(parameters: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Copy values into this rank's shards of the parameters with the same names."""
    if not values:
        return
    targets = [local_shard(parameters[name]) for name in values]
    sources = [local_shard(value) for value in values.values()]
    torch._foreach_copy_(targets, sources)


@contextmanager
def replaced(
    parameters: Mapping[str, Tensor],
    values: Mapping[str, Tensor],
    storage_device: torch.device | None = None,
) -> Iterator[None]:
    """Context in which parameters have other values; meanwhile the originals are kept, on `storage_device` if given."""
    originals = {
        name: local_shard(parameters[name]).detach().to(storage_device, copy=True)
        for name in values
    }
    copy_into(parameters, values)
    try:
        yield
    finally:
        copy_into(parameters, originals)


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor on every rank; all ranks must call. An unsharded tensor is returned as is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def rows(tensor: Tensor) -> tuple[int, int]:
    """Which rows start:stop of dim 0, the one that FSDP2 shards, are local; a scalar counts as one row."""
    if not isinstance(tensor, DTensor):
        num_rows = tensor.shape[0] if tensor.ndim else 1
        return 0, num_rows
    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    start = offset[0]
    return start, start + shape[0]
