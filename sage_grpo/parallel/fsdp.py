"""The transformer sharded over ranks by FSDP2: fp32 master weights and reductions, the forward in `compute` precision.

Each block is one unit, the rest of the model another. Losses are divided by the number of pairs of all ranks, and every
rank of a sequence-parallel group holds part of its gradient, so gradients are summed over all ranks, never averaged.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def shard(model: nn.Module, blocks: Iterable[nn.Module], mesh: DeviceMesh, compute: torch.dtype) -> None:
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


def units(model: nn.Module) -> list[FSDPModule]:
    """The sharded modules; none where nothing was sharded."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def reduce_gradients_in_next_backward(model: nn.Module, wanted: bool) -> None:
    """Where not wanted, each rank adds up its own gradients, unsharded, until a backward pass that reduces them."""
    for unit in units(model):
        unit.set_requires_gradient_sync(wanted, recurse=False)


@contextmanager
def gathered(model: nn.Module, wanted: bool = True) -> Iterator[None]:
    """Context in which weights stay gathered after a forward; nothing may change them meanwhile."""
    kept = units(model) if wanted else []
    for unit in kept:
        unit.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        for unit in kept:
            unit.set_reshard_after_forward(True, recurse=False)
            unit.reshard()


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor, sharing its memory; another tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like(tensor: Tensor, part: Tensor) -> Tensor:
    """`part` as this rank's part of a tensor that is sharded as `tensor` is."""
    if not isinstance(tensor, DTensor):
        return part
    words = {"shape": tensor.shape, "stride": tensor.stride()}
    return DTensor.from_local(part, tensor.device_mesh, tensor.placements, run_check=False, **words)


@torch.no_grad()
def put(parameters: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Copy values into this rank's parts of the parameters of the same names."""
    for name, value in values.items():
        local(parameters[name]).copy_(local(value))


@contextmanager
def replaced(
    parameters: Mapping[str, Tensor], values: Mapping[str, Tensor], home: torch.device | None = None
) -> Iterator[None]:
    """Context in which parameters have other values; their own wait meanwhile, at `home` if it is named."""
    kept = {name: local(parameters[name]).detach().to(home, copy=True) for name in values}
    put(parameters, values)
    try:
        yield
    finally:
        put(parameters, kept)


def whole(tensor: Tensor) -> Tensor:
    """All of a sharded tensor, on every rank; all ranks must call. Another tensor as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def rows(tensor: Tensor) -> tuple[int, int]:
    """Which rows (start, stop) of dim 0 of the whole tensor are local."""
    if not isinstance(tensor, DTensor):
        return 0, tensor.shape[0] if tensor.ndim else 1
    if any(isinstance(p, Shard) and p.dim for p in tensor.placements):
        raise ValueError("only tensors that are sharded along dim 0 have rows")
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return offset[0], offset[0] + shape[0]
