"""The short doctor: whether this machine can run a configuration, in seconds and without loading the model."""

import math
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from sage_grpo.config.fields import Config, default_dtype
from sage_grpo.models.registry import open_backbone
from sage_grpo.parallel.device import available_memory, choose_device, versions
from sage_grpo.rewards.base import Setup
from sage_grpo.rewards.build import build_reward
from sage_grpo.rewards.registry import ALIASES
from sage_grpo.rewards.videoalign.folder import check_folder
from sage_grpo.tools.doctor.checks import Finding, attempt, judged
from sage_grpo.tools.plan.memory import checkpoint_bytes, disk_bytes, fits, peak, snapshot_bytes
from sage_grpo.tools.plan.model import BYTES, Plan
from sage_grpo.tools.plan.planner import backbone_of, plan_of
from sage_grpo.tools.plan.remedies import remedies
from sage_grpo.tools.plan.times import times
from sage_grpo.train.inputs import reward_folder

PROCESS = 6e9  # host bytes of a rank: Python, CUDA, tensors on their way; 2.3 to 5.3 GB measured, without mapped files
BLOCK, LARGEST, LONGEST = (
    32 << 20,
    1 << 30,
    3.0,
)  # of the write test: bytes at once, bytes and seconds at most
REWARD_TIMEOUT = 20.0  # seconds


@dataclass(frozen=True)
class Machine:
    """A run, and its part on this machine."""

    plan: Plan
    device: str  # cuda or cpu
    refused: str  # why that device cannot be used
    ranks: int  # processes on this machine
    place: Path  # the run folder, or as much of its path as exists


def machine_of(config: Config, ranks: int, ranks_here: int) -> Machine:
    backbone = backbone_of(config.pretrained_model_root, config.pretrained_transformer_version)
    device, refused, run = "cuda", "", Path(config.output_dir).absolute()
    try:
        device = choose_device(config.device, lambda: backbone.architecture().parameters)
    except ValueError as error:
        refused = str(error)
    try:
        plan = plan_of(replace(config, dtype=config.dtype or default_dtype(device)), ranks)
    except ValueError as error:  # no GPU, or a missing folder, which stands for the full-size model here, explain more
        open_backbone(config.pretrained_model_root, version=config.pretrained_transformer_version)
        raise ValueError(refused or error) from error
    return Machine(
        plan, device, refused, ranks_here, next(p for p in (run, *run.parents) if p.exists())
    )


def check_model(machine: Machine) -> Iterator[Finding]:
    folder = machine.plan.config.pretrained_model_root
    open_backbone(folder, version=machine.plan.config.pretrained_transformer_version)
    yield judged("model", True, folder=folder, size=machine.plan.model.parameters)


def check_gpus(machine: Machine) -> Iterator[Finding]:
    """Whether torch can compute on each GPU, and whether the run fits."""
    if machine.refused or machine.device == "cpu":
        yield judged("gpus.cpu", not machine.refused, refused=machine.refused)
        return
    here, numbers = (
        range(machine.ranks),
        {"ranks": machine.ranks, "count": torch.cuda.device_count()},
    )
    if numbers["count"] < machine.ranks:
        yield judged("gpus.few", False, versions=versions(), **numbers)
        return
    squares = [torch.ones(64, 64, device=f"cuda:{number}", dtype=torch.bfloat16) for number in here]
    wrong = [
        number for number, square in enumerate(squares) if (square @ square).sum().item() != 64**3
    ]
    yield judged(
        "gpus",
        not wrong,
        name=torch.cuda.get_device_name(),
        versions=versions(),
        wrong=wrong,
        **numbers,
    )
    yield memory_finding(
        machine.plan, min(torch.cuda.get_device_properties(number).total_memory for number in here)
    )


def memory_finding(plan: Plan, gpu_bytes: float) -> Finding:
    moment, most = peak(plan)
    numbers = {"peak": most, "moment": moment, "reserve": plan.rates.reserve, "there": gpu_bytes}
    return judged(
        "memory",
        fits(plan, gpu_bytes),
        flags=[change.flag for change in remedies(plan, gpu_bytes)],
        **numbers,
    )


