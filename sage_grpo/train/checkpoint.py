"""Checkpoints: everything a run needs to resume exactly, in safetensors and JSON.

    checkpoints/step-000100/
      transformer/ or pytorch_lora_weights.safetensors    what `generate.py --checkpoint_path` loads, EMA applied
      trainer/state.json                                  iteration, counters, KL controller, configuration
      trainer/rank-00000.safetensors ...                  everything that training changes, each rank's rows
      manifest.json                                       SHA-256 of each of these files

A folder gets its final name only once it is complete and on disk. Any number of ranks can load it.
"""

import dataclasses
import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from sage_grpo import manifest
from sage_grpo.algo.trust_region import KLController
from sage_grpo.config import Config, ConfigError
from sage_grpo.models.backbone import Backbone
from sage_grpo.parallel.fsdp import local_shard, rows
from sage_grpo.parallel.ranks import RankError, Ranks
from sage_grpo.train.anchor import Anchor
from sage_grpo.train.guards import StepVote
from sage_grpo.train.optimization import Optimization

PLACES = ("output_dir", "overwrite", "resume_from_checkpoint", "init_from_checkpoint", "prompt_cache")

STATE = {"step": int, "updates": int, "skipped": int, "skipped_in_a_row": int, "anchor_age": int | None,
         "controller": dict, "config": dict}  # fmt: skip


class Checkpointed(Protocol):
    """What a checkpoint needs from a trainer."""

    config: Config
    ranks: Ranks
    backbone: Backbone
    optimization: Optimization
    anchor: Anchor | None
    controller: KLController
    vote: StepVote
    step: int
    settled_step: int


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, in one sentence; earlier checkpoints are untouched."""


def save(trainer: Checkpointed, folder: Path) -> Path:
    """Write the trainer's state after its last optimizer step, and delete the oldest beyond `keep_checkpoints`.

    All ranks call this. The ranks of one model replica write their shards; the first rank writes everything unsharded.
    If any of them fails, all raise CheckpointError and no folder appears.
    """
    ranks, target = trainer.ranks, folder / f"step-{trainer.settled_step:06d}"
    draft = target.with_suffix(".tmp")
    try:
        ranks.together(lambda: shutil.rmtree(draft, ignore_errors=True) if ranks.first else None)
        ranks.together(lambda: (draft / "trainer").mkdir(parents=True, exist_ok=True))
        hashes = ranks.together(lambda: _write(trainer, draft))
        files = {name: digest for part in hashes for name, digest in part.items()}
        ranks.together(lambda: _finish(draft, target, files, trainer.config.keep_checkpoints) if ranks.first else None)
    except RankError as error:
        if ranks.first:
            shutil.rmtree(draft, ignore_errors=True)
        raise CheckpointError(f"{target.name} could not be written: {error}") from error
    return target


def _write(trainer: Checkpointed, draft: Path) -> dict[str, str]:
    """Write this rank's files; returns their hashes by name."""
    ranks, mine = trainer.ranks, []
    with trainer.optimization.averaged():
        trainer.backbone.export(draft if ranks.first else None, trainer.config.use_lora)
    shared = draft / "trainer"  # other ranks write here at the same time, first under temporary names
    if ranks.first:
        mine = [path for path in draft.rglob("*") if path.is_file() and path.parent != shared]
        mine.append(shared / "state.json")
        mine[-1].write_text(json.dumps(_state(trainer), indent=1) + "\n")
    if ranks.writes_shards:
        mine.append(shared / f"rank-{ranks.world_rank:05d}.safetensors")
        _write_rows(trainer, mine[-1])
    return manifest.sealed(draft, mine)


def _finish(draft: Path, target: Path, hashes: Mapping[str, str], keep: int) -> None:
    manifest.commit(draft, target, hashes)
    committed = [path for path in found(target.parent) if (path / manifest.NAME).is_file()]
    for old in committed[:-keep]:
        manifest.remove(old)


def found(folder: Path) -> list[Path]:
    """Checkpoint folders by name, oldest first; drafts are named differently."""
    paths = [path for path in folder.glob("step-*") if re.fullmatch(r"step-\d+", path.name) and path.is_dir()]
    return sorted(paths, key=step_of)


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def tidy(folder: Path, step: int) -> None:
    """Before resuming after `step`: remove drafts, and move later checkpoints aside (superseded or damaged)."""
    for draft in folder.glob("step-*.tmp"):
        shutil.rmtree(draft)
    for later in (path for path in found(folder) if step_of(path) > step):
        number = 1 + len(list(folder.glob(f"{later.name}.aside*")))
        later.rename(later.with_name(f"{later.name}.aside{number}"))


def check_files(path: Path, ranks: Ranks) -> None:
    """Verify every byte; each rank checks a share of the files. RankError names the first bad file."""

    def mine() -> None:
        for name in manifest.check_names(path)[ranks.world_rank :: ranks.world]:
            manifest.check_file(path, name)

    ranks.together(mine)


