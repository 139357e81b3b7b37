"""How fast the ranks of a run exchange tensors: all-gather and all-to-all in groups of 2 ranks and of all.

    bash research/benchmarks/nccl_one_gpu.sh torchrun --nproc_per_node 4 \\
        -m research.benchmarks.link_speed --output speed.json
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor


def speed(
    call: Callable[[], object], received: int, device: torch.device, repeats: int = 3
) -> float:
    """GB/s into each rank; the slowest of its ranks determines a group's time."""
    call()
    times = []
    for _ in range(repeats):
        begin = _now(device)
        call()
        times.append(_now(device) - begin)
    slowest = torch.tensor(min(times), device=device, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return received / slowest.item() / 1e9


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def measure(group: dist.ProcessGroup, size: int, device: torch.device) -> dict[str, float]:
    """Messages of about `size` bytes, as large as the weights of one transformer block."""
    count = dist.get_world_size(group)
    full: Tensor = torch.zeros(size // 2 // count * count, device=device, dtype=torch.bfloat16)
    part = full.chunk(count)[0].clone()
    received = part.nbytes * (count - 1)
    other = torch.empty_like(full)

    def gather() -> None:
        dist.all_gather_into_tensor(full, part, group)

    def exchange() -> None:
        dist.all_to_all_single(other, full, group=group)

    return {
        "all-gather": speed(gather, received, device),
        "all-to-all": speed(exchange, received, device),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="JSON file for the speeds")
    parser.add_argument("--bytes", type=int, default=300_000_000, help="size of a message")
    options = parser.parse_args()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    # All pairs work at once.
    pairs = [dist.new_group([first, first + 1]) for first in range(0, world - 1, 2)]
    speeds = {2: measure(pairs[rank // 2], options.bytes, device)}
    if world > 2:
        speeds[world] = measure(dist.group.WORLD, options.bytes, device)
    if rank == 0:
        options.output.write_text(json.dumps(speeds))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
