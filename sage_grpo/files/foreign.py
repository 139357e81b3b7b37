"""Paths from others: opened without following links, regular files only, inside a named folder, up to a size.

A run folder, a checkpoint or a prompt file may come from somebody else. A name in it may be a link to a file of the
user, lead out of its folder, or be a device or a pipe that never ends.
"""

import os
import stat
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


class Refused(ValueError):
    """Why a path of others is not used, in one sentence."""


def inside(root: Path, path: Path) -> Path:
    """Where `path` leads, without links; refused if that is not in the folder `root`."""
    place = path.resolve()
    if not place.is_relative_to(root.resolve()):
        raise Refused(f"it is not in {root}")
    return place


@contextmanager
def open_regular(path: Path, most_bytes: int | None = None) -> Iterator[BinaryIO]:
    """Open a regular file to read its bytes; refuses a link, a device, a pipe, a folder, and too many bytes."""
    # a pipe without a writer would be waited for
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


def first_link(folder: Path, names: Iterable[str], unless_below: str = "") -> Path | None:
    """The first link among `names` of a folder and everything below them; None if there is none.

    unless_below: the one of `names` whose contents are checked elsewhere.
    """
    for name in names:
        path = folder / name
        if path.is_symlink():
            return path
        if path.is_dir() and name != unless_below:
            found = _link_below(path)
            if found is not None:
                return found
    return None


def _link_below(folder: Path) -> Path | None:
    for place, folders, files in os.walk(folder, followlinks=False):
        for name in sorted((*folders, *files)):
            path = Path(place) / name
            if path.is_symlink():
                return path
    return None


def new_name(path: Path) -> Path:
    """A name for the draft of a file, next to it, that nothing else has."""
    return path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")


def new_folder(path: Path) -> Path:
    """A new empty folder next to `path`, for drafts, whose name nothing else has."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".draft", dir=path.parent))
