"""Trained tensors as a run's checkpoint stores them: each rank's file holds some rows of them.

    trainer/rank-00000.safetensors    tensors named PART/NAME, and in the metadata the first row of each

Parts are weights, optimizer, anchor, average and old_policy.
"""

import json
from collections.abc import Callable, Mapping
from operator import itemgetter
from pathlib import Path

from torch import Tensor

from sage_grpo.files.tensor_files import TensorFile
from sage_grpo.models.weights import Weights, open_folder, open_safetensors

FOLDER = "trainer"
PARTS = ("weights", "optimizer", "anchor", "average", "old_policy")


def rank_file(rank: int) -> str:
    return f"{FOLDER}/rank-{rank:05d}.safetensors"


def shards(tensors: Mapping[str, Tensor], starts: Mapping[str, int]) -> TensorFile:
    """One rank's file; starts: the first row of each tensor."""
    return TensorFile(tensors, {"starts": json.dumps(dict(starts))})


def open_shards(checkpoint: Path) -> dict[str, Weights]:
    """The tensors of all rank files of a checkpoint, by part and name."""
    found: dict[str, dict[str, list[tuple[int, Tensor]]]] = {part: {} for part in PARTS}
    for path in sorted((checkpoint / FOLDER).glob("rank-*.safetensors")):
        file = open_safetensors(path)
        for name, start in _starts(path, file).items():
            part, _, rest = name.partition("/")
            found.setdefault(part, {}).setdefault(rest, []).append((start, file.tensors[name]))
    parts = {
        part: {n: _in_order(f"{part}/{n}", pieces) for n, pieces in found[part].items()}
        for part in found
    }
    return {part: Weights(checkpoint, tensors) for part, tensors in parts.items()}


def _starts(path: Path, file: TensorFile) -> dict[str, int]:
    try:
        starts = json.loads(file.metadata["starts"])
        sound = starts.keys() == file.tensors.keys() and all(
            type(start) is int for start in starts.values()
        )
    except (KeyError, ValueError, AttributeError, RecursionError):
        sound = False
    if not sound:
        raise ValueError(
            f"{path} does not tell which rows its tensors are; it is no rank's file of a checkpoint"
        )
    return starts


def _in_order(name: str, pieces: list[tuple[int, Tensor]]) -> list[Tensor]:
    """A tensor's pieces, which must follow each other without gaps; a scalar is the same in every file."""
    if not all(piece.ndim for _, piece in pieces):
        return [pieces[0][1]]
    end, ordered = 0, sorted(pieces, key=itemgetter(0))
    for start, piece in ordered:
        if start != end or piece.shape[1:] != ordered[0][1].shape[1:]:
            raise ValueError(f"the ranks' files of a checkpoint disagree about the rows of {name}")
        end += len(piece)
    return [piece for _, piece in ordered]


def trained_weights(checkpoint: Path, base: Callable[[], Weights]) -> Weights:
    """All weights of a full fine-tuning run's checkpoint: as exported, else those of the model, `base()`, replaced by
    what the ranks trained, or by its average if the run had one."""
    if (checkpoint / "transformer").is_dir():
        return open_folder(checkpoint / "transformer")
    parts = open_shards(checkpoint)
    return Weights(checkpoint, base().pieces | (parts["average"].pieces or parts["weights"].pieces))
