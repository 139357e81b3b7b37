"""Checkpoints: everything a run needs to resume exactly, in safetensors and JSON.

    checkpoints/step-000100/
      trainer/state.json                     iteration, counters, KL controller, configuration, fingerprints
      trainer/rank-00000.safetensors ...     everything that training changes, each rank's rows
      pytorch_lora_weights.safetensors       with LoRA: the adapter for other software, EMA applied
      transformer/                           of all weights, when `export_interval` wants it: the same
      README.md, curves.png                  with either of them: the model card
      manifest.json                          SHA-256 of each of these files

A folder gets its final name only once it is complete and on disk. Any number of ranks can load it.
"""

import dataclasses
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from sage_grpo.config.fields import Config, ConfigError
from sage_grpo.files import manifest
from sage_grpo.files.tensor_files import TensorFile, host_copy, write_file
from sage_grpo.models.shards import open_shards, rank_file, shards
from sage_grpo.models.weights import Weights
from sage_grpo.parallel.device import available_memory
from sage_grpo.parallel.fsdp import local_shard, rows
from sage_grpo.parallel.ranks import RankError, Ranks
from sage_grpo.runs.card import model_card
from sage_grpo.runs.history import RunHistory, read_run

if TYPE_CHECKING:
    from sage_grpo.train.trainer import Trainer

PLACES = (
    "output_dir",
    "overwrite",
    "resume_from_checkpoint",
    "init_from_checkpoint",
    "prompt_cache",
)
NEWEST, LAST_GOOD = "auto", "last_good"  # values of `resume_from_checkpoint` that are no folder
MOST_MEMORY = 0.8  # share of the available host memory that a copy for a save may take
COUNTERS = ("updates", "skipped", "skipped_in_a_row")  # of the optimization
STATE = dict.fromkeys(("step", *COUNTERS), int) | {
    "anchor_age": int | None,
    "controller": dict,
    "config": dict,
}


def first_nonfinite(trainer: "Trainer") -> str:
    """The first tensor on this rank that would be saved and is not finite; empty if there is none."""
    return next(
        (name for name, value in _shards(trainer).items() if not value.isfinite().all()), ""
    )


def fits_in_memory(trainer: "Trainer") -> bool:
    """Whether this machine has room for a copy of what its ranks write."""
    mine = sum(value.nbytes for value in _shards(trainer).values())
    return MOST_MEMORY * available_memory() > int(os.environ.get("LOCAL_WORLD_SIZE", 1)) * mine


def planned_files(trainer: "Trainer", export: bool, copied: bool) -> dict[str, TensorFile | str]:
    """This rank's files; all ranks must call. copied: from copies in host memory, so that training can go on."""
    ranks, files = trainer.ranks, {}
    if export:
        with trainer.optimization.using(trainer.optimization.average):
            files = trainer.backbone.exported(
                trainer.config.use_lora, ranks.world_rank, ranks.world
            )
    if ranks.first and export:
        files |= _card(trainer)
    if ranks.first:
        files["trainer/state.json"] = json.dumps(_state(trainer), indent=1) + "\n"
    if ranks.writes_shards:
        tensors = {
            name: host_copy(mine) if copied else mine for name, mine in _shards(trainer).items()
        }
        starts = {name: _rows(trainer, *name.split("/", 1))[0] for name in tensors}
        files[rank_file(ranks.world_rank)] = shards(tensors, starts)
    return files


def write_files(
    draft: Path, files: Mapping[str, TensorFile | str], on_piece: Callable[[], None]
) -> dict[str, str]:
    """Write files below `draft`; returns their hashes by name."""
    hashes = {}
    for name, contents in files.items():
        (draft / name).parent.mkdir(exist_ok=True)
        hashes[name] = write_file(draft / name, contents, on_piece)
    return hashes


def finish(
    draft: Path,
    target: Path,
    hashes: Mapping[str, str],
    config: Config,
    on_step: Callable[[], None],
) -> None:
    """Commit a draft and delete the checkpoints beyond `keep_checkpoints`."""
    manifest.commit(draft, target, hashes, on_step)
    for old in surplus(found(target.parent), config.keep_checkpoints, config.save_interval):
        manifest.remove(old)
        on_step()


def surplus(folders: Sequence[Path], keep: int, interval: int) -> list[Path]:
    """All but `keep` of these checkpoints, and never the newest: first those that time or a signal asked for."""
    committed = [path for path in folders if (path / manifest.NAME).is_file()]
    order = sorted(committed[:-1], key=lambda path: not interval or step_of(path) % interval == 0)
    return order[: max(0, len(committed) - keep)]


def found(folder: Path) -> list[Path]:
    """Checkpoint folders by name, oldest first; drafts are named differently."""
    return [path for path in _folders(folder) if path.suffix != ".tmp"]


