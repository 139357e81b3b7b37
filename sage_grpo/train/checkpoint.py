"""Checkpoints: everything that a run needs to go on exactly, in safetensors and JSON.

    checkpoints/step-000100/
      transformer/ or pytorch_lora_weights.safetensors    what `generate.py --checkpoint_path` samples, averaged
      trainer/state.json                                  iteration, counters, KL controller
      trainer/rank-00000.safetensors ...                  what changes in training, each rank its rows of it

A folder appears under its final name only when it is complete. Any number of ranks can load it.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from sage_grpo.config import ConfigError
from sage_grpo.models.lora import POLICY, save_adapter
from sage_grpo.models.weights import save_weights
from sage_grpo.parallel.fsdp import local, rows, whole

if TYPE_CHECKING:
    from sage_grpo.train.trainer import Trainer


def save(trainer: "Trainer", folder: Path) -> Path:
    """Write the trainer's state after its current iteration, and drop the oldest beyond `keep_checkpoints`.

    All ranks call. Those of one copy of the model write what they hold, the first rank what exists once.
    """
    ranks, target = trainer.ranks, folder / f"step-{trainer.step:06d}"
    draft = target.with_suffix(".tmp")
    if ranks.first:
        shutil.rmtree(draft, ignore_errors=True)
        (draft / "trainer").mkdir(parents=True)
    ranks.barrier()
    with trainer.optimization.averaged():
        export(trainer, draft)
    if ranks.writes_shards:
        _write_rows(trainer, draft / "trainer" / f"rank-{ranks.world_rank:05d}.safetensors")
    ranks.barrier()
    if ranks.first:
        (draft / "trainer" / "state.json").write_text(json.dumps(_state(trainer), indent=1) + "\n")
        shutil.rmtree(target, ignore_errors=True)
        os.replace(draft, target)
        for old in found(folder)[: -trainer.config.keep_checkpoints]:
            shutil.rmtree(old)
    ranks.barrier()
    return target


def export(trainer: "Trainer", folder: Path) -> None:
    """The weights alone, in the layout of diffusers. All ranks call; the first writes."""
    transformer, first = trainer.policy.transformer, trainer.ranks.first
    if trainer.config.use_lora:
        save_adapter(transformer, POLICY, folder if first else None)
        return
    tensors = ((name, whole(p.detach())) for name, p in transformer.named_parameters())
    if first:
        save_weights(folder / "transformer", tensors)
        (folder / "transformer" / "config.json").write_text(transformer.to_json_string())
    else:
        for _ in tensors:  # take part in gathering each of them
            pass


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


@torch.no_grad()
def load(trainer: "Trainer", path: Path) -> None:
    """Put a checkpoint's state into a freshly built trainer."""
    stored, optimization = _Rows(path / "trainer"), trainer.optimization
    state = json.loads((path / "trainer" / "state.json").read_text())
    parts = _parts(trainer)
    for part in ("weights", "anchor", "average"):
        names = stored.names(part)
        if set(names) != set(parts[part]):
            difference = sorted(set(names) ^ set(parts[part]))[0]
            raise ConfigError(f"the {part} in {path} do not fit this configuration: {difference} differs")
        for name, target in parts[part].items():
            value = stored.read(f"{part}/{name}", *rows(optimization.parameters[name]))
            if value.shape != local(target).shape:  # a copy would stretch one row over many
                raise ConfigError(
                    f"the {part} in {path} do not fit this configuration, or a rank's file is missing: of {name} there "
                    f"is {tuple(value.shape)} where {tuple(local(target).shape)} is needed"
                )
            local(target).copy_(value)
    optimization.load_tensors({
        name: stored.read(f"optimizer/{name}", *_optimizer_rows(trainer, name)) for name in stored.names("optimizer")
    })  # fmt: skip
    trainer.step, trainer.skipped = state["step"], state["skipped"]
    trainer.skipped_in_a_row = state["skipped_in_a_row"]
    optimization.updates = state["updates"]
    trainer.controller.load_state_dict(state["controller"])
    if trainer.anchor:
        trainer.anchor.age = state["anchor_age"]


def _parts(trainer: "Trainer") -> dict[str, Mapping[str, Tensor]]:
    """Tensors that change in training and are not derived, by the name of their parameter."""
    return {
        "weights": trainer.optimization.parameters,
        "optimizer": trainer.optimization.tensors(),
        "anchor": trainer.anchor.tensors() if trainer.anchor else {},
        "average": trainer.optimization.average,
    }


def _optimizer_rows(trainer: "Trainer", name: str) -> tuple[int, int | None]:
    """The rows that this rank keeps of a tensor of the optimizer's state: its parameter's, or all of a number."""
    parameter, _, key = name.rpartition(".")
    return (0, None) if key == "step" else rows(trainer.optimization.parameters[parameter])


def _write_rows(trainer: "Trainer", file: Path) -> None:
    """What this rank holds, and which rows of the whole that is."""
    tensors, starts = {}, {}
    for part, values in _parts(trainer).items():
        for name, value in values.items():
            of = _optimizer_rows(trainer, name) if part == "optimizer" else rows(trainer.optimization.parameters[name])
            tensors[f"{part}/{name}"] = local(value.detach()).contiguous().cpu()
            starts[f"{part}/{name}"] = of[0]
    save_file(tensors, file, metadata={"starts": json.dumps(starts)})


class _Rows:
    """The tensors of all rank files of a checkpoint, by name and rows."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.places = folder, {}
        for path in sorted(folder.glob("rank-*.safetensors")):
            file = safe_open(path, "pt")
            for name, start in json.loads(file.metadata()["starts"]).items():
                self.places.setdefault(name, []).append((start, file))

    def names(self, part: str) -> list[str]:
        return [name.removeprefix(f"{part}/") for name in self.places if name.startswith(f"{part}/")]

    def read(self, name: str, start: int, stop: int | None) -> Tensor:
        """Rows start:stop of a tensor; all of a single number."""
        if not self.places[name][0][1].get_slice(name).get_shape():
            return self.places[name][0][1].get_tensor(name)
        pieces = []
        for begin, file in sorted(self.places[name], key=lambda place: place[0]):
            piece = file.get_slice(name)
            end = begin + piece.get_shape()[0]
            first, last = max(start, begin), end if stop is None else min(stop, end)
            pieces.append(piece[first - begin : max(first, last) - begin] if first < end else piece[0:0])
        return torch.cat(pieces)


def _state(trainer: "Trainer") -> dict:
    return {
        "step": trainer.step,
        "updates": trainer.optimization.updates,
        "skipped": trainer.skipped,
        "skipped_in_a_row": trainer.skipped_in_a_row,
        "anchor_age": trainer.anchor.age if trainer.anchor else None,
        "controller": trainer.controller.state_dict(),
    }
