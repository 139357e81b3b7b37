"""Reads a model part's tensors lazily from safetensors files, and writes them.

A rank of a sharded run reads only the rows it keeps, whatever the names and order in the files.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from huggingface_hub import StateDictSplit, split_state_dict_into_shards_factory
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from sage_grpo.files.json_files import printable, read_object
from sage_grpo.files.tensor_files import TensorFile
from sage_grpo.parallel.fsdp import local_shard, rows

STEM = "diffusion_pytorch_model"
INDEX = f"{STEM}.safetensors.index.json"
SHOWN = 3  # names shown in an error

Model = TypeVar("Model", bound=nn.Module)
Rows = tuple[
    str, int, int
]  # of a tensor: its name, and which block of how many equal blocks of rows


class Weights:
    """Tensors by name, each in pieces of some rows that follow each other: views of files, read only when requested."""

    def __init__(self, where: Path, pieces: Mapping[str, Sequence[Tensor]]) -> None:
        self.where, self.pieces = where, dict(pieces)

    @property
    def names(self) -> list[str]:
        return list(self.pieces)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the full tensor; () for a scalar."""
        pieces = self.pieces[name]
        return (sum(map(len, pieces)), *pieces[0].shape[1:]) if pieces[0].ndim else ()

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Copy rows start:stop of the tensor to the CPU, or all of a scalar; no other bytes are read."""
        if not self.shape(name):
            return self.pieces[name][0].clone()
        found, stop = [], self.shape(name)[0] if stop is None else stop
        for piece in self.pieces[name]:
            found.append(piece[start:stop])
            start, stop = max(start - len(piece), 0), max(stop - len(piece), 0)
        return torch.cat(found)  # a copy: the file may change or vanish

    def renamed(self, recipes: Mapping[str, Sequence[Rows]]) -> "Weights":
        """A view of the stored tensors under other names."""
        return Weights(
            self.where,
            {name: [self._rows(*rows) for rows in recipe] for name, recipe in recipes.items()},
        )

    def _rows(self, source: str, block: int, of: int) -> Tensor:
        [piece] = self.pieces[source]
        count = len(piece) if piece.ndim else 1
        if count % of:
            raise ValueError(
                f"{source} in '{self.where}' has {count} rows, not a multiple of {of}."
            )
        return piece.chunk(of)[block] if of > 1 else piece


def open_file(path: Path) -> Weights:
    """The tensors of one file."""
    return _open(path, [path])[0]


def open_folder(folder: Path) -> Weights:
    """All safetensors files in a folder. If there is an index, it must match the files."""
    index = next(iter(sorted(folder.glob("*.safetensors.index.json"))), None)
    promised = read_index(index) if index else {}
    paths = sorted({folder / file for file in promised.values()} or folder.glob("*.safetensors"))
    if not paths:
        raise FileNotFoundError(f"'{folder}' has no *.safetensors; download that folder again.")
    weights, files = _open(folder, paths)
    wrong = sorted(
        name for name in {*promised, *files} if files.get(name) != folder / promised.get(name, "")
    )
    if index and wrong:
        raise ValueError(
            f"{index} disagrees with its files about {_some(wrong)}; download that folder again."
        )
    return weights


def read_index(path: Path) -> dict[str, str]:
    """The file of each tensor, from a `*.safetensors.index.json`; files outside its folder are rejected."""
    files = read_object(path).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise ValueError(f"{path} has no weight_map; download it again.")
    for file in files.values():
        if not isinstance(file, str) or not re.fullmatch(r"[\w.-]+\.safetensors", file):
            raise ValueError(
                f"{path} names {file!r}, which is not a safetensors file beside it; download it again."
            )
    return files


def _open(where: Path, paths: Sequence[Path]) -> tuple[Weights, dict[str, Path]]:
    """The tensors of some files of a folder, and the file of each; missing shards and duplicates are rejected."""
    pieces, files = {}, {}
    for path in paths:
        for name, tensor in open_safetensors(path).tensors.items():
            if name in files:
                raise ValueError(
                    f"{printable(name)} is in both {files[name]} and {path}; keep one of these files."
                )
            pieces[name], files[name] = [tensor], path
    counts = {int(match[1]) for path in paths if (match := re.search(r"-\d+-of-(\d+)$", path.stem))}
    if counts and counts != {len(paths)}:
        raise FileNotFoundError(
            f"'{where}' has {len(paths)} of {max(counts)} shards; download that folder again."
        )
    return Weights(where, pieces), files


def open_safetensors(path: Path) -> TensorFile:
    """The tensors of a file as views of it: nothing is read until they are used."""
    try:
        if not path.is_file():
            raise OSError("not a file")
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return TensorFile(tensors, file.metadata() or {})
    except (SafetensorError, OSError) as error:
        reason = printable(error)
        raise ValueError(
            f"{path} is not a complete safetensors file ({reason}); download it again."
        ) from error


def check_names(weights: Weights, expected: Mapping[str, Sequence[int]]) -> None:
    """Reject weights without exactly the expected tensors and shapes, before anything is loaded."""
    missing = [name for name in expected if name not in weights.pieces]
    unexpected = [name for name in weights.pieces if name not in expected]
    shapes = [
        (name, weights.shape(name), tuple(expected[name]))
        for name in weights.pieces
        if name in expected
    ]
    other = [
        f"{name} {ours} instead of {theirs}" for name, ours, theirs in shapes if ours != theirs
    ]
    kinds = {"missing": missing, "unexpected": unexpected, "of another shape": other}
    if problems := [
        f"{len(names)} {kind} ({_some(names)})" for kind, names in kinds.items() if names
    ]:
        raise ValueError(
            f"'{weights.where}' does not fit this model: of its tensors {', '.join(problems)}."
        )


def _some(names: Sequence[str]) -> str:
    return printable(", ".join(names[:SHOWN])) + (" and others" if len(names) > SHOWN else "")


def load_model(
    model: Model, weights: Weights, device: torch.device | str, dtype: torch.dtype
) -> Model:
    """Load weights into a model one tensor at a time; the model may be on the meta device."""
    check_names(weights, {name: tensor.shape for name, tensor in model.state_dict().items()})
    tensors = {name: weights.read(name).to(device, dtype) for name in weights.names}
    model.load_state_dict(tensors, assign=next(model.parameters()).is_meta)
    return model


@torch.no_grad()
def fill_model(model: nn.Module, weights: Weights) -> None:
    """Fill the parameters in place (each rank only its rows of sharded ones); adapters are left alone."""
    own = {
        name.replace(".base_layer.", "."): p
        for name, p in model.named_parameters()
        if ".lora_" not in name
    }
    check_names(weights, {name: parameter.shape for name, parameter in own.items()})
    for name, parameter in own.items():
        local_shard(parameter).copy_(weights.read(name, *rows(parameter)))


def plan_files(sizes: Mapping[str, int], max_bytes: float = 5e9) -> StateDictSplit:
    """The tensors of each file and the file of each tensor, for tensors of these bytes in this order."""
    kwargs = {"filename_pattern": f"{STEM}{{suffix}}.safetensors", "max_shard_size": max_bytes}
    return split_state_dict_into_shards_factory(sizes, get_storage_size=int, **kwargs)


def index_text(files: Mapping[str, str], total: int) -> str:
    """The index of weights in several files, given the file of each tensor and the bytes of all."""
    return (
        json.dumps(
            {"metadata": {"total_size": total}, "weight_map": files}, indent=2, sort_keys=True
        )
        + "\n"
    )
