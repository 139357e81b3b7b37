"""Folders that are either complete or absent: they appear by one rename, with the SHA-256 of each file in a manifest.

FOLDER/manifest.json    {"files": {"trainer/state.json": "9f86d0...", ...}}
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from sage_grpo.files.foreign import Refused, new_name, open_regular
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
    draft: Path,
    target: Path,
    hashes: Mapping[str, str],
    on_sync: Callable[[], None] = lambda: None,
    replaces: bool = True,
) -> None:
    """Write a finished draft's manifest and rename the draft to `target`.

    A draft with a manifest is complete: it replaces an existing target, which is deleted only after that. Unless
    `replaces`, a target that is more than an empty folder is an OSError.
    `hashes`: SHA-256 by file name; the files must be on disk. `on_sync` is called after each wait for the disk.
    """
    missing = [name for name in hashes if not (draft / name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"{draft / missing[0]} was written by another process and is not here; "
            "its folder must be shared"
        )

    def wait_for_disk(path: Path) -> None:
        sync(path)
        on_sync()

    # 1. the files' names reach the disk before the manifest that lists them
    folders = [path for path in draft.rglob("*") if path.is_dir()]
    for folder in (*folders, draft):
        wait_for_disk(folder)

    # 2. the manifest appears by a rename, complete
    manifest_draft = new_name(draft / NAME)
    manifest_draft.write_text(json.dumps({"files": dict(sorted(hashes.items()))}, indent=1) + "\n")
    wait_for_disk(manifest_draft)
    os.rename(manifest_draft, draft / NAME)
    wait_for_disk(draft)

    # 3. the folder takes the place of an older one
    replaced = _set_aside(target) if replaces and os.path.lexists(target) else None
    os.rename(draft, target)
    wait_for_disk(target.parent)
    if replaced:
        delete(replaced)


def remove(folder: Path) -> None:
    """Delete a folder. It is renamed first: if the process is killed halfway, no partial folder keeps the name."""
    delete(_set_aside(folder))


def delete(path: Path) -> None:
    """Delete a folder, a file or a link, but not what the link leads to; nothing if it is gone."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _set_aside(folder: Path) -> Path:
    return folder.rename(new_name(folder.with_name(f"{folder.name}.old")))


def read(folder: Path) -> dict[str, str]:
    """Hashes from a folder's manifest, by file name."""
    try:
        files = read_object(folder / NAME)["files"]
    except (OSError, ValueError, KeyError) as error:
        raise Damaged(f"{folder / NAME} cannot be read ({type(error).__name__})") from error
    is_table = isinstance(files, dict) and all(isinstance(value, str) for value in files.values())
    if not is_table or not all(map(_is_inside, files)):
        raise Damaged(f"{folder / NAME} is not a list of files in this folder with their hashes")
    return files


def _is_inside(name: str) -> bool:
    """Whether a file name stays in its folder."""
    return not Path(name).is_absolute() and ".." not in Path(name).parts


def check(folder: Path, part: str = "", share: slice = slice(None)) -> None:
    """Reject a folder with missing, additional or changed files.

    Only files whose names begin with `part` are read, and of these, in alphabetical order, a `share`.
    """
    hashes = read(folder)
    # a linked folder counts as a file that was added: what it leads to is not part of this folder
    paths = [path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()]
    present = {str(path.relative_to(folder)) for path in paths}
    present.discard(NAME)
    missing = hashes.keys() - present
    if missing:
        raise Damaged(f"{folder / min(missing)} is missing")
    added = present - hashes.keys()
    if added:
        raise Damaged(f"{folder / min(added)} is not in {NAME}: it was added later")

    names = sorted(name for name in hashes if name.startswith(part))
    for name in names[share]:
        _check_bytes(folder / name, hashes[name])


def _check_bytes(path: Path, sha256: str) -> None:
    try:
        with open_regular(path) as file:
            is_unchanged = hashlib.file_digest(file, "sha256").hexdigest() == sha256
    except Refused:  # only regular files are written
        is_unchanged = False
    except OSError as error:
        raise Damaged(f"{path} cannot be read ({printable(error)})") from error
    if not is_unchanged:
        raise Damaged(f"{path} was changed after it was written: its SHA-256 is not that of {NAME}")
