"""Which checkpoints a run has: names, order, what is kept, and which one to resume from."""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from sage_grpo.config.fields import Config, ConfigError
from sage_grpo.files import manifest
from sage_grpo.files.tensor_files import all_finite, write_file
from sage_grpo.models.shards import open_shards
from sage_grpo.parallel.ranks import RankError, Ranks
from sage_grpo.train.checkpoint import STATE_FILE, read_state

# values of `resume_from_checkpoint` that are not a folder
NEWEST = "auto"
LAST_GOOD = "last_good"


def step_of(path: Path) -> int:
    """The iteration in a folder's name."""
    return int(path.name.removeprefix("step-").partition(".")[0])


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoint folders by name, oldest first, without drafts."""
    return [path for path in _list_with_drafts(folder) if path.suffix != ".tmp"]


def weights_of(path: Path, flag: str = "") -> Path:
    """The weights that a path stands for: a run folder stands for its newest checkpoint."""
    named = f"{flag} {path}".lstrip()
    if not path.exists():
        raise FileNotFoundError(f"{named} does not exist")
    if not (path / "checkpoints").is_dir():
        return path
    checkpoints = list_checkpoints(path / "checkpoints")
    if not checkpoints:
        raise FileNotFoundError(f"{named} is a run folder that holds no checkpoint yet")
    return checkpoints[-1]


def _list_with_drafts(folder: Path) -> list[Path]:
    """Checkpoints and drafts, oldest first; of one step, the checkpoint comes last, before it a draft of it."""
    folders = [
        path
        for path in folder.glob("step-*")
        if re.fullmatch(r"step-\d+((\.old(\.[0-9a-f]+)?)?\.tmp)?", path.name)
        and path.is_dir()
        and not path.is_symlink()
    ]
    return sorted(folders, key=lambda path: (step_of(path), -len(path.suffixes)))


def commit(
    draft: Path,
    target: Path,
    hashes: Mapping[str, str],
    config: Config,
    on_step: Callable[[], None],
) -> None:
    """Give a complete draft its name and delete the checkpoints beyond `keep_checkpoints`."""
    manifest.commit(draft, target, hashes, on_step)
    checkpoints = list_checkpoints(target.parent)
    for old in surplus(checkpoints, config):
        manifest.remove(old)
        on_step()


def replace_files(path: Path, contents: Mapping[str, str | bytes]) -> None:
    """Replace small files of a checkpoint, at any moment of which there is a complete one.

    A draft with the new files, and links to the others, is committed in its place. Without links this raises OSError.
    """
    draft = path.with_suffix(".tmp")
    hashes = manifest.read(path)
    manifest.delete(draft)
    try:
        for name in (*hashes, *contents):
            (draft / name).parent.mkdir(parents=True, exist_ok=True)
            if name not in contents:
                os.link(path / name, draft / name)
        for name, content in contents.items():
            hashes[name] = write_file(draft / name, content)
        manifest.commit(draft, path, hashes)
    except OSError:
        if path.is_dir():  # else the draft is the only complete one that has a name
            manifest.delete(draft)
        raise


def surplus(folders: Sequence[Path], config: Config) -> list[Path]:
    """All but `keep_checkpoints` of these checkpoints, and never the newest.

    First those that time or a signal asked for, then those of iterations that were not validated: who wants an earlier
    checkpoint chooses it by its validation.
    """
    committed = [path for path in folders if (path / manifest.NAME).is_file()]

    def order(path: Path) -> tuple[bool, bool]:
        step = step_of(path)
        is_validated = config.validation_interval > 0 and step % config.validation_interval == 0
        is_regular = config.save_interval == 0 or step % config.save_interval == 0
        return is_validated, is_regular

    oldest_first = sorted(committed[:-1], key=order)
    return oldest_first[: max(0, len(committed) - config.keep_checkpoints)]


def tidy(folder: Path, step: int, resumed_from: Path | None = None) -> None:
    """Before resuming after `step`: move later checkpoints aside (superseded or damaged), and remove drafts.

    A complete draft from which the run resumes gets its final name.
    """
    draft = None
    if resumed_from is not None and resumed_from.parent == folder and resumed_from.suffix == ".tmp":
        draft = resumed_from
    last_kept = step - 1 if draft else step
    for path in list_checkpoints(folder):
        if step_of(path) > last_kept:
            number = 1 + len(list(folder.glob(f"{path.name}.aside*")))
            path.rename(path.with_name(f"{path.name}.aside{number}"))
    if draft:
        draft.rename(folder / f"step-{step:06d}")
        manifest.sync(folder)

    for leftover in folder.glob("step-*.tmp"):
        manifest.delete(leftover)


def check_files(path: Path, ranks: Ranks) -> None:
    """Verify every byte of this rank's share of the files."""
    manifest.check(path, share=slice(ranks.world_rank, None, ranks.world_size))
    if re.match(r"step-\d+", path.name):
        step = read_state(path)["step"]
        if step != step_of(path):
            raise manifest.Damaged(f"{path} holds iteration {step}: it was renamed")