def check_host(machine: Machine) -> Iterator[Finding]:
    """Host memory for loading, and then for an anchor that is kept there and for asynchronous saves."""
    plan, c, free = machine.plan, machine.plan.config, available_memory()
    offloaded = c.trust_region.anchor is not None and c.reference_mode_offload and not c.use_lora
    anchor = machine.ranks * plan.trained.total / plan.shards * BYTES[c.dtype] * offloaded
    loading = (
        2 * sum(reward.weight_bytes for reward in plan.rewards) * machine.ranks / c.sp_size
    )  # as stored, and as used
    base = PROCESS * machine.ranks * (machine.device == "cuda")
    needed, copy = base + max(loading, anchor), snapshot_bytes(plan)
    waits = needed <= free < base + anchor + copy
    yield judged("host", needed <= free, free=free, needed=needed, waits=waits, copy=copy)


def check_disk(machine: Machine) -> Iterator[Finding]:
    """Room for the checkpoints of the run, of which a resumed one has some already."""
    c, needed, free = (
        machine.plan.config,
        disk_bytes(machine.plan),
        shutil.disk_usage(machine.place).free,
    )
    saved = sum(
        file.stat().st_size
        for file in Path(c.output_dir, "checkpoints").rglob("*")
        if file.is_file()
    )
    yield judged(
        "disk",
        saved + free >= needed,
        place=str(machine.place),
        free=free,
        needed=needed,
        saved=saved,
    )


def check_speed(machine: Machine) -> Iterator[Finding]:
    """Write an unnamed file where the run will be; a checkpoint must take less time than lies between two."""
    plan, c, size = (
        machine.plan,
        machine.plan.config,
        checkpoint_bytes(machine.plan.config, machine.plan.trained),
    )
    speed = write_speed(machine.place, size)
    limits = [
        60 * c.save_minutes,
        c.save_interval * sum(times(plan).values()) * (machine.device == "cuda"),
    ]
    numbers = {"seconds": size / speed, "between": min(filter(None, limits), default=None)}
    good = numbers["seconds"] <= (numbers["between"] or math.inf)
    yield judged("speed", good, place=str(machine.place), speed=speed, **numbers)


def write_speed(folder: Path, most: float) -> float:
    """Bytes per second that reach the disk, from a file of at most that size."""
    block, written, start = os.urandom(BLOCK), 0, time.perf_counter()
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        while written < min(LARGEST, most) and time.perf_counter() - start < LONGEST:
            written += file.write(block)
            os.fsync(file.fileno())
    return written / (time.perf_counter() - start)


def check_reward(machine: Machine) -> Iterator[Finding]:
    """Whether servers answer and folders are complete; VideoAlign's weights are not loaded."""
    c, path = machine.plan.config, reward_folder(machine.plan.config)
    setup = Setup(
        path, torch.device("cpu"), c.reward_fps, c.remote_reward_url, REWARD_TIMEOUT, REWARD_TIMEOUT
    )
    names = [ALIASES.get(name, name) for name in (*c.reward_model, c.holdout_reward) if name]
    for name in names:
        check_folder(path) if name == "videoalign" else build_reward(name, setup)
    yield judged("reward.usable", True, names=names)


CHECKS = (check_model, check_gpus, check_host, check_disk, check_speed, check_reward)


def examine_machine(machine: Machine) -> list[Finding]:
    """Print a line per finding."""
    findings = []
    for check in CHECKS:
        for finding in attempt(check.__name__.removeprefix("check_"), check, machine, "failed"):
            mark = "FAIL" if finding.mark == "WRONG" else finding.mark
            print(
                f"{mark:<6}{finding.check:<8}{'; '.join(filter(None, (finding.text, finding.remedy)))}",
                flush=True,
            )
            findings.append(finding)
    return findings
