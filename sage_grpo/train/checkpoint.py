"""Checkpoints: everything a run needs to resume exactly, in safetensors and JSON.

    checkpoints/step-000100/
      trainer/state.json                     iteration, counters, KL controller, configuration, fingerprints
      trainer/rank-00000.safetensors ...     everything that training changes, each rank's rows
      pytorch_lora_weights.safetensors       with LoRA: the adapter for other software, EMA applied
      transformer/                           with all weights, when `export_interval` asks for it: the same
      (..._2.safetensors, transformer_2/)    of a model with a second transformer, for low noise levels
      README.md, curves.png                  with either of them: the model card
      manifest.json                          SHA-256 of each of these files

A folder gets its final name only once it is complete and on disk. Any number of ranks can load it.
`checkpoint_folders.py` knows which checkpoints a run has, `saving.py` writes them while training goes on.
"""

import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from sage_grpo.config.fields import Config, ConfigError
from sage_grpo.files import manifest
from sage_grpo.files.tensor_files import TensorFile, host_copy, write_file
from sage_grpo.models.shards import open_shards, rank_file, shards
from sage_grpo.models.weights import Weights
from sage_grpo.parallel.device import available_memory
from sage_grpo.parallel.fsdp import local_shard
from sage_grpo.parallel.ranks import Ranks
from sage_grpo.train.fingerprints import flat
from sage_grpo.train.state import COUNTERS, TrainState

STATE_FILE = "trainer/state.json"
# flags that only say where and how a run starts
LOCATION_FLAGS = (
    "output_dir",
    "overwrite",
    "resume_from_checkpoint",
    "init_from_checkpoint",
    "prompt_cache",
)
# flags that decide which tensors a part holds
FLAGS_OF_PART = {
    "weights": "the use_lora and lora_* flags",
    "anchor": "kl_weight and dual_kl_moving_weight",
    "average": "ema_decay",
    "old_policy": "algorithm, nft_decay and nft_decay_growth",
}
MAX_MEMORY = 0.8  # share of the available host memory that a copy for a save may take
# what state.json must hold
FIELD_TYPES: dict[str, Any] = {
    "step": int,
    **dict.fromkeys(COUNTERS, int),
    "anchor_age": int | None,
    "controller": dict,
    "config": dict,
    "fingerprints": dict,
}


def fits_in_memory(state: TrainState) -> bool:
    """Whether this machine has room for a copy of what its ranks write."""
    rank_bytes = sum(value.nbytes for value in state.shards().values())
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return MAX_MEMORY * available_memory() > local_ranks * rank_bytes


def state_files(
    state: TrainState, config: Config, fingerprints: Mapping[str, Any], ranks: Ranks, copied: bool
) -> dict[str, TensorFile | str]:
    """This rank's files of the state. copied: from copies in host memory, so that training can go on."""
    files: dict[str, TensorFile | str] = {}
    if ranks.is_first:
        files[STATE_FILE] = json.dumps(_state_json(state, config, fingerprints), indent=1) + "\n"
    if ranks.writes_shards:
        tensors = state.shards()
        if copied:
            tensors = {name: host_copy(value) for name, value in tensors.items()}
        first_rows = {}
        for name in tensors:
            part, _, tensor_name = name.partition("/")
            first_rows[name] = state.rows(part, tensor_name)[0]
        files[rank_file(ranks.world_rank)] = shards(tensors, first_rows)
    return files


def _state_json(
    state: TrainState, config: Config, fingerprints: Mapping[str, Any]
) -> dict[str, Any]:
    return state.numbers() | {
        "config": plain_config(config),
        "fingerprints": fingerprints,
        "tensors": {part: len(values) for part, values in state.tensors().items()},
    }


def write_files(
    draft: Path, files: Mapping[str, TensorFile | str], on_piece: Callable[[], None]
) -> dict[str, str]:
    """Write files below `draft`; returns their hashes by name."""
    hashes = {}
    for name, contents in files.items():
        (draft / name).parent.mkdir(exist_ok=True)
        hashes[name] = write_file(draft / name, contents, on_piece)
    return hashes


