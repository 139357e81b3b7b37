"""Reads a model part's tensors lazily from safetensors files, and writes them.

A rank of a sharded run reads only the rows it keeps, whatever the names and order in the files.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from sage_grpo.json_files import printable, read_object
from sage_grpo.parallel.fsdp import local_shard, rows

STEM = "diffusion_pytorch_model"
INDEX = f"{STEM}.safetensors.index.json"
SHOWN = 3  # names shown in an error

Model = TypeVar("Model", bound=nn.Module)


class Rows(NamedTuple):
    """Block `block` of the tensor `source`, split into `of` equal blocks of rows; all of it by default."""

    source: str
    block: int = 0
    of: int = 1


class Weights:
    """Tensors by name, each assembled from rows of stored tensors; nothing is read until requested."""

    def __init__(
        self, where: Path, files: Mapping[str, Path], recipes: Mapping[str, Sequence[Rows]] | None = None
    ) -> None:
        """`files` maps stored tensors to their files. Without `recipes`, stored names are used."""
        self.where, self._files = where, dict(files)
        self._recipes = recipes if recipes is not None else {name: (Rows(name),) for name in files}
        self._open: dict[Path, Any] = {}

    @property
    def names(self) -> list[str]:
        return list(self._recipes)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the full tensor; () for a scalar."""
        recipe = self._recipes[name]
        shape = self._stored(recipe[0].source).get_shape()
        return (sum(map(self._count, recipe)), *shape[1:]) if shape else ()

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Copy rows start:stop of the tensor to the CPU; no other bytes are read."""
        recipe = self._recipes[name]
        if not self.shape(name):
            return self._file(self._files[recipe[0].source]).get_tensor(recipe[0].source).clone()
        start, stop, _ = slice(start, stop).indices(self.shape(name)[0])
        pieces, before = [], 0  # rows before this piece
        for part in recipe:
            count = self._count(part)
            first, last = max(start - before, 0), min(stop - before, count)
            if first < last or not pieces:  # an empty range still needs a dtype and its other dimensions
                offset = part.block * count
                pieces.append(self._stored(part.source)[offset + first : offset + max(first, last)])
            before += count
        return torch.cat(pieces)  # pieces are views of the file, which may change or vanish

    def renamed(self, recipes: Mapping[str, Sequence[Rows]]) -> "Weights":
        """A view of the stored tensors under other names."""
        return Weights(self.where, self._files, recipes)

    def _count(self, part: Rows) -> int:
        length = self._stored(part.source).get_shape()[0]
        if length % part.of:
            raise ValueError(f"{part.source} in '{self.where}' has {length} rows, not a multiple of {part.of}.")
        return length // part.of

    def _stored(self, source: str) -> Any:
        return self._file(self._files[source]).get_slice(source)

    def _file(self, path: Path) -> Any:
        if path not in self._open:
            self._open[path] = open_safetensors(path)
        return self._open[path]


def open_file(path: Path) -> Weights:
    """The tensors of one file."""
    return Weights(path, _stored_names([path], path.parent))


def open_folder(folder: Path) -> Weights:
    """All safetensors files in a folder. If there is an index, it must match the files."""
    index = next(iter(sorted(folder.glob("*.safetensors.index.json"))), None)
    if index is None:
        return Weights(folder, _stored_names(sorted(folder.glob("*.safetensors")), folder))
    promised = read_index(index)
    paths = sorted({folder / file for file in promised.values()})
    if missing := [path.name for path in paths if not path.is_file()]:
        raise FileNotFoundError(f"'{folder}' lacks {_some(missing)} of the files in {index.name}; download it again.")
    files = _stored_names(paths, folder)
    if wrong := sorted(name for name in {*promised, *files} if files.get(name) != folder / promised.get(name, "")):
        raise ValueError(f"{index} disagrees with its files about {_some(wrong)}; download that folder again.")
    return Weights(folder, files)


def read_index(path: Path) -> dict[str, str]:
    """The file of each tensor, from a `*.safetensors.index.json`; files outside its folder are rejected."""
    files = read_object(path).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise ValueError(f"{path} has no weight_map; download it again.")
    for file in files.values():
        if not isinstance(file, str) or not re.fullmatch(r"[\w.-]+\.safetensors", file):
            raise ValueError(f"{path} names {file!r}, which is not a safetensors file beside it; download it again.")
    return files


def _stored_names(paths: Sequence[Path], folder: Path) -> dict[str, Path]:
    """The file of each tensor; missing shards and duplicate tensors are rejected."""
    if not paths:
        raise FileNotFoundError(f"'{folder}' has no *.safetensors; download that folder again.")
    files: dict[str, Path] = {}
    for path in paths:
        for name in open_safetensors(path).keys():  # noqa: SIM118 - not a dict
            if name in files:
                raise ValueError(f"{printable(name)} is in both {files[name]} and {path}; keep one of these files.")
            files[name] = path
    counts = {int(match[1]) for path in paths if (match := re.search(r"-\d+-of-(\d+)$", path.stem))}
    if counts and counts != {len(paths)}:
        raise FileNotFoundError(f"'{folder}' has {len(paths)} of {max(counts)} shards; download that folder again.")
    return files


def open_safetensors(path: Path) -> Any:
    try:
        if not path.is_file():
            raise OSError("not a file")
        return safe_open(path, "pt")
    except (SafetensorError, OSError) as error:
        reason = printable(error)
        raise ValueError(f"{path} is not a complete safetensors file ({reason}); download it again.") from error


def check_names(weights: Weights, expected: Mapping[str, Sequence[int]]) -> None:
    """Reject weights without exactly the expected tensors and shapes, before anything is loaded."""
    found = dict.fromkeys(weights.names)
    missing = [name for name in expected if name not in found]
    unexpected = [name for name in found if name not in expected]
    shapes = [(name, weights.shape(name), tuple(expected[name])) for name in found if name in expected]
    other = [f"{name} {ours} instead of {theirs}" for name, ours, theirs in shapes if ours != theirs]
    kinds = {"missing": missing, "unexpected": unexpected, "of another shape": other}
    if any(kinds.values()):
        problems = [f"{len(names)} {kind} ({_some(names)})" for kind, names in kinds.items() if names]
        raise ValueError(f"'{weights.where}' does not fit this model: of its tensors {', '.join(problems)}.")


def _some(names: Sequence[str]) -> str:
    return printable(", ".join(names[:SHOWN])) + (" and others" if len(names) > SHOWN else "")


def load_model(model: Model, weights: Weights, device: torch.device | str, dtype: torch.dtype) -> Model:
    """Load weights into a model one tensor at a time; the model may be on the meta device."""
    check_names(weights, {name: tensor.shape for name, tensor in model.state_dict().items()})
    tensors = {name: weights.read(name).to(device, dtype) for name in weights.names}
    model.load_state_dict(tensors, assign=next(model.parameters()).is_meta)
    return model


@torch.no_grad()
def fill_model(model: nn.Module, weights: Weights) -> None:
    """Fill the parameters in place (each rank only its rows of sharded ones); adapters are left alone."""
    own = {name.replace(".base_layer.", "."): p for name, p in model.named_parameters() if ".lora_" not in name}
    check_names(weights, {name: parameter.shape for name, parameter in own.items()})
    for name, parameter in own.items():
        local_shard(parameter).copy_(weights.read(name, *rows(parameter)))


def save_weights(folder: Path, tensors: Iterable[tuple[str, Tensor]], max_shard_bytes: float = 5e9) -> None:
    """Write files with diffusers' names. If `tensors` is a generator, only one shard at a time is in memory."""
    folder.mkdir(parents=True, exist_ok=True)
    if old := sorted(folder.glob(f"{STEM}*.safetensors*")):
        raise ValueError(f"'{folder}' already holds {old[0].name}; write to another folder.")
    drafts, total = [], 0
    for shard in _shards(tensors, max_shard_bytes):
        drafts.append((folder / f"{STEM}-{len(drafts) + 1:05d}.tmp", list(shard)))
        total += sum(tensor.nbytes for tensor in shard.values())
        save_file(shard, drafts[-1][0], metadata={"format": "pt"})
        del shard  # before filling the next one
    weight_map = {}
    for name, (draft, names) in zip(file_names(len(drafts)), drafts, strict=True):
        draft.rename(folder / name)
        weight_map |= dict.fromkeys(names, name)
    if len(drafts) > 1:
        (folder / INDEX).write_text(index_text(weight_map, total))


def file_names(count: int) -> list[str]:
    """diffusers' names of `count` files of weights."""
    parts = [f"-{number:05d}-of-{count:05d}" for number in range(1, count + 1)] if count > 1 else [""]
    return [f"{STEM}{part}.safetensors" for part in parts]


def index_text(weight_map: Mapping[str, str], total: int) -> str:
    """The index of weights in several files: the file of each tensor, and the bytes of all."""
    return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2, sort_keys=True) + "\n"


def plan_files(sizes: Mapping[str, int], max_bytes: float = 5e9) -> dict[str, list[str]]:
    """The tensors of each file, for tensors of these bytes in this order."""
    groups: list[list[str]] = [[]]
    for name, size in sizes.items():
        if groups[-1] and sum(sizes[other] for other in groups[-1]) + size > max_bytes:
            groups.append([])
        groups[-1].append(name)
    return dict(zip(file_names(len(groups)), groups, strict=True))


def _shards(tensors: Iterable[tuple[str, Tensor]], max_bytes: float) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if shard and sum(t.nbytes for t in shard.values()) + tensor.nbytes > max_bytes:
            yield shard
            shard = {}
        shard[name] = tensor.detach().cpu().contiguous()
    yield shard
