"""The clips of one validation in a run folder: videos, their scores in clips.json, and a contact sheet.

RUN/validation/step-000100/clips.json      a record per clip: file, prompt, seed, scores, holdout, gold
RUN/validation/step-000100/*.mp4, sheet.png
"""

import json
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from sage_grpo.runs.history import RunError, as_float
from sage_grpo.runs.media import contact_sheet, thumbnails, write_mp4

LISTING, SHEET = "clips.json", "sheet.png"
SHEET_ROWS = 16
PLACES = {"reward": "scores", "holdout": "holdout", "gold": "gold"}  # kind of metric -> key of a record

Record = dict[str, Any]


def write_videos(
    folder: Path, clips: Sequence[Tensor | None], records: Sequence[Record], kept: Collection[str], fps: int
) -> None:
    """Write the clips whose file is in `kept`."""
    folder.mkdir(parents=True, exist_ok=True)
    for clip, record in zip(clips, records, strict=True):
        if clip is not None and record["file"] in kept:
            write_mp4(folder / record["file"], clip, fps)


def write_listing(folder: Path, records: Sequence[Record]) -> None:
    """Replace clips.json in one step."""
    draft = folder / f"{LISTING}.tmp"
    draft.write_text(json.dumps(records, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    draft.replace(folder / LISTING)


def write_sheet(folder: Path, clips: Sequence[Tensor | None], records: Sequence[Record]) -> None:
    rows = [(thumbnails(c), r) for c, r in zip(clips, records, strict=True) if c is not None][:SHEET_ROWS]
    if rows:
        contact_sheet(folder / SHEET, [row for row, _ in rows], [sheet_label(record) for _, record in rows])


def sheet_label(record: Record) -> str:
    reward = record["scores"]["total"]
    return f"{'failed' if reward is None else f'{reward:.3f}'}  {record['prompt']}"


@dataclass(frozen=True)
class Clip:
    path: Path
    prompt: str
    seed: int
    values: dict[str, float]  # "reward/VQ", "gold/match", ...: named as in validation lines

    @property
    def reward(self) -> float:
        return self.values.get("reward/total", math.nan)


Pair = tuple[Clip, Clip]  # before, after


def read_clips(folder: Path, anywhere: bool = False) -> list[Clip]:
    """The clips of one validation; empty if none were kept. `anywhere`: trust the listing to point to other folders."""
    path, clips = folder / LISTING, []
    for entry in json.loads(path.read_bytes()) if path.is_file() else ():
        values = {}
        for kind, place in PLACES.items():
            values |= {f"{kind}/{name}": as_float(value) for name, value in entry.get(place, {}).items()}
        file = folder / entry["file"] if anywhere else beside(path, entry["file"])
        clips.append(Clip(file, entry["prompt"], entry["seed"], values))
    return clips


def pair_clips(before: Sequence[Clip], after: Sequence[Clip]) -> list[Pair]:
    """Clips of the same prompt and seed, in the order of `before`."""
    found = {(clip.prompt, clip.seed): clip for clip in after}
    return [(clip, found[clip.prompt, clip.seed]) for clip in before if (clip.prompt, clip.seed) in found]


def read_validations(run: Path) -> dict[int, list[Record]]:
    """The records of each validation in a run, by iteration."""
    files = sorted(run.glob(f"validation/step-*/{LISTING}"))
    return {int(file.parent.name.removeprefix("step-")): json.loads(file.read_bytes()) for file in files}


def beside(listing: Path, name: Any) -> Path:
    """A file named by a listing. It must be in the listing's folder, because it will be shown to others."""
    if not isinstance(name, str) or Path(name).name != name:
        raise RunError(f"{listing} names the file {name!r}, which does not lie beside it; correct or delete that entry")
    return listing.parent / name
