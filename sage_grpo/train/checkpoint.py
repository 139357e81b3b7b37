"""Checkpoints: everything that a run needs to go on exactly, in safetensors and JSON.

    checkpoints/step-000100/
      transformer/ or pytorch_lora_weights.safetensors    what `generate.py --checkpoint_path` samples, averaged
      trainer/state.json                                  iteration, counters, KL controller
      trainer/{weights,optimizer,anchor,average}.safetensors

A folder appears under its final name only when it is complete.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sage_grpo.config import ConfigError
from sage_grpo.models.lora import LORA_FILE, POLICY

if TYPE_CHECKING:
    from sage_grpo.train.trainer import Trainer


def save(trainer: "Trainer", folder: Path) -> Path:
    """Write the trainer's state after its current iteration, and drop the oldest beyond `keep_checkpoints`."""
    target = folder / f"step-{trainer.step:06d}"
    draft = target.with_suffix(".tmp")
    shutil.rmtree(draft, ignore_errors=True)
    inner = draft / "trainer"
    inner.mkdir(parents=True)
    with trainer.optimization.averaged():
        export(trainer, draft)
    for name, tensors in _parts(trainer).items():
        if tensors:
            save_file(
                {key: value.detach().contiguous().cpu() for key, value in tensors.items()},
                inner / f"{name}.safetensors",
            )
    (inner / "state.json").write_text(json.dumps(_state(trainer), indent=1) + "\n")
    shutil.rmtree(target, ignore_errors=True)
    os.replace(draft, target)
    for old in found(folder)[: -trainer.config.keep_checkpoints]:
        shutil.rmtree(old)
    return target


def export(trainer: "Trainer", folder: Path) -> None:
    """The weights alone, in the layout of diffusers."""
    if trainer.config.use_lora:
        trainer.policy.transformer.save_lora_adapter(folder, adapter_name=POLICY, weight_name=LORA_FILE)
    else:
        trainer.policy.transformer.save_pretrained(folder / "transformer")


def found(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(path for path in folder.glob("step-*") if path.suffix != ".tmp" and path.is_dir())


def choose(run_folder: Path, wanted: str) -> Path:
    """The checkpoint that `resume_from_checkpoint` names; `auto` is the newest of the run."""
    if wanted != "auto":
        if not (Path(wanted) / "trainer" / "state.json").is_file():
            raise ConfigError(f"resume_from_checkpoint {wanted} is no checkpoint: it has no trainer/state.json")
        return Path(wanted)
    checkpoints = found(run_folder / "checkpoints")
    if not checkpoints:
        raise ConfigError(f"resume_from_checkpoint is auto, but {run_folder}/checkpoints holds none")
    return checkpoints[-1]


def load(trainer: "Trainer", path: Path) -> None:
    """Put a checkpoint's state into a freshly built trainer."""
    inner = path / "trainer"
    state = json.loads((inner / "state.json").read_text())
    for name, targets in _parts(trainer).items():
        if name != "optimizer":
            _copy(targets, inner / f"{name}.safetensors")
    file = inner / "optimizer.safetensors"  # absent before the first optimizer step
    trainer.optimization.load_tensors(load_file(file) if file.is_file() else {})
    trainer.step, trainer.skipped = state["step"], state["skipped"]
    trainer.skipped_in_a_row = state["skipped_in_a_row"]
    trainer.optimization.updates = state["updates"]
    trainer.controller.load_state_dict(state["controller"])
    if trainer.anchor:
        trainer.anchor.age = state["anchor_age"]


def _parts(trainer: "Trainer") -> dict[str, Mapping[str, Tensor]]:
    """Tensors by file: what changes in training and is not derived."""
    return {
        "weights": trainer.optimization.parameters,
        "optimizer": trainer.optimization.tensors(),
        "anchor": trainer.anchor.tensors() if trainer.anchor else {},
        "average": trainer.optimization.average,
    }


def _state(trainer: "Trainer") -> dict:
    return {
        "step": trainer.step,
        "updates": trainer.optimization.updates,
        "skipped": trainer.skipped,
        "skipped_in_a_row": trainer.skipped_in_a_row,
        "anchor_age": trainer.anchor.age if trainer.anchor else None,
        "controller": trainer.controller.state_dict(),
    }


@torch.no_grad()
def _copy(targets: Mapping[str, Tensor], file: Path) -> None:
    if not targets:
        return
    if not file.is_file():
        raise ConfigError(f"the checkpoint has no {file.name}; was it written with another configuration?")
    values = load_file(file)
    if set(values) != set(targets):
        raise ConfigError(f"{file} does not fit this configuration: {sorted(set(values) ^ set(targets))[0]} differs")
    for name, target in targets.items():
        target.copy_(values[name])
