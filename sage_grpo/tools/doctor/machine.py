"""The short doctor: whether this machine can run a configuration, in seconds and without loading the model."""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from sage_grpo.config.fields import Config, default_dtype
from sage_grpo.models.registry import open_backbone
from sage_grpo.parallel.device import available_memory, choose_device, versions
from sage_grpo.rewards.build import build_reward
from sage_grpo.rewards.registry import ALIASES
from sage_grpo.rewards.videoalign.folder import check_folder
from sage_grpo.tools.doctor.check_result import CheckResult, ok, wrong
from sage_grpo.tools.plan.memory import (
    checkpoint_bytes,
    disk_bytes,
    fits,
    offloaded_bytes,
    peak,
    snapshot_bytes,
    swapped_bytes,
)
from sage_grpo.tools.plan.model import Plan
from sage_grpo.tools.plan.planner import backbone_of, plan_of
from sage_grpo.tools.plan.remedies import remedies
from sage_grpo.tools.plan.times import times
from sage_grpo.train.inputs import requests_from, reward_folder, reward_setup
from sage_grpo.worlds.registry import check_prompts as world_prompts

GB = 1e9  # bytes
# Host bytes of a rank on a GPU: Python, CUDA, tensors in transit. 2.3 to 5.3 GB were measured, without mapped files.
PROCESS_BYTES = 6e9
REWARD_TIMEOUT = 20.0  # seconds

# The write test
BLOCK_BYTES = 32 << 20  # written at once
MAX_BYTES = 1 << 30
MAX_SECONDS = 3.0


@dataclass(frozen=True)
class Machine:
    """A run, and its part on this machine."""

    plan: Plan
    device: str  # cuda or cpu
    refused: str  # why that device cannot be used; empty if it can
    ranks: int  # processes on this machine
    place: Path  # the run folder, or as much of its path as exists


def machine_of(config: Config, ranks: int, ranks_here: int) -> Machine:
    """Plan a run of `ranks` processes, of which `ranks_here` are on this machine."""
    folder = config.pretrained_model_root
    version = config.pretrained_transformer_version
    backbone = backbone_of(folder, version)
    device = "cuda"
    refused = ""
    try:
        device = choose_device(config.device, lambda: backbone.architecture().parameters)
    except ValueError as error:
        refused = str(error)
    try:
        plan = plan_of(replace(config, dtype=config.dtype or default_dtype(device)), ranks)
    except ValueError as error:
        # A missing folder was planned as the full-size model. If that or a missing GPU is the cause, it explains more.
        open_backbone(folder, version=version)
        raise ValueError(refused or error) from error

    run = Path(config.output_dir).absolute()
    place = next(path for path in (run, *run.parents) if path.exists())
    return Machine(plan=plan, device=device, refused=refused, ranks=ranks_here, place=place)


def check_model(machine: Machine) -> Iterator[CheckResult]:
    """Open the model folder without its weights; what is missing raises an error."""
    c = machine.plan.config
    open_backbone(c.pretrained_model_root, version=c.pretrained_transformer_version)
    parameters = machine.plan.model.parameters * machine.plan.model.experts
    yield ok(
        "model",
        f"{c.pretrained_model_root} is complete: {parameters / 1e9:.2f} B parameters",
        numbers={"folder": c.pretrained_model_root, "size": parameters},
    )


def check_prompts(machine: Machine) -> Iterator[CheckResult]:
    """Read the prompt files; an error if one cannot be read, or lacks the images that the model animates."""
    c = machine.plan.config
    folder = Path(c.pretrained_model_root)
    train = requests_from(c.train_prompts, folder, "train")
    held_out = requests_from(c.validation_prompts, folder, "valid")
    requests = [*train, *held_out]
    backbone = open_backbone(folder, version=c.pretrained_transformer_version, complete=False)
    backbone.check_requests(requests)
    world_prompts(folder, [request.text for request in requests])
    num_images = sum(request.image is not None for request in requests)
    yield ok(
        "prompts",
        f"{len(train)} to train, {len(held_out)} held out, {num_images} of them with an image",
        numbers={"train": len(train), "held_out": len(held_out), "images": num_images},
    )


