"""Rates and sizes that the planner takes as measured or assumed; calibration.toml names the source of each.

Imports only the standard library, so that `plan --help` can list the GPU models at once.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

MEASURED_ON = "h200"


class ByMode(NamedTuple):
    """A figure with and without --compile."""

    compiled: float
    eager: float

    def divided_by(self, speedup: float) -> "ByMode":
        """Seconds on a GPU that is `speedup` times as fast."""
        return ByMode(self.compiled / speedup, self.eager / speedup)


class Overhead(NamedTuple):
    """Time of a pass in the trainer, relative to the transformer alone."""

    forward: float
    backward: float


@dataclass(frozen=True)
class RewardCost:
    """Memory and time of a reward model on one GPU."""

    weight_bytes: float
    forward_bytes: float  # in addition, while it scores
    seconds: float  # per clip

    def of_size(self, stored_bytes: float) -> "RewardCost":
        """The cost of a smaller model of the same kind, whose files have this size; at most the full cost."""
        share = min(1.0, stored_bytes / self.weight_bytes)
        return RewardCost(
            weight_bytes=share * self.weight_bytes,
            forward_bytes=share * self.forward_bytes,
            seconds=share * self.seconds,
        )


@dataclass(frozen=True)
class GpuModel:
    """Figures of a data sheet."""

    memory: float  # bytes
    flops: float  # bf16 FLOP/s
    memory_bandwidth: float  # bytes/s
    link_bandwidth: float  # bytes/s of NVLink (or PCIe) into the GPU


@dataclass(frozen=True)
class Calibration:
    """The figures of calibration.toml, for one GPU model."""

    # Compute: FLOP/s, except the optimizer's parameters/s
    attention: float
    attention_backward: float
    linear: float
    optimizer: float

    # Everything else in a block: seconds per token and block
    rest: ByMode
    rest_backward: ByMode
    trainer_overhead: Overhead

    # VAE: seconds per latent position
    decode_tiled: float
    decode_untiled: ByMode

    # Memory, in units of one bf16 number per token and model channel
    forward_activations: ByMode
    training_activations: ByMode
    saved_activations: float
    exchange_activations: float
    adapter_forward: float
    adapter_training: ByMode
    reserve: float  # bytes outside tensors

    # Links: bytes/s into one GPU
    gpus_per_node: int
    nvlink: float
    nic: float
    host: float

    rewards: Mapping[str, RewardCost]
    gpu_model: str = MEASURED_ON


_TABLE: dict[str, Any] = tomllib.loads(Path(__file__).with_name("calibration.toml").read_text())
GPU_MODELS = {name: GpuModel(**figures) for name, figures in _TABLE["gpu_models"].items()}


def calibrate(gpu_model: str = MEASURED_ON) -> Calibration:
    """Scale each rate, measured on an H200, by what bounds it: arithmetic, memory or links."""
    measured = GPU_MODELS[MEASURED_ON]
    chosen = GPU_MODELS[gpu_model]
    compute = chosen.flops / measured.flops
    memory = chosen.memory_bandwidth / measured.memory_bandwidth
    links = chosen.link_bandwidth / measured.link_bandwidth

    t = _TABLE
    return Calibration(
        attention=t["attention"] * compute,
        attention_backward=t["attention_backward"] * compute,
        linear=t["linear"] * compute,
        optimizer=t["optimizer"] * memory,
        rest=ByMode(**t["rest"]).divided_by(memory),
        rest_backward=ByMode(**t["rest_backward"]).divided_by(memory),
        trainer_overhead=Overhead(**t["trainer_overhead"]),
        decode_tiled=t["decode_tiled"] / memory,
        decode_untiled=ByMode(**t["decode_untiled"]).divided_by(memory),
        forward_activations=ByMode(**t["forward_activations"]),
        training_activations=ByMode(**t["training_activations"]),
        saved_activations=t["saved_activations"],
        exchange_activations=t["exchange_activations"],
        adapter_forward=t["adapter_forward"],
        adapter_training=ByMode(**t["adapter_training"]),
        reserve=t["reserve"],
        gpus_per_node=t["gpus_per_node"],
        nvlink=t["nvlink"] * links,
        nic=t["nic"],
        host=t["host"],
        rewards={name: RewardCost(**cost) for name, cost in t["rewards"].items()},
        gpu_model=gpu_model,
    )