def check_good(path: Path, ranks: Ranks) -> None:
    """Reject a checkpoint that was written while the run diverged; each rank reads its share of the tensors."""
    if skipped := read_state(path)["skipped_in_a_row"]:
        raise manifest.Damaged(f"{skipped} updates before it were skipped as not finite")
    stored = [
        (part, name, weights)
        for part, weights in open_shards(path).items()
        for name in weights.names
    ]
    for part, name, weights in stored[ranks.world_rank :: ranks.world_size]:
        if not all_finite(weights.read(name)):
            raise manifest.Damaged(f"its {part}/{name} is not finite")


def choose(run_folder: Path, wanted: str, ranks: Ranks) -> Path | None:
    """The checkpoint that `resume_from_checkpoint` names; `auto` is the run's newest intact one, if any.

    A complete draft counts: its writer was killed just before it got its name.
    """
    if wanted not in (NEWEST, LAST_GOOD):
        if problem := ranks.on_all(partial(_other_place, Path(wanted)))[0]:
            raise ConfigError(f"resume_from_checkpoint {wanted} {problem}")
        try:
            ranks.on_all(partial(check_files, Path(wanted), ranks))
        except RankError as error:
            raise ConfigError(
                f"resume_from_checkpoint {wanted} is not a complete checkpoint: {error}"
            ) from error
        return Path(wanted)

    candidates = _candidates(run_folder / "checkpoints", ranks)
    checks = [check_files, check_good] if wanted == LAST_GOOD else [check_files]
    for path in reversed(candidates):
        try:
            for check in checks:
                ranks.on_all(partial(check, path, ranks))
            return path
        except RankError as error:
            ranks.log_once(f"{path.name} is damaged and left out: {error}")
    if candidates:
        raise ConfigError(
            f"resume_from_checkpoint is {wanted}, but all checkpoints in {run_folder} are damaged"
        )
    ranks.log_once(f"{run_folder} holds no checkpoint: starting from the beginning")
    return None


def _other_place(path: Path) -> str:
    """What a path is, if it was not meant to be a checkpoint, and what to name instead; else empty."""
    if not path.exists():
        return "does not exist; name RUN/checkpoints/step-N, or auto for the newest of output_dir"
    folders = [*list_checkpoints(path), *list_checkpoints(path / "checkpoints")]
    checkpoints = [folder for folder in folders if (folder / manifest.NAME).is_file()]
    if checkpoints:
        return f"contains checkpoints but is not one; name one of them, such as {checkpoints[-1]}"
    if not (path / manifest.NAME).is_file() and not (path / STATE_FILE).is_file():
        return "is not a checkpoint, which has a manifest.json; name RUN/checkpoints/step-N"
    return ""


def _candidates(folder: Path, ranks: Ranks) -> list[Path]:
    """Checkpoints and complete drafts, oldest first, as the first rank sees them."""

    def look() -> list[tuple[Path, bool]]:
        return [(path, (path / manifest.NAME).is_file()) for path in _list_with_drafts(folder)]

    listed = ranks.on_all(look)[0]
    return [path for path, is_complete in listed if is_complete or path.suffix != ".tmp"]