def _folders(folder: Path) -> list[Path]:
    """Checkpoints and drafts, oldest first; of one step, the checkpoint comes last, before it a draft of it."""
    paths = [
        path
        for path in folder.glob("step-*")
        if re.fullmatch(r"step-\d+((\.old)?\.tmp)?", path.name)
    ]
    folders = [path for path in paths if path.is_dir() and not path.is_symlink()]
    return sorted(folders, key=lambda path: (step_of(path), -len(path.suffixes)))


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-").partition(".")[0])


def tidy(folder: Path, step: int, taken: Path | None = None) -> None:
    """Before resuming after `step`: move later checkpoints aside (superseded or damaged), and remove drafts.

    A draft from which the run was `taken` up gets its final name.
    """
    adopted = taken is not None and taken.parent == folder and taken.suffix == ".tmp"
    for later in (path for path in found(folder) if step_of(path) > step - adopted):
        number = 1 + len(list(folder.glob(f"{later.name}.aside*")))
        later.rename(later.with_name(f"{later.name}.aside{number}"))
    if taken and adopted:
        taken.rename(folder / f"step-{step:06d}")
        manifest.sync(folder)
    for draft in folder.glob("step-*.tmp"):
        draft.unlink() if draft.is_symlink() else shutil.rmtree(draft)


def check_files(path: Path, ranks: Ranks) -> None:
    """Verify every byte of this rank's share of the files."""
    manifest.check(path, share=slice(ranks.world_rank, None, ranks.world))
    if re.match(r"step-\d+", path.name) and (step := _read_state(path)["step"]) != step_of(path):
        raise manifest.Damaged(f"{path} holds iteration {step}: it was renamed")


def check_good(path: Path, ranks: Ranks) -> None:
    """Reject a checkpoint that was written while the run diverged; each rank reads its share of the tensors."""
    if skipped := _read_state(path)["skipped_in_a_row"]:
        raise manifest.Damaged(f"{skipped} updates before it were skipped as not finite")
    stored = [
        (part, name, weights)
        for part, weights in open_shards(path).items()
        for name in weights.names
    ]
    for part, name, weights in stored[ranks.world_rank :: ranks.world]:
        if not weights.read(name).isfinite().all():
            raise manifest.Damaged(f"its {part}/{name} is not finite")


def choose(run_folder: Path, wanted: str, ranks: Ranks) -> Path | None:
    """The checkpoint that `resume_from_checkpoint` names; `auto` is the run's newest intact one, if any.

    A complete draft counts: its writer was killed just before it got its name.
    """
    if wanted not in (NEWEST, LAST_GOOD):
        try:
            ranks.together(partial(check_files, Path(wanted), ranks))
        except RankError as error:
            raise ConfigError(
                f"resume_from_checkpoint {wanted} is not a complete checkpoint: {error}"
            ) from error
        return Path(wanted)
    listed = ranks.together(
        lambda: [(p, (p / manifest.NAME).is_file()) for p in _folders(run_folder / "checkpoints")]
    )
    candidates = [path for path, is_complete in listed[0] if is_complete or path.suffix != ".tmp"]
    for path in reversed(candidates):
        try:
            for check in (check_files, check_good) if wanted == LAST_GOOD else (check_files,):
                ranks.together(partial(check, path, ranks))
            return path
        except RankError as error:
            ranks.log_once(f"{path.name} is damaged and left out: {error}")
    if candidates:
        raise ConfigError(
            f"resume_from_checkpoint is {wanted}, but all checkpoints in {run_folder} are damaged"
        )
    ranks.log_once(f"{run_folder} holds no checkpoint: starting from the beginning")
    return None


def load(trainer: "Trainer", path: Path) -> None:
    """Load a checkpoint's state into a freshly built trainer."""
    try:
        _load(trainer, open_shards(path), _read_state(path), path)
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


def _read_state(path: Path) -> dict[str, Any]:
    file = path / "trainer" / "state.json"
    try:
        state = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise manifest.Damaged(f"{file} cannot be read ({type(error).__name__})") from error
    for name, kind in STATE.items():
        if not isinstance(state[name], kind):
            raise TypeError(f"{name} in {file} is {state[name]!r}")
    return state


