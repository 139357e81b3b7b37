"""Untrusted paths: opened without following links, regular files only, inside a named folder, up to a size.

A run folder, a checkpoint or a prompt file may come from somebody else. A name in it may be a link to a file of the
user, lead out of its folder, or be a device or a pipe that never ends.
"""

import os
import stat
import tempfile
import uuid
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


class Refused(ValueError):
    """Why an untrusted path is refused, in one sentence."""


def inside(root: Path, path: Path) -> Path:
    """Where `path` leads, without links; refused if that is not in the folder `root`."""
    place = path.resolve()
    if not place.is_relative_to(root.resolve()):
        raise Refused(f"it is not in {root}")
    return place


@contextmanager
def open_regular(path: Path, most_bytes: int | None = None) -> Iterator[BinaryIO]:
    """Open a regular file to read its bytes; refuses a link, a device, a pipe, a folder, and too many bytes."""
    # opening a pipe without a writer would block
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        handle = os.open(path, flags)
    except OSError as error:
        if path.is_symlink():
            raise Refused(f"{path} is a link, which is not followed") from error
        raise
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode):
        os.close(handle)
        raise Refused(f"{path} is not a regular file")
    with os.fdopen(handle, "rb") as file:
        if most_bytes is not None and status.st_size > most_bytes:
            raise Refused(f"{path} has {status.st_size:,} bytes; at most {most_bytes:,} are read")
        yield file


def read_bytes(path: Path, most_bytes: int) -> bytes:
    """The content of a regular file of at most `most_bytes`."""
    with open_regular(path, most_bytes) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:  # it grew
        raise Refused(f"{path} has more than {most_bytes:,} bytes")
    return content


def copy_regular(source: str | Path, target: str | Path) -> None:
    """Copy a regular file to a new one."""
    with open_regular(Path(source)) as file, Path(target).open("xb") as copy:
        while piece := file.read(1 << 24):
            copy.write(piece)


def check_regular(folder: Path, names: Iterable[str], unless_below: Collection[str] = ()) -> None:
    """Refuse a link, a pipe or a device among `names` of a folder and everything below them.

    unless_below: those of `names` whose contents are harmless, or checked elsewhere.
    """
    for name in names:
        path = folder / name
        _check_kind(path)
        if name in unless_below:
            continue
        for place, folders, files in os.walk(path, followlinks=False):
            for inner in sorted((*folders, *files)):
                _check_kind(Path(place) / inner)


def _check_kind(path: Path) -> None:
    """Refuse what is neither a regular file nor a folder; what does not exist passes."""
    if path.is_symlink():
        raise Refused(f"{path} is a link, which is not followed; replace it by what it leads to")
    if path.exists() and not path.is_file() and not path.is_dir():
        raise Refused(f"{path} is a pipe or a device, not a regular file; delete it")


def replace_text(path: Path, text: str) -> None:
    """Replace a file atomically; if its name is a link, the link is replaced, not the file it leads to."""
    draft = new_name(path)
    try:
        with draft.open("x", encoding="utf-8", errors="replace") as file:
            file.write(text)
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def new_name(path: Path) -> Path:
    """A name for the draft of a file, next to it, that nothing else has."""
    return path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")


def new_folder(path: Path) -> Path:
    """A new empty folder next to `path`, for drafts, whose name nothing else has."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".draft", dir=path.parent))
