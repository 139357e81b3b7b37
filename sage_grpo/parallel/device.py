"""Which device a process computes on, why no GPU can be used where one is needed, and how much host memory is free."""

import os
import re
from collections.abc import Callable
from pathlib import Path

import torch

SMALL = 100_000_000  # parameters; larger models are useless on a CPU
DRIVER = Path("/proc/driver/nvidia/version")
CGROUP = Path("/sys/fs/cgroup")


def choose_device(wanted: str, parameters: Callable[[], int]) -> str:
    """`cuda` or `cpu`. With `wanted` auto and no usable GPU, only a model of at most SMALL parameters gets the CPU.

    parameters: counts those of the model; called only if they matter.
    """
    if wanted == "cpu":
        return "cpu"
    if torch.cuda.is_available():
        return "cuda"
    if wanted == "auto" and parameters() <= SMALL:
        return "cpu"
    raise ValueError(
        f"no GPU can be used: {why_no_gpu()}; {versions()}: repair that (README.md names the driver to install), or "
        f"give --device cpu, on which a model of more than {SMALL // 10**6} M parameters takes months"
    )


def why_no_gpu() -> str:
    """Why torch finds no GPU, in half a sentence."""
    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and not re.match(r"\d|GPU-|MIG-", visible):
        return f"CUDA_VISIBLE_DEVICES is {visible!r}"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        first_line, *_ = str(error).split("\n")
        first_sentence, *_ = first_line.split(". ")
        return first_sentence.removesuffix(".")
    return "torch counts none"


def versions() -> str:
    """The NVIDIA driver, torch, and the CUDA version that torch is built for."""
    text = DRIVER.read_text() if DRIVER.is_file() else ""
    match = re.search(r"\d{3,}\.\d+(\.\d+)?", text)
    driver = match[0] if match else "none"
    cuda = torch.version.cuda or "none"
    return f"NVIDIA driver {driver}, torch {torch.__version__} for CUDA {cuda}"


def available_memory() -> int:
    """Bytes of host memory that can still be allocated."""
    kilobytes = re.search(r"MemAvailable:\s*(\d+)", Path("/proc/meminfo").read_text())[1]
    free = int(kilobytes) * 1024
    try:  # a container's limit
        limit = (CGROUP / "memory.max").read_text().strip()
        used = (CGROUP / "memory.current").read_text().strip()
        stat = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
    except OSError:
        return free
    if limit == "max":
        return free
    return min(free, int(limit) - int(used) + int(stat["file"]))  # file caches can be dropped
