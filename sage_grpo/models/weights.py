"""Reads a model part's tensors lazily from safetensors files, and writes them.

A rank of a sharded run reads only the rows it keeps, whatever the names and order in the files.
"""

import json
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from huggingface_hub import StateDictSplit, split_state_dict_into_shards_factory
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from tqdm import tqdm

from sage_grpo.files.json_files import printable, read_object
from sage_grpo.files.tensor_files import TensorFile
from sage_grpo.parallel.fsdp import local_shard, rows

STEM = "diffusion_pytorch_model"
INDEX = f"{STEM}.safetensors.index.json"
SHOWN = 3  # names shown in an error
READERS = 4  # threads: one alone would wait for the disk, or for new pages of memory
LONG = 4e9  # bytes whose copying is shown

Model = TypeVar("Model", bound=nn.Module)


class Rows(NamedTuple):
    """One of `num_blocks` equal blocks of rows of a stored tensor."""

    source: str  # name of the tensor
    block: int
    num_blocks: int


class Weights:
    """Tensors by name, read only when requested.

    Each tensor is a list of pieces: views of files that hold consecutive rows of it.
    """

    def __init__(self, where: Path, pieces: Mapping[str, Sequence[Tensor]]) -> None:
        self.where = where
        self.pieces = dict(pieces)

    @property
    def names(self) -> list[str]:
        return list(self.pieces)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the full tensor; () for a scalar."""
        pieces = self.pieces[name]
        if pieces[0].ndim == 0:
            return ()
        return (sum(len(piece) for piece in pieces), *pieces[0].shape[1:])

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Copy rows start:stop of the tensor to the CPU, or all of a scalar; no other bytes are read."""
        if not self.shape(name):
            return self.pieces[name][0].clone()
        return torch.cat(self._rows(name, start, stop))  # a copy: the file may change or vanish

    def copy_to(self, target: Tensor, name: str, start: int = 0, stop: int | None = None) -> None:
        """Copy rows start:stop of the tensor, or all of a scalar, into `target`, on any device and of any dtype."""
        if not self.shape(name):
            target.copy_(self.pieces[name][0])
            return
        begin = 0
        for piece in self._rows(name, start, stop):
            target[begin : begin + len(piece)].copy_(piece)
            begin += len(piece)

    def _rows(self, name: str, start: int, stop: int | None) -> list[Tensor]:
        """Views of the files that hold rows start:stop; some may be empty."""
        if stop is None:
            stop = self.shape(name)[0]
        selected = []
        for piece in self.pieces[name]:
            selected.append(piece[start:stop])
            # count from the beginning of the next piece
            start = max(start - len(piece), 0)
            stop = max(stop - len(piece), 0)
        return selected

    def below(self, prefix: str) -> "Weights":
        """The tensors whose names begin with `prefix`, without it."""
        pieces = {
            name.removeprefix(prefix): piece
            for name, piece in self.pieces.items()
            if name.startswith(prefix)
        }
        return Weights(self.where, pieces)

    def renamed(self, recipes: Mapping[str, Sequence[Rows]]) -> "Weights":
        """The stored tensors under other names: each new tensor stacks some rows of stored ones."""
        pieces = {name: [self._view(rows) for rows in recipe] for name, recipe in recipes.items()}
        return Weights(self.where, pieces)

    def _view(self, rows: Rows) -> Tensor:
        [piece] = self.pieces[rows.source]
        if rows.num_blocks == 1:
            return piece
        count = len(piece) if piece.ndim else 1
        if count % rows.num_blocks:
            raise ValueError(
                f"{rows.source} in '{self.where}' has {count} rows, not a multiple of {rows.num_blocks}."
            )
        return piece.chunk(rows.num_blocks)[rows.block]


def open_file(path: Path) -> Weights:
    """The tensors of one file."""
    weights, _ = _open(path, [path])
    return weights


def open_folder(folder: Path) -> Weights:
    """All safetensors files in a folder. If there is an index, it must match the files."""
    index = next(iter(sorted(folder.glob("*.safetensors.index.json"))), None)
    if index is None:
        paths = sorted(folder.glob("*.safetensors"))
        if not paths:
            raise FileNotFoundError(f"'{folder}' has no *.safetensors; download that folder again.")
        weights, _ = _open(folder, paths)
        return weights

    promised = {name: folder / file for name, file in read_index(index).items()}
    weights, files = _open(folder, sorted(set(promised.values())))
    differing = sorted(
        name for name in {*promised, *files} if files.get(name) != promised.get(name)
    )
    if differing:
        raise ValueError(
            f"{index} disagrees with its files about {_some(differing)}; download that folder again."
        )
    return weights


