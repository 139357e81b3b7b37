"""Paths that a user names: checked before work begins, with errors that name the flag."""

import os
from pathlib import Path

MAX_NAME_BYTES = 255  # bytes of one part of a path, on every common file system
MAX_PATH_BYTES = 4095  # bytes
SHOWN = 120  # characters of a path in a message


def is_too_long(path: str | Path) -> bool:
    """Whether the path is longer than file systems allow."""
    sizes = [len(part) for part in os.fsencode(path).split(b"/")]
    return max(sizes) > MAX_NAME_BYTES or sum(sizes) + len(sizes) > MAX_PATH_BYTES


def shown(path: str | Path) -> str:
    """The path for a message; the middle of a very long one is left out."""
    text = str(path)
    half = SHOWN // 2
    return text if len(text) <= SHOWN else f"{text[:half]}...{text[-half:]}"


def check_folder(path: Path, flag: str) -> None:
    """Reject a folder that cannot be made, because a file is in its way; it may exist."""
    for place in (path, *path.parents):
        if os.path.lexists(place) and not place.is_dir():
            raise ValueError(f"{flag} is {shown(path)}, but {shown(place)} is not a folder")


def make_folder(path: Path, flag: str) -> None:
    """Make a folder, unless it exists."""
    check_folder(path, flag)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{flag} is {shown(path)}; it cannot be made: {error.strerror}") from error