def check_gpus(machine: Machine) -> Iterator[CheckResult]:
    """WRONG if there are too few GPUs, if one computes wrong results, or if the run does not fit the smallest one."""
    if machine.refused:
        yield wrong("gpus", machine.refused)
        return
    if machine.device == "cpu":
        yield ok("gpus", "none needed: the run is on the CPU")
        return

    ranks = machine.ranks
    count = torch.cuda.device_count()
    numbers = {"ranks": ranks, "count": count, "versions": versions()}
    if count < ranks:
        yield wrong(
            "gpus",
            f"torch finds {count} for {ranks} processes; {versions()}",
            "set NUM_GPUS, or check CUDA_VISIBLE_DEVICES",
            numbers=numbers,
        )
        return

    broken = [number for number in range(ranks) if not computes(f"cuda:{number}")]
    name = torch.cuda.get_device_name()
    text = f"{ranks} of {count} x {name}; {versions()}"
    numbers |= {"name": name, "wrong": broken}
    if broken:
        remedy = f"GPUs {broken} compute wrong results: leave them out"
        yield wrong("gpus", text, remedy, numbers=numbers)
    else:
        yield ok("gpus", text, numbers=numbers)

    sizes = [torch.cuda.get_device_properties(number).total_memory for number in range(ranks)]
    yield memory_result(machine.plan, min(sizes))


def computes(device: str) -> bool:
    """Whether a product of matrices of ones is right."""
    ones = torch.ones(64, 64, device=device, dtype=torch.bfloat16)
    return (ones @ ones).sum().item() == 64**3


def memory_result(plan: Plan, gpu_bytes: float) -> CheckResult:
    """WRONG if the planned peak and a reserve exceed the memory of a GPU."""
    moment, peak_bytes = peak(plan)
    reserve = plan.rates.reserve
    text = (
        f"computed peak {peak_bytes / GB:.1f} GB ({moment}), {reserve / GB:g} GB in reserve, "
        f"the GPU has {gpu_bytes / GB:.1f} GB"
    )
    flags = [change.words for change in remedies(plan, gpu_bytes)]
    numbers = {
        "peak": peak_bytes,
        "moment": moment,
        "reserve": reserve,
        "gpu_bytes": gpu_bytes,
        "flags": flags,
    }
    if fits(plan, gpu_bytes):
        return ok("memory", text, numbers=numbers)
    remedy = " ".join(flags) or "more GPUs with enable_fsdp, or smaller clips"
    return wrong("memory", text, remedy, numbers=numbers)


def check_host(machine: Machine) -> Iterator[CheckResult]:
    """WRONG if host memory is too small for loading rewards, or for what waits there while the run trains."""
    plan = machine.plan
    c = plan.config
    processes = PROCESS_BYTES * machine.ranks if machine.device == "cuda" else 0.0
    reward_weights = sum(reward.weight_bytes for reward in plan.rewards)
    # each leader of a sequence-parallel group holds them as stored and as used
    loading = 2 * reward_weights * machine.ranks / c.sp_size
    # an anchor and the weights that it replaces, and transformers that take turns on a GPU
    waiting = machine.ranks * offloaded_bytes(plan)
    if machine.device == "cuda":
        waiting += machine.ranks * swapped_bytes(plan)

    free = available_memory()
    needed = processes + max(loading, waiting)
    snapshot = snapshot_bytes(plan)
    saves_block = needed <= free < processes + waiting + snapshot
    text = f"{free / GB:.0f} GB of host memory are free, {needed / GB:.0f} GB are needed"
    if saves_block:
        text += (
            f"; async_save finds no {snapshot / GB:.0f} GB for a copy, "
            "so training will wait for each save"
        )
    numbers = {"free": free, "needed": needed, "waits": saves_block, "copy": snapshot}
    if needed <= free:
        yield ok("host", text, numbers=numbers)
    else:
        remedy = "end other programs, or set reference_mode_offload False"
        if swapped_bytes(plan):
            remedy = "end other programs, or shard the transformers: enable_fsdp True"
        yield wrong("host", text, remedy, numbers=numbers)


