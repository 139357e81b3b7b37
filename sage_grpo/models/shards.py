"""Trained tensors as a run's checkpoint stores them: each rank's file holds some rows of them.

    trainer/rank-00000.safetensors    tensors named PART/NAME, and in the metadata the first row of each

Parts are weights, optimizer, anchor, average and old_policy.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path

from torch import Tensor

from sage_grpo.files.tensor_files import TensorFile
from sage_grpo.models.denoiser import TRANSFORMER
from sage_grpo.models.weights import Weights, joined, open_folder, open_safetensors

FOLDER = "trainer"
PARTS = ("weights", "optimizer", "anchor", "average", "old_policy")


def rank_file(rank: int) -> str:
    return f"{FOLDER}/rank-{rank:05d}.safetensors"


def shards(tensors: Mapping[str, Tensor], starts: Mapping[str, int]) -> TensorFile:
    """One rank's file. tensors: its rows, by PART/NAME. starts: the first row of each tensor."""
    return TensorFile(tensors, {"starts": json.dumps(dict(starts))})


def open_shards(checkpoint: Path) -> dict[str, Weights]:
    """The tensors of all rank files of a checkpoint, by part and name."""
    # part -> tensor -> (first row, rows) of every rank
    stored: dict[str, dict[str, list[tuple[int, Tensor]]]] = {part: {} for part in PARTS}
    for path in sorted((checkpoint / FOLDER).glob("rank-*.safetensors")):
        file = open_safetensors(path)
        for label, start in _starts(path, file).items():
            part, _, name = label.partition("/")
            pieces = stored.setdefault(part, {}).setdefault(name, [])
            pieces.append((start, file.tensors[label]))

    return {
        part: Weights(
            checkpoint,
            {name: _in_order(f"{part}/{name}", pieces) for name, pieces in tensors.items()},
        )
        for part, tensors in stored.items()
    }


def _starts(path: Path, file: TensorFile) -> dict[str, int]:
    """The first row of each tensor of a rank's file."""
    try:
        starts = json.loads(file.metadata["starts"])
        is_valid = starts.keys() == file.tensors.keys()
        is_valid = is_valid and all(type(start) is int for start in starts.values())
    except (KeyError, ValueError, AttributeError, RecursionError):
        is_valid = False
    if not is_valid:
        raise ValueError(
            f"{path} does not say which rows its tensors hold; it is not a rank file of a checkpoint"
        )
    return starts


def _in_order(name: str, pieces: list[tuple[int, Tensor]]) -> list[Tensor]:
    """A tensor's pieces by first row, which must follow each other without gaps; a scalar is the same in every file."""
    if any(piece.ndim == 0 for _, piece in pieces):
        _, scalar = pieces[0]
        return [scalar]

    pieces = sorted(pieces, key=itemgetter(0))
    row_shape = pieces[0][1].shape[1:]
    end = 0
    for start, piece in pieces:
        if start != end or piece.shape[1:] != row_shape:
            raise ValueError(f"the rank files of a checkpoint disagree about the rows of {name}")
        end += len(piece)
    return [piece for _, piece in pieces]


def trained_weights(
    checkpoint: Path, base: Callable[[], Weights], experts: Sequence[str] = (TRANSFORMER,)
) -> Weights:
    """All weights of a full fine-tuning run's checkpoint, of a model with the transformers `experts`.

    They are the exported ones if there are any. Otherwise they are those of the model, `base()`, with what the ranks
    trained in their place, or its average if the run had one.
    """
    if (checkpoint / experts[0]).is_dir():
        return joined(checkpoint, {name: open_folder(checkpoint / name) for name in experts})
    parts = open_shards(checkpoint)
    trained = parts["average"].pieces or parts["weights"].pieces
    return Weights(checkpoint, base().pieces | trained)
