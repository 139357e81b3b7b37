"""Writes safetensors files in pieces: each is hashed while it is written, and the disk is never far behind."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import _TYPES
from torch import Tensor

PIECE = 1 << 26  # bytes
UNSYNCED = (
    1 << 28
)  # most bytes that wait for the disk: then a slow disk shows as slow pieces, not as one endless sync
NAMES = {dtype: name for name, dtype in _TYPES.items()}


class TensorFile(NamedTuple):
    """Contents of a safetensors file."""

    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]


def host_copy(tensor: Tensor) -> Tensor:
    """A copy that no later change of the tensor reaches."""
    return tensor.detach().to("cpu", copy=True)


def write_file(
    path: Path, contents: TensorFile | str | bytes, on_piece: Callable[[], None] = lambda: None
) -> str:
    """Write a file and wait until it is on disk; returns its SHA-256. `on_piece` is called as it grows.

    Tensors come to the host one at a time.
    """
    digest, unsynced = hashlib.sha256(), 0
    contents = contents.encode() if isinstance(contents, str) else contents
    with ThreadPoolExecutor(1) as hasher, path.open("wb") as file:
        for piece in [contents] if isinstance(contents, bytes) else _pieces(contents):
            hashing = hasher.submit(digest.update, piece)
            file.write(piece)
            unsynced += len(piece)
            if unsynced >= UNSYNCED:
                file.flush()
                os.fdatasync(file.fileno())
                unsynced = 0
            hashing.result()
            on_piece()
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def _pieces(contents: TensorFile) -> Iterator[bytes | memoryview]:
    """Header and data. Wide types come first, which keeps every tensor aligned."""
    tensors = sorted(contents.tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, object] = {"__metadata__": dict(contents.metadata)}
    end = 0
    for name, tensor in tensors:
        begin, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for _, tensor in tensors:
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        data = memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(b"")
        for begin in range(0, len(data), PIECE):
            yield data[begin : begin + PIECE]