@torch.no_grad()
def _load(
    trainer: "Trainer", stored: Mapping[str, Weights], state: dict[str, Any], path: Path
) -> None:
    parts, optimization = _parts(trainer), trainer.optimization
    _compare(trainer, state, path)
    for part, count in state.get("tensors", {}).items():
        if count != len(stored[part].names):
            raise ConfigError(
                f"{path} has {len(stored[part].names)} tensors of the {part}, but was saved with {count}"
            )
    for part in ("weights", "anchor", "average", "old_policy"):
        if difference := sorted(set(stored[part].names) ^ set(parts[part])):
            raise ConfigError(
                f"the {part} in {path} do not fit this configuration: {difference[0]} differs"
            )
        for name, target in parts[part].items():
            value, mine = stored[part].read(name, *_rows(trainer, part, name)), local_shard(target)
            if value.shape != mine.shape:  # copy_ would broadcast one row over many
                why = f"the {part} in {path} do not fit this configuration, or a rank's file is missing"
                raise ConfigError(
                    f"{why}: of {name} there is {tuple(value.shape)} where {tuple(mine.shape)} is needed"
                )
            mine.copy_(value)
    held = stored["optimizer"]
    optimization.load_tensors(
        {n: held.read(n, *_rows(trainer, "optimizer", n)) for n in held.names}
    )
    trainer.step = state["step"]
    for name in COUNTERS:
        setattr(optimization, name, state[name])
    trainer.controller.load_state_dict(state["controller"])
    if trainer.anchor:
        trainer.anchor.age = state["anchor_age"]


def _compare(trainer: "Trainer", state: dict[str, Any], path: Path) -> None:
    """Refuse other base weights; name everything else that is not as it was when the checkpoint was written."""
    now = _plain(trainer.config) | trainer.fingerprints
    before = state["config"] | state.get("fingerprints", {})
    if before.get("base weights", now["base weights"]) != now["base weights"]:
        problem = f"{path} was trained from other weights than those in {trainer.config.pretrained_model_root}"
        raise ConfigError(
            f"{problem}; name the model it began with, or start a new run with init_from_checkpoint"
        )
    if changed := [
        f"{k} {old!r} -> {now[k]!r}" for k, old in before.items() if k in now and now[k] != old
    ]:
        trainer.ranks.log_once(f"changed since the checkpoint: {', '.join(sorted(changed))}")


def _parts(trainer: "Trainer") -> dict[str, Mapping[str, Tensor]]:
    """Tensors that training changes and that cannot be recomputed, by parameter name."""
    return {
        "weights": trainer.optimization.parameters,
        "optimizer": trainer.optimization.tensors(),
        "anchor": trainer.anchor.values if trainer.anchor else {},
        "average": trainer.optimization.average,
        "old_policy": trainer.optimization.old,
    }


def _shards(trainer: "Trainer") -> dict[str, Tensor]:
    """This rank's shards of these tensors, named PART/NAME."""
    parts = _parts(trainer).items()
    return {
        f"{part}/{n}": local_shard(value.detach())
        for part, values in parts
        for n, value in values.items()
    }


def _rows(trainer: "Trainer", part: str, name: str) -> tuple[int, int | None]:
    """Which rows of a tensor are on this rank: those of its parameter, or everything for the optimizer's scalars."""
    parameter, _, key = name.rpartition(".") if part == "optimizer" else (name, "", "")
    return (0, None) if key == "step" else rows(trainer.optimization.parameters[parameter])


def _state(trainer: "Trainer") -> dict[str, Any]:
    counters = {
        "step": trainer.settled_step,
        "anchor_age": trainer.anchor.age if trainer.anchor else None,
    }
    counters |= {name: getattr(trainer.optimization, name) for name in COUNTERS}
    started = {"config": _plain(trainer.config), "fingerprints": trainer.fingerprints}
    tensors = {part: len(values) for part, values in _parts(trainer).items()}
    return counters | started | {"controller": trainer.controller.state_dict(), "tensors": tensors}


def _card(trainer: "Trainer") -> dict[str, str | bytes]:
    """The model card, with the settings that are not defaults."""
    default = _plain(Config()) | {
        "pretrained_model_root": "",
        "use_lora": "",
    }  # these two are always named
    own = {
        name: value for name, value in _plain(trainer.config).items() if value != default.get(name)
    }
    try:
        run = read_run(trainer.run.path)
    except (OSError, ConfigError) as error:  # a checkpoint is worth more than its card
        run = RunHistory(trainer.run.path, [], [], [])
        print(
            f"the model card of iteration {trainer.settled_step} has no curve: {error}",
            file=sys.stderr,
        )
    facts = {
        "step": trainer.settled_step,
        "reward": trainer.reward,
        "image": trainer.backbone.sees_image,
    }
    return model_card(own, run, base=trainer.fingerprints.get("base weights", "unknown"), **facts)


def _plain(config: Config) -> dict[str, Any]:
    """The configuration after a JSON round trip, without flags that only say where and how a run starts."""
    values = {
        name: value for name, value in dataclasses.asdict(config).items() if name not in PLACES
    }
    return json.loads(json.dumps(values))