def check_disk(machine: Machine) -> Iterator[CheckResult]:
    """WRONG without room for the checkpoints of the run, of which a resumed one has some already."""
    checkpoints = Path(machine.plan.config.output_dir, "checkpoints")
    saved = sum(file.stat().st_size for file in checkpoints.rglob("*") if file.is_file())
    free = shutil.disk_usage(machine.place).free
    needed = disk_bytes(machine.plan)
    text = (
        f"{machine.place} has {free / GB:.1f} GB free; "
        f"keep_checkpoints + 1 need {needed / GB:.1f} GB"
    )
    if saved:
        text += f", of which {saved / GB:.1f} GB are there"
    numbers = {"place": str(machine.place), "free": free, "needed": needed, "saved": saved}
    if saved + free >= needed:
        yield ok("disk", text, numbers=numbers)
    else:
        remedy = "free disk space, lower keep_checkpoints, or choose another output_dir"
        yield wrong("disk", text, remedy, numbers=numbers)


def check_speed(machine: Machine) -> Iterator[CheckResult]:
    """WRONG if writing a checkpoint takes longer than the time between two."""
    size = checkpoint_bytes(machine.plan.config, machine.plan.trained)
    speed = write_speed(machine.place, size)
    seconds = size / speed
    between = seconds_between_saves(machine)
    text = f"{machine.place} writes {speed / GB:.2f} GB/s: {seconds:.0f} s for a checkpoint"
    if between is not None:
        text += f", one every {between:.0f} s"
    numbers = {
        "place": str(machine.place),
        "speed": speed,
        "seconds": seconds,
        "between": between,
    }
    if between is None or seconds <= between:
        yield ok("speed", text, numbers=numbers)
    else:
        remedy = "use a faster disk, or raise save_interval and save_minutes"
        yield wrong("speed", text, remedy, numbers=numbers)


def seconds_between_saves(machine: Machine) -> float | None:
    """Seconds between two checkpoints, as far as known: the planner knows iterations on a GPU only."""
    c = machine.plan.config
    intervals = []
    if c.save_minutes:
        intervals.append(60 * c.save_minutes)
    if c.save_interval and machine.device == "cuda":
        intervals.append(c.save_interval * sum(times(machine.plan).values()))
    return min(intervals, default=None)


def write_speed(folder: Path, size: float) -> float:
    """Bytes per second that reach the disk, measured with an unnamed file of at most `size` bytes."""
    block = os.urandom(BLOCK_BYTES)
    written = 0
    start = time.perf_counter()
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        while written < min(MAX_BYTES, size) and time.perf_counter() - start < MAX_SECONDS:
            written += file.write(block)
            os.fsync(file.fileno())
    return written / (time.perf_counter() - start)


def check_reward(machine: Machine) -> Iterator[CheckResult]:
    """Whether servers answer and folders are complete; an error if not. VideoAlign's weights are not loaded."""
    c = machine.plan.config
    folder = reward_folder(c)
    setup = reward_setup(c, torch.device("cpu"), REWARD_TIMEOUT, REWARD_TIMEOUT)
    names = [ALIASES.get(name, name) for name in (*c.reward_model, c.holdout_reward) if name]
    for name in names:
        if name == "videoalign":
            check_folder(folder)
        else:
            build_reward(name, setup)
    yield ok("reward", f"{' and '.join(names)} can be used", numbers={"names": names})


# In the order in which they run
CHECKS: dict[str, Callable[[Machine], Iterator[CheckResult]]] = {
    "model": check_model,
    "prompts": check_prompts,
    "gpus": check_gpus,
    "host": check_host,
    "disk": check_disk,
    "speed": check_speed,
    "reward": check_reward,
}


def examine_machine(machine: Machine) -> list[CheckResult]:
    """Run all checks and print a line per result."""
    results = []
    for name, check in CHECKS.items():
        for result in run_machine_check(name, check, machine):
            mark = "FAIL" if result.is_wrong else result.mark
            text = f"{result.text}; {result.remedy}" if result.remedy else result.text
            print(f"{mark:<6}{result.check:<8}{text}", flush=True)
            results.append(result)
    return results


def run_machine_check(
    name: str, check: Callable[[Machine], Iterator[CheckResult]], machine: Machine
) -> Iterator[CheckResult]:
    """The results of a check. Errors of these checks are sentences for users, with the remedy in them."""
    try:
        yield from check(machine)
    except (ValueError, OSError, RuntimeError) as error:
        yield wrong(name, str(error), numbers={"error": str(error)})
