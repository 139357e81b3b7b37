"""Writes safetensors files piece by piece: each is hashed while it is written, and the disk is never far behind."""

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
# Most bytes that wait for the disk. A slow disk then shows as slow pieces, not as one endless sync.
UNSYNCED = 1 << 28
SUMMED = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
NAMES = {dtype: name for name, dtype in _TYPES.items()}  # of data types in a header


class TensorFile(NamedTuple):
    """Contents of a safetensors file."""

    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]


def host_copy(tensor: Tensor) -> Tensor:
    """A copy in host memory, which later changes to the tensor do not affect."""
    return tensor.detach().to("cpu", copy=True)


def all_finite(tensor: Tensor) -> bool:
    """Whether all values are finite.

    A finite sum proves it, and is some thirty times as fast as looking at each value: no value can undo an infinite one
    or NaN. Only a sum that is not finite leaves it open, since large values may add up to infinity.
    """
    if tensor.dtype in SUMMED and bool(tensor.sum().isfinite()):
        return True
    return bool(tensor.isfinite().all())


def write_file(
    path: Path, contents: TensorFile | str | bytes, on_piece: Callable[[], None] = lambda: None
) -> str:
    """Write a file and wait until it is on disk; returns its SHA-256. `on_piece` is called after each piece.

    Tensors are copied to the host one at a time.
    """
    if isinstance(contents, str):
        contents = contents.encode()
    pieces = [contents] if isinstance(contents, bytes) else _pieces(contents)

    digest = hashlib.sha256()
    unsynced = 0
    with ThreadPoolExecutor(1) as hasher, path.open("wb") as file:
        for piece in pieces:
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
    """The bytes of a safetensors file: length of the header, header, data."""
    # wide types come first, which keeps every tensor aligned
    tensors = sorted(contents.tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))

    header: dict[str, object] = {"__metadata__": dict(contents.metadata)}
    offset = 0
    for name, tensor in tensors:
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text

    for _, tensor in tensors:
        if not tensor.numel():
            continue
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        data = memoryview(flat.view(torch.uint8).numpy())
        for begin in range(0, len(data), PIECE):
            yield data[begin : begin + PIECE]
