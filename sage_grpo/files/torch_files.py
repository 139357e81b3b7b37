"""Converts weights published only as torch files to safetensors, once.

Only tensors are read from a torch file (`weights_only=True`); code is rejected. The new file is next to the old one
and stores the old one's SHA-256, so that it is rewritten only if that changed.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from sage_grpo.files.foreign import new_name
from sage_grpo.files.manifest import file_sha256
from sage_grpo.files.tensor_files import TensorFile, write_file


def read_tensors(source: Path) -> Any:
    """Contents of a torch file: tensors, and plain containers of them."""
    try:
        return torch.load(source, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged bytes can raise anything
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"{source} is damaged or holds more than tensors ({reason}); download it again."
        ) from error


def convert(source: Path, tensors_of: Callable[[Any], dict[str, Tensor]] = dict) -> str:
    """Write `source` as safetensors unless that was done before; returns a sentence that says which.

    `tensors_of` selects and names the tensors in what the file holds.
    """
    target = source.with_suffix(".safetensors")
    sha256 = file_sha256(source)
    if target.is_file():
        with safe_open(target, "pt") as file:
            metadata = file.metadata() or {}
        if metadata.get("source_sha256") == sha256:
            return f"{target} is up to date"

    tensors = tensors_of(read_tensors(source))
    if not tensors:
        raise ValueError(f"{source} holds none of the expected tensors; download it again.")
    metadata = {"format": "pt", "source": source.name, "source_sha256": sha256}
    draft = new_name(target)
    try:
        write_file(draft, TensorFile(tensors, metadata))
        os.replace(draft, target)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    return f"wrote {target}, {len(tensors)} tensors, from {source.name} with sha256 {sha256}"
