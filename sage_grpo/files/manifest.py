"""Folders that are either complete or absent: they appear by one rename, with their files' SHA-256 listed.

FOLDER/manifest.json    {"files": {"trainer/state.json": "9f86d0...", ...}}
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from sage_grpo.files.json_files import printable, read_object

NAME = "manifest.json"


class Damaged(ValueError):
    """How a folder differs from its manifest, in one sentence."""


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Wait until a file, or a folder's entries, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def commit(
    draft: Path, target: Path, hashes: Mapping[str, str], on_sync: Callable[[], None] = lambda: None
) -> None:
    """Write a finished draft's manifest and rename it to `target`; `on_sync` is called as the disk follows.

    A draft with a manifest is complete: it replaces an existing target, which is deleted only after that.
    """
    if missing := [name for name in hashes if not (draft / name).is_file()]:
        text = "was written by another process and is not here; its folder must be shared"
        raise FileNotFoundError(f"{draft / missing[0]} {text}")

    def settle(path: Path) -> None:
        sync(path)
        on_sync()

    for path in (*(p for p in draft.rglob("*") if p.is_dir()), draft):
        settle(path)
    (draft / f"{NAME}.tmp").write_text(
        json.dumps({"files": dict(sorted(hashes.items()))}, indent=1) + "\n"
    )
    settle(draft / f"{NAME}.tmp")
    os.rename(draft / f"{NAME}.tmp", draft / NAME)
    settle(draft)
    old = _set_aside(target) if target.exists() else None
    os.rename(draft, target)
    settle(target.parent)
    if old:
        shutil.rmtree(old)


def remove(folder: Path) -> None:
    """Delete a folder; it is renamed first, in case the process is killed halfway."""
    shutil.rmtree(_set_aside(folder))


def _set_aside(folder: Path) -> Path:
    old = folder.with_name(f"{folder.name}.old.tmp")
    shutil.rmtree(old, ignore_errors=True)
    return folder.rename(old)


def read(folder: Path) -> dict[str, str]:
    """Hashes from a folder's manifest, by file name."""
    try:
        files = read_object(folder / NAME)["files"]
    except (OSError, ValueError, KeyError) as error:
        raise Damaged(f"{folder / NAME} cannot be read ({type(error).__name__})") from error
    sound = isinstance(files, dict) and all(isinstance(value, str) for value in files.values())
    if not sound or any(Path(name).is_absolute() or ".." in Path(name).parts for name in files):
        raise Damaged(f"{folder / NAME} is not a list of files in this folder with their hashes")
    return files


def check(folder: Path, part: str = "", share: slice = slice(None)) -> None:
    """Reject a folder that lacks files, has others than its manifest lists, or holds changed ones.

    Bytes are read of a `share` of the files whose names begin with `part`.
    """
    hashes = read(folder)
    there = {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()} - {
        NAME
    }
    if missing := hashes.keys() - there:
        raise Damaged(f"{folder / min(missing)} is missing")
    if added := there - hashes.keys():
        raise Damaged(
            f"{folder / min(added)} is not in {NAME}: nothing was added when this was written"
        )
    for name in sorted(name for name in hashes if name.startswith(part))[share]:
        try:  # a pipe would be waited for
            found = file_sha256(folder / name) if (folder / name).is_file() else "not a file"
        except OSError as error:
            raise Damaged(f"{folder / name} cannot be read ({printable(error)})") from error
        if found != hashes[name]:
            raise Damaged(
                f"{folder / name} was changed after it was written: its SHA-256 is not that of {NAME}"
            )