def choose(run_folder: Path, wanted: str, ranks: Ranks) -> Path | None:
    """The checkpoint that `resume_from_checkpoint` names; `auto` is the run's newest intact one, if any."""
    if wanted != "auto":
        try:
            check_files(Path(wanted), ranks)
        except RankError as error:
            raise ConfigError(f"resume_from_checkpoint {wanted} is not a complete checkpoint: {error}") from error
        return Path(wanted)
    candidates = ranks.together(lambda: found(run_folder / "checkpoints"))[0]
    for path in reversed(candidates):
        try:
            check_files(path, ranks)
            return path
        except RankError as error:
            ranks.log_once(f"{path.name} is damaged and left out: {error}")
    if candidates:
        raise ConfigError(f"resume_from_checkpoint is auto, but all checkpoints in {run_folder} are damaged")
    ranks.log_once(f"{run_folder} holds no checkpoint: starting from the beginning")
    return None


def load(trainer: Checkpointed, path: Path) -> None:
    """Load a checkpoint's state into a freshly built trainer."""
    try:
        _load(trainer, _Rows(path / "trainer"), _read_state(path / "trainer" / "state.json"), path)
    except ConfigError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError, OSError, RuntimeError, SafetensorError) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ConfigError(f"{path} cannot be read as a checkpoint of this version: {reason}") from error


def _read_state(file: Path) -> dict[str, Any]:
    state = json.loads(file.read_text())
    for name, kind in STATE.items():
        if not isinstance(state[name], kind):
            raise TypeError(f"{name} in {file} is {state[name]!r}")
    return state


@torch.no_grad()
def _load(trainer: Checkpointed, stored: "_Rows", state: dict[str, Any], path: Path) -> None:
    parts, optimization = _parts(trainer), trainer.optimization
    for part in ("weights", "anchor", "average"):
        names = stored.names(part)
        if set(names) != set(parts[part]):
            difference = sorted(set(names) ^ set(parts[part]))[0]
            raise ConfigError(f"the {part} in {path} do not fit this configuration: {difference} differs")
        for name, target in parts[part].items():
            value = stored.read(f"{part}/{name}", *rows(optimization.parameters[name]))
            if value.shape != local_shard(target).shape:  # copy_ would broadcast one row over many
                raise ConfigError(
                    f"the {part} in {path} do not fit this configuration, or a rank's file is missing: of {name} there "
                    f"is {tuple(value.shape)} where {tuple(local_shard(target).shape)} is needed"
                )
            local_shard(target).copy_(value)
    optimization.load_tensors({
        name: stored.read(f"optimizer/{name}", *_optimizer_rows(trainer, name)) for name in stored.names("optimizer")
    })  # fmt: skip
    trainer.step, optimization.updates = state["step"], state["updates"]
    trainer.vote.skipped, trainer.vote.in_a_row = state["skipped"], state["skipped_in_a_row"]
    trainer.controller.load_state_dict(state["controller"])
    if trainer.anchor:
        trainer.anchor.age = state["anchor_age"]
    now = _plain(trainer.config)
    changed = [f"{k} {old!r} -> {now[k]!r}" for k, old in state["config"].items() if k in now and now[k] != old]
    if changed:
        trainer.ranks.log_once(f"changed since the checkpoint: {', '.join(sorted(changed))}")


def _parts(trainer: Checkpointed) -> dict[str, Mapping[str, Tensor]]:
    """Tensors that training changes and that cannot be recomputed, by parameter name."""
    return {
        "weights": trainer.optimization.parameters,
        "optimizer": trainer.optimization.tensors(),
        "anchor": trainer.anchor.values if trainer.anchor else {},
        "average": trainer.optimization.average,
    }


def _optimizer_rows(trainer: Checkpointed, name: str) -> tuple[int, int | None]:
    """Rows of an optimizer-state tensor on this rank: its parameter's rows, or everything for a scalar."""
    parameter, _, key = name.rpartition(".")
    return (0, None) if key == "step" else rows(trainer.optimization.parameters[parameter])


def _write_rows(trainer: Checkpointed, file: Path) -> None:
    """Write this rank's shards, and which rows of the full tensors they are."""
    tensors, starts = {}, {}
    for part, values in _parts(trainer).items():
        for name, value in values.items():
            of = _optimizer_rows(trainer, name) if part == "optimizer" else rows(trainer.optimization.parameters[name])
            tensors[f"{part}/{name}"] = local_shard(value.detach()).contiguous().cpu()
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
        """Rows start:stop of a tensor; a scalar is returned as is."""
        if not self.places[name][0][1].get_slice(name).get_shape():
            return self.places[name][0][1].get_tensor(name)
        pieces = []
        for begin, file in sorted(self.places[name], key=lambda place: place[0]):
            piece = file.get_slice(name)
            end = begin + piece.get_shape()[0]
            first, last = max(start, begin), end if stop is None else min(stop, end)
            pieces.append(piece[first - begin : max(first, last) - begin] if first < end else piece[0:0])
        return torch.cat(pieces)


def _state(trainer: Checkpointed) -> dict[str, Any]:
    return {
        "step": trainer.settled_step,
        "updates": trainer.optimization.updates,
        "skipped": trainer.vote.skipped,
        "skipped_in_a_row": trainer.vote.in_a_row,
        "anchor_age": trainer.anchor.age if trainer.anchor else None,
        "controller": trainer.controller.state_dict(),
        "config": _plain(trainer.config),
    }


def _plain(config: Config) -> dict[str, Any]:
    """The configuration after a JSON round trip, without flags that only say where and how a run starts."""
    values = {name: value for name, value in dataclasses.asdict(config).items() if name not in PLACES}
    return json.loads(json.dumps(values))
