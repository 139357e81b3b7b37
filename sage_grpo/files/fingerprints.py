"""Fingerprints of files: hashes that tell whether something changed, without reading gigabytes at every start.

Small files are read completely. Of a large file the size, evenly spaced blocks and, if it holds tensors in safetensors,
a part of each of them are read: other weights differ there, also if a single tensor was scaled.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

NUM_BLOCKS = 64
BLOCK = 1 << 20  # bytes
SAMPLE = 4096  # bytes of a tensor, at its start and in its middle
MAX_HEADER = 100 << 20  # bytes that safetensors allows
# suffixes of files that are read once, to make a safetensors file beside them
CONVERTED = (".pth", ".pt", ".bin")


def text_fingerprint(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def files_fingerprint(paths: Iterable[Path]) -> str:
    """Fingerprint of files and of all files in folders: their names below these, and what they hold."""
    digest = hashlib.sha256()
    for path in paths:
        for file in _files_in(path):
            name = file.name if file == path else file.relative_to(path).as_posix()
            digest.update(name.encode() + b"\0" + file_fingerprint(file))
    return digest.hexdigest()[:16]


def _files_in(path: Path) -> list[Path]:
    """The file, or the files that determine what a model in the folder computes."""
    if not path.is_dir():
        return [path]
    return [file for file in sorted(path.rglob("*")) if _counts(file, path)]


def _counts(file: Path, folder: Path) -> bool:
    """Whether a file of a folder can matter: not notes, metadata of downloads, or what was converted."""
    is_hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
    is_source = file.suffix in CONVERTED and file.with_suffix(".safetensors").is_file()
    return file.is_file() and not (is_hidden or is_source or file.suffix == ".md")


def file_fingerprint(path: Path, blocks: int = NUM_BLOCKS, block_size: int = BLOCK) -> bytes:
    """Hash of a file's size and samples; files up to `blocks * block_size` bytes are hashed completely."""
    status = path.stat()
    return _sampled(path, blocks, block_size, status.st_size, status.st_mtime_ns, status.st_ino)


@lru_cache(maxsize=4096)
def _sampled(
    path: Path, blocks: int, block_size: int, size: int, mtime_ns: int, inode: int
) -> bytes:
    """The hash; cached by size, modification time and inode, so an unchanged file is read once."""
    spacing = max(block_size, -(-size // blocks))  # rounded up
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for start in range(0, size, spacing):
            file.seek(start)
            digest.update(file.read(block_size))
        if spacing > block_size and path.suffix == ".safetensors":
            for start in _tensor_places(file):
                file.seek(start)
                digest.update(file.read(SAMPLE))
    return digest.digest()


def _tensor_places(file: BinaryIO) -> Iterator[int]:
    """Where each tensor of a safetensors file starts, and its middle; nothing if the header cannot be read."""
    file.seek(0)
    length = int.from_bytes(file.read(8), "little")
    if length > MAX_HEADER:
        return
    try:
        header = json.loads(file.read(length))
        ranges = [entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"]
        ranges = sorted((int(start), int(end)) for start, end in ranges)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return
    first = 8 + length
    for start, end in ranges:
        yield first + max(0, start)
        yield first + max(0, start + end) // 2