def joined(where: Path, parts: Mapping[str, Weights]) -> Weights:
    """The weights of several parts, whose names precede those of their tensors; of a single part, its own."""
    if len(parts) == 1:
        [weights] = parts.values()
        return weights
    pieces = {
        f"{part}.{name}": piece
        for part, weights in parts.items()
        for name, piece in weights.pieces.items()
    }
    return Weights(where, pieces)


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
    pieces: dict[str, list[Tensor]] = {}
    files: dict[str, Path] = {}
    for path in paths:
        for name, tensor in open_safetensors(path).tensors.items():
            if name in files:
                raise ValueError(
                    f"{printable(name)} is in both {files[name]} and {path}; keep one of these files."
                )
            pieces[name] = [tensor]
            files[name] = path

    matches = [re.search(r"-\d+-of-(\d+)$", path.stem) for path in paths]
    shard_counts = {int(match[1]) for match in matches if match}
    if shard_counts and shard_counts != {len(paths)}:
        raise FileNotFoundError(
            f"'{where}' has {len(paths)} of {max(shard_counts)} shards; download that folder again."
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
        raise ValueError(
            f"{path} is not a complete safetensors file ({printable(error)}); download it again."
        ) from error


def check_names(weights: Weights, expected: Mapping[str, Sequence[int]]) -> None:
    """Reject weights without exactly the expected tensors and shapes, before anything is loaded."""
    missing = [name for name in expected if name not in weights.pieces]
    unexpected = [name for name in weights.names if name not in expected]
    reshaped = []
    for name in weights.names:
        if name in expected and weights.shape(name) != tuple(expected[name]):
            reshaped.append(f"{name} {weights.shape(name)} instead of {tuple(expected[name])}")

    kinds = {"missing": missing, "unexpected": unexpected, "of another shape": reshaped}
    problems = [f"{len(names)} {kind} ({_some(names)})" for kind, names in kinds.items() if names]
    if problems:
        raise ValueError(
            f"'{weights.where}' does not fit this model: of its tensors {', '.join(problems)}."
        )


def _some(names: Sequence[str]) -> str:
    """The first few names, for an error."""
    text = printable(", ".join(names[:SHOWN]))
    return f"{text} and others" if len(names) > SHOWN else text


def load_model(
    model: Model, weights: Weights, device: torch.device | str, dtype: torch.dtype
) -> Model:
    """Load weights into a model; it may be on the meta device."""
    check_names(weights, {name: tensor.shape for name, tensor in model.state_dict().items()})
    first_names: dict[int, str] = {}  # a tensor with two names is read once
    tensors: dict[str, Tensor] = {}
    for name, pieces in weights.pieces.items():
        first_name = first_names.setdefault(id(pieces), name)
        if first_name == name:
            tensors[name] = torch.empty(weights.shape(name), device=device, dtype=dtype)
        else:
            tensors[name] = tensors[first_name]
    copy_all(weights, {name: (tensors[name], 0, None) for name in first_names.values()})
    model.load_state_dict(tensors, assign=next(model.parameters()).is_meta)
    return model


def fill_model(model: nn.Module, weights: Weights) -> None:
    """Fill the parameters in place (each rank only its rows of sharded ones); adapters are left alone."""
    parameters = {
        name.replace(".base_layer.", "."): parameter
        for name, parameter in model.named_parameters()
        if ".lora_" not in name
    }
    check_names(weights, {name: parameter.shape for name, parameter in parameters.items()})
    copy_all(
        weights,
        {
            name: (local_shard(parameter.detach()), *rows(parameter))
            for name, parameter in parameters.items()
        },
    )


def copy_all(weights: Weights, targets: Mapping[str, tuple[Tensor, int, int | None]]) -> None:
    """Copy tensors from their files to where they belong, several at a time; a bar shows what takes long.

    targets: for each name the place of the rows start:stop, which follow.
    """

    @torch.no_grad()
    def copy(name: str) -> int:
        target, start, stop = targets[name]
        weights.copy_to(target, name, start, stop)
        return target.nbytes

    total = sum(target.nbytes for target, _, _ in targets.values())
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    shown = is_first and total >= LONG
    bar = tqdm(
        total=total,
        desc="weights",
        unit="B",
        unit_scale=True,
        mininterval=1,
        disable=not shown,
    )
    with bar, ThreadPoolExecutor(READERS) as pool:
        copies = [pool.submit(copy, name) for name in targets]
        for finished in as_completed(copies):
            bar.update(finished.result())


def plan_files(sizes: Mapping[str, int], max_bytes: float = 5e9) -> StateDictSplit:
    """How to split tensors of these bytes, in this order, into files: the tensors of each, and the file of each."""
    return split_state_dict_into_shards_factory(
        sizes,
        get_storage_size=int,
        filename_pattern=f"{STEM}{{suffix}}.safetensors",
        max_shard_size=max_bytes,
    )


def index_text(files: Mapping[str, str], total: int) -> str:
    """The index of weights in several files, given the file of each tensor and the bytes of all."""
    index = {"metadata": {"total_size": total}, "weight_map": files}
    return json.dumps(index, indent=2, sort_keys=True) + "\n"
