"""Checkpoints: everything that a run needs to go on exactly, in safetensors and JSON.

    checkpoints/step-000100/
      transformer/ or pytorch_lora_weights.safetensors    what `generate.py --checkpoint_path` samples, averaged
      trainer/state.json                                  iteration, counters, KL controller, configuration
      trainer/rank-00000.safetensors ...                  what changes in training, each rank its rows of it
      manifest.json                                       the SHA-256 of each of these files

A folder has its final name only once it is complete and on the disk. Any number of ranks can load it.
"""

import dataclasses
import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from sage_grpo import manifest
from sage_grpo.config import Config, ConfigError
from sage_grpo.models.lora import POLICY, save_adapter
from sage_grpo.models.weights import save_weights
from sage_grpo.parallel.fsdp import local, rows, whole
from sage_grpo.parallel.ranks import RankError, Ranks

if TYPE_CHECKING:
    from sage_grpo.train.trainer import Trainer


PLACES = ("output_dir", "overwrite", "resume_from_checkpoint", "init_from_checkpoint", "prompt_cache")

STATE = {"step": int, "updates": int, "skipped": int, "skipped_in_a_row": int, "anchor_age": int | None,
         "controller": dict, "config": dict}  # fmt: skip


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, in one sentence; those before it are as they were."""


def save(trainer: "Trainer", folder: Path) -> Path:
    """Write the trainer's state after its last optimizer step, and drop the oldest beyond `keep_checkpoints`.

    All ranks call. Those of one copy of the model write what they hold, the first rank what exists once. If one of
    them fails, all raise CheckpointError, and no folder appears.
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


def _write(trainer: "Trainer", draft: Path) -> dict[str, str]:
    """This rank's files, and their hashes by name."""
    ranks, mine = trainer.ranks, []
    with trainer.optimization.averaged():
        export(trainer, draft)
    shared = draft / "trainer"  # where other ranks write at the same time, under other names first
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


def export(trainer: "Trainer", folder: Path) -> None:
    """The weights alone, in the layout of diffusers. All ranks call; the first writes."""
    transformer, first = trainer.policy.transformer, trainer.ranks.first
    if trainer.config.use_lora:
        save_adapter(transformer, POLICY, folder if first else None)
        return
    tensors = ((name, whole(p.detach())) for name, p in transformer.named_parameters())
    try:
        if first:
            save_weights(folder / "transformer", tensors)
            (folder / "transformer" / "config.json").write_text(transformer.to_json_string())
    finally:
        for _ in tensors:  # take part in gathering all of them, even where the disk is full
            pass


def found(folder: Path) -> list[Path]:
    """Checkpoints by name, oldest first; drafts have other names."""
    paths = [path for path in folder.glob("step-*") if re.fullmatch(r"step-\d+", path.name) and path.is_dir()]
    return sorted(paths, key=step_of)


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def tidy(folder: Path, step: int) -> None:
    """Before a run goes on after `step`: remove drafts, and set later checkpoints aside, which are void or damaged."""
    for draft in folder.glob("step-*.tmp"):
        shutil.rmtree(draft)
    for later in (path for path in found(folder) if step_of(path) > step):
        number = 1 + len(list(folder.glob(f"{later.name}.aside*")))
        later.rename(later.with_name(f"{later.name}.aside{number}"))


def check_files(path: Path, ranks: Ranks) -> None:
    """Read every byte and compare; each rank takes a share of the files. RankError names the first that is wrong."""

    def mine() -> None:
        for name in manifest.check_names(path)[ranks.world_rank :: ranks.world]:
            manifest.check_file(path, name)

    ranks.together(mine)


def choose(run_folder: Path, wanted: str, ranks: Ranks) -> Path | None:
    """The checkpoint that `resume_from_checkpoint` names; `auto` is the newest good one of the run, if there is any."""
    if wanted != "auto":
        try:
            check_files(Path(wanted), ranks)
        except RankError as error:
            raise ConfigError(f"resume_from_checkpoint {wanted} is no whole checkpoint: {error}") from error
        return Path(wanted)
    candidates = ranks.together(lambda: found(run_folder / "checkpoints"))[0]
    for path in reversed(candidates):
        try:
            check_files(path, ranks)
            return path
        except RankError as error:
            ranks.say(f"{path.name} is damaged and left out: {error}")
    if candidates:
        raise ConfigError(f"resume_from_checkpoint is auto, but all checkpoints in {run_folder} are damaged")
    ranks.say(f"{run_folder} holds no checkpoint: starting from the beginning")
    return None


def load(trainer: "Trainer", path: Path) -> None:
    """Put a checkpoint's state into a freshly built trainer."""
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
def _load(trainer: "Trainer", stored: "_Rows", state: dict[str, Any], path: Path) -> None:
    parts, optimization = _parts(trainer), trainer.optimization
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
    trainer.step, optimization.updates = state["step"], state["updates"]
    trainer.vote.skipped, trainer.vote.in_a_row = state["skipped"], state["skipped_in_a_row"]
    trainer.controller.load_state_dict(state["controller"])
    if trainer.anchor:
        trainer.anchor.age = state["anchor_age"]
    now = _plain(trainer.config)
    changed = [f"{k} {old!r} -> {now[k]!r}" for k, old in state["config"].items() if k in now and now[k] != old]
    if changed:
        trainer.ranks.say(f"other than before: {', '.join(sorted(changed))}")


def _parts(trainer: "Trainer") -> dict[str, Mapping[str, Tensor]]:
    """Tensors that change in training and are not derived, by the name of their parameter."""
    return {
        "weights": trainer.optimization.parameters,
        "optimizer": trainer.optimization.tensors(),
        "anchor": trainer.anchor.values if trainer.anchor else {},
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


def _state(trainer: "Trainer") -> dict[str, Any]:
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
    """The configuration as JSON gives it back, without what only says where and how a run starts."""
    values = {name: value for name, value in dataclasses.asdict(config).items() if name not in PLACES}
    return json.loads(json.dumps(values))
