"""Which device a process computes on, why there is no GPU where one is needed, and what memory its machine has."""

import os
import re
from collections.abc import Callable
from pathlib import Path

import torch

SMALL = 100_000_000  # parameters; larger models are useless on a CPU
DRIVER, CGROUP = Path("/proc/driver/nvidia/version"), Path("/sys/fs/cgroup")


def choose_device(wanted: str, parameters: Callable[[], int]) -> str:
    """`cuda` or `cpu`. If `wanted` is auto and there is no usable GPU, only a model of at most SMALL gets the CPU."""
    if wanted == "cpu":
        return "cpu"
    if torch.cuda.is_available():
        return "cuda"
    if wanted == "auto" and parameters() <= SMALL:
        return "cpu"
    problem = f"no GPU can be used: {why_no_gpu()}; {versions()}: repair that (README.md names the driver to install)"
    remedy = f"give --device cpu, on which a model of more than {SMALL // 10**6} M parameters takes months"
    raise ValueError(f"{problem}, or {remedy}")


def why_no_gpu() -> str:
    """Why torch finds no GPU, in half a sentence."""
    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None and not re.match(
        r"\d|GPU-|MIG-", visible
    ):
        return f"CUDA_VISIBLE_DEVICES is {visible!r}"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).partition("\n")[0].split(". ")[0].removesuffix(".")
    return "torch counts none"


def versions() -> str:
    """The NVIDIA driver, torch, and the CUDA version that torch is built for."""
    found = re.search(r"\d{3,}\.\d+(\.\d+)?", DRIVER.read_text()) if DRIVER.is_file() else None
    driver, cuda = found[0] if found else "none", torch.version.cuda or "none"
    return f"NVIDIA driver {driver}, torch {torch.__version__} for CUDA {cuda}"


def available_memory() -> int:
    """Bytes of host memory that can still be allocated."""
    free = int(re.search(r"MemAvailable:\s*(\d+)", Path("/proc/meminfo").read_text())[1]) * 1024
    try:  # a container's limit; caches count as used, but can be dropped
        limit, used = (
            (CGROUP / f"memory.{name}").read_text().strip() for name in ("max", "current")
        )
        cache = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
    except OSError:
        return free
    return free if limit == "max" else min(free, int(limit) - int(used) + int(cache["file"]))