def read_state(path: Path) -> dict[str, Any]:
    """The numbers of a checkpoint, each of its type."""
    file = path / STATE_FILE
    try:
        numbers = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise manifest.Damaged(f"{file} cannot be read ({type(error).__name__})") from error
    if not isinstance(numbers, dict):
        raise manifest.Damaged(f"{file} is not a JSON object")
    numbers = {"fingerprints": {}} | numbers  # the first versions wrote none
    for name, kind in FIELD_TYPES.items():
        if name not in numbers or not isinstance(numbers[name], kind):
            raise manifest.Damaged(f"{file} has {name} {numbers.get(name)!r:.100}")
    return numbers


def load(
    state: TrainState, config: Config, fingerprints: Mapping[str, Any], ranks: Ranks, path: Path
) -> None:
    """Load a checkpoint into a freshly built state; name everything that is not as it was when it was written."""
    try:
        numbers = read_state(path)
        _compare(config, fingerprints, numbers, ranks, path)
        _load(state, open_shards(path), numbers, path)
    except ConfigError:
        raise
    except (
        KeyError,
        TypeError,
        AttributeError,
        ValueError,
        OSError,
        RuntimeError,
        SafetensorError,
    ) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ConfigError(
            f"{path} cannot be read as a checkpoint of this version: {reason}"
        ) from error


@torch.no_grad()
def _load(
    state: TrainState, stored: Mapping[str, Weights], numbers: dict[str, Any], path: Path
) -> None:
    for part, count in numbers.get("tensors", {}).items():
        if count != len(stored[part].names):
            raise ConfigError(
                f"{path} has {len(stored[part].names)} tensors of the {part}, but was saved with {count}"
            )

    tensors = state.tensors()
    for part in ("weights", "anchor", "average", "old_policy"):
        _load_part(state, part, tensors[part], stored[part], path)
    stored_optimizer = stored["optimizer"]
    state.optimization.load_tensors(
        {
            name: stored_optimizer.read(name, *state.rows("optimizer", name))
            for name in stored_optimizer.names
        }
    )
    state.load_numbers(numbers)


def _load_part(
    state: TrainState,
    part: str,
    targets: Mapping[str, torch.Tensor],
    stored: Weights,
    path: Path,
) -> None:
    """Copy the stored tensors of a part into this rank's shards of its targets."""
    if differing := sorted(set(stored.names) ^ set(targets)):
        raise ConfigError(
            f"the {part} in {path} do not fit this configuration: {differing[0]} differs; resume with "
            f"{FLAGS_OF_PART[part]} as they were, or start a new run with init_from_checkpoint"
        )
    for name, target in targets.items():
        value = stored.read(name, *state.rows(part, name))
        shard = local_shard(target)
        if value.shape != shard.shape:  # copy_ would broadcast one row over many
            raise ConfigError(
                f"the {part} in {path} do not fit this configuration, or a rank's file is missing: "
                f"{name} has shape {tuple(value.shape)}; expected {tuple(shard.shape)}"
            )
        shard.copy_(value)


def _compare(
    config: Config,
    fingerprints: Mapping[str, Any],
    numbers: dict[str, Any],
    ranks: Ranks,
    path: Path,
) -> None:
    """Refuse other base weights; log everything else that changed since the checkpoint was written."""
    now = plain_config(config) | flat(fingerprints)
    before = numbers["config"] | flat(numbers["fingerprints"])
    if before.get("base weights", now["base weights"]) != now["base weights"]:
        raise ConfigError(
            f"{path} was trained from other weights than those in {config.pretrained_model_root}; "
            "name the model it began with, or start a new run with init_from_checkpoint"
        )
    if before.get("use_lora", config.use_lora) != config.use_lora:
        trained = "an adapter" if before["use_lora"] else "all weights"
        raise ConfigError(
            f"{path} holds {trained}, trained with use_lora {before['use_lora']}, and this run has "
            f"use_lora {config.use_lora}; resume with --use_lora {before['use_lora']}, or start a new run from "
            "a model folder with what scripts/export_checkpoint.py makes of the checkpoint"
        )
    for name, old in sorted(before.items()):
        if name in now and now[name] != old:
            ranks.log_once(f"changed since the checkpoint: {name} {old!r} -> {now[name]!r}")


def plain_config(config: Config) -> dict[str, Any]:
    """The configuration after a JSON round trip, without flags that only say where and how a run starts."""
    values = dataclasses.asdict(config)
    for name in LOCATION_FLAGS:
        del values[name]
    return json.loads(json.dumps(values))
