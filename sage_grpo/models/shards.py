"""Trained tensors as a run's checkpoint stores them: each rank's file holds some rows of them.

    trainer/rank-00000.safetensors    tensors named PART/NAME, and in the metadata the first row of each

Parts are weights, optimizer, anchor and average.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sage_grpo.models.weights import Weights, open_safetensors
from sage_grpo.tensor_files import TensorFile

FOLDER = "trainer"


def rank_file(rank: int) -> str:
    return f"{FOLDER}/rank-{rank:05d}.safetensors"


def shards(tensors: Mapping[str, Tensor], starts: Mapping[str, int]) -> TensorFile:
    """One rank's file; starts: the first row of each tensor."""
    return TensorFile(tensors, {"starts": json.dumps(dict(starts))})


class Shards:
    """The tensors of all rank files of a checkpoint, by name and rows."""

    def __init__(self, checkpoint: Path) -> None:
        self.files: list[Any] = []
        self.places: dict[str, list[tuple[int, Any]]] = {}
        for path in sorted((checkpoint / FOLDER).glob("rank-*.safetensors")):
            file = open_safetensors(path)
            self.files.append(file)
            for name, start in _starts(path, file).items():
                self.places.setdefault(name, []).append((start, file))
        for pieces in self.places.values():
            pieces.sort(key=lambda place: place[0])

    def names(self, part: str) -> list[str]:
        return [name.removeprefix(f"{part}/") for name in self.places if name.startswith(f"{part}/")]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of all stored rows, which must follow each other without gaps."""
        end, rest = 0, self.places[name][0][1].get_slice(name).get_shape()[1:]
        for start, file in self.places[name]:
            shape = file.get_slice(name).get_shape()
            if not shape:
                return ()
            if start != end or shape[1:] != rest:
                raise ValueError(f"the ranks' files of a checkpoint disagree about the rows of {name}")
            end += shape[0]
        return (end, *rest)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows start:stop of a tensor; a scalar is returned as is."""
        if not self.places[name][0][1].get_slice(name).get_shape():
            return self.places[name][0][1].get_tensor(name)
        pieces = []
        for begin, file in self.places[name]:
            piece = file.get_slice(name)
            end = begin + piece.get_shape()[0]
            first, last = max(start, begin), end if stop is None else min(stop, end)
            pieces.append(piece[first - begin : max(first, last) - begin] if first < end else piece[0:0])
        return torch.cat(pieces)

    def pieces(self) -> Iterator[tuple[str, Tensor]]:
        """Every stored piece, one at a time."""
        for file in self.files:
            for name in file.keys():  # noqa: SIM118 - not a dict
                yield name, file.get_tensor(name)


def _starts(path: Path, file: Any) -> dict[str, int]:
    try:
        starts = json.loads((file.metadata() or {})["starts"])
        sound = starts.keys() == set(file.keys()) and all(type(start) is int for start in starts.values())
    except (KeyError, ValueError, AttributeError, RecursionError):
        sound = False
    if not sound:
        raise ValueError(f"{path} does not tell which rows its tensors are; it is no rank's file of a checkpoint")
    return starts


class TrainedWeights(Weights):
    """A model's weights, replaced by those that a checkpoint holds: the averaged ones, if the run had any."""

    def __init__(self, checkpoint: Path, base: Weights) -> None:
        self.where, self.base, self.stored = checkpoint, base, Shards(checkpoint)
        part = "average" if self.stored.names("average") else "weights"
        self.trained = {name: f"{part}/{name}" for name in self.stored.names(part)}

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys((*self.base.names, *self.trained)))

    def shape(self, name: str) -> tuple[int, ...]:
        return self.stored.shape(self.trained[name]) if name in self.trained else self.base.shape(name)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        if name in self.trained:
            return self.stored.read(self.trained[name], start, stop)
        return self.base.read(name, start, stop)
