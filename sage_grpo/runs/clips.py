"""The clips of a validation with their scores, written and read back.

RUN/validation/step-000100/clips.json      a record per clip: file, prompt, seed, size, scores, holdout, gold
RUN/validation/step-000100/*.mp4, sheet.png
"""

import json
import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from sage_grpo.files.foreign import read_bytes
from sage_grpo.runs.history import RunError, as_float
from sage_grpo.runs.media import contact_sheet, thumbnails, write_mp4

LISTING = "clips.json"
MAX_BYTES = 1 << 28  # of a listing
SHEET = "sheet.png"
SHEET_ROWS = 16
# kind of metric -> key of a record
RECORD_KEYS = {"reward": "scores", "holdout": "holdout", "gold": "gold"}
# what a record must have; the others have defaults
REQUIRED = {"file": str, "prompt": str, "seed": int} | dict.fromkeys(RECORD_KEYS.values(), dict)

Record = dict[str, Any]


# writing


def write_videos(
    folder: Path,
    clips: Sequence[Tensor | None],
    records: Sequence[Record],
    kept: Collection[str],
    fps: int,
) -> None:
    """Write the clips whose file is in `kept`."""
    folder.mkdir(parents=True, exist_ok=True)
    for clip, record in zip(clips, records, strict=True):
        if clip is not None and record["file"] in kept:
            write_mp4(folder / record["file"], clip, fps)


def write_sheet(folder: Path, clips: Sequence[Tensor | None], records: Sequence[Record]) -> None:
    """Write the contact sheet of the first clips that exist."""
    pairs = zip(clips, records, strict=True)
    shown = [(clip, record) for clip, record in pairs if clip is not None][:SHEET_ROWS]
    if shown:
        rows = [thumbnails(clip) for clip, _ in shown]
        labels = [sheet_label(record) for _, record in shown]
        contact_sheet(folder / SHEET, rows, labels)


def sheet_label(record: Record) -> str:
    reward = record["scores"]["total"]
    shown = "failed" if reward is None else f"{reward:.3f}"
    return f"{shown}  {record['prompt']}"


# reading


@dataclass(frozen=True)
class Clip:
    path: Path
    prompt: str
    seed: int
    values: dict[str, float]  # "reward/VQ", "gold/match", ...: named as in validation lines
    image: str = ""  # file of its first frame

    @property
    def request(self) -> tuple[str, int, str]:
        return self.prompt, self.seed, self.image

    @property
    def reward(self) -> float:
        return self.values.get("reward/total", math.nan)

    @property
    def held_out(self) -> float:
        """The sum of all held-out scores; NaN if there is none or one is missing."""
        scores = [value for name, value in self.values.items() if name.startswith("holdout/")]
        return math.fsum(scores) if scores else math.nan


Pair = tuple[Clip, Clip]  # before, after


def read_validations(run: Path) -> dict[int, list[Clip]]:
    """The clips of each validation in a run, by iteration."""
    validations = {}
    for listing in sorted(run.glob(f"validation/step-*/{LISTING}")):
        step = listing.parent.name.removeprefix("step-")
        if listing.is_file() and re.fullmatch(r"\d{1,16}", step):
            validations[int(step)] = read_clips(listing.parent, anywhere=True)
    return validations


def read_clips(folder: Path, anywhere: bool = False) -> list[Clip]:
    """The clips of one validation; empty if none were kept. `anywhere`: trust the listing to point to other folders."""
    listing = folder / LISTING
    if not listing.is_file():
        return []
    clips = []
    for record in read_listing(listing):
        values = {
            f"{kind}/{name}": value
            for kind, key in RECORD_KEYS.items()
            for name, value in record[key].items()
        }
        path = folder / record["file"] if anywhere else beside(listing, record["file"])
        image = str(record.get("image", ""))
        clips.append(Clip(path, record["prompt"], record["seed"], values, image))
    return clips


def read_listing(path: Path) -> list[Record]:
    """The records of a clips.json; scores are numbers, NaN where there is none."""
    try:
        records = json.loads(read_bytes(path, MAX_BYTES))
        if not isinstance(records, list):
            raise ValueError("it is not a list of clips")
    except (ValueError, RecursionError) as error:
        raise RunError(f"{path} is damaged ({error}); delete it or its folder") from error
    return [checked(record, f"{path}, clip {number}") for number, record in enumerate(records, 1)]


def checked(record: Any, where: str) -> Record:
    """A record with all of its parts; one that lacks file or prompt, or has a part of another kind, is rejected."""
    defaults = {"seed": 0} | {key: {} for key in RECORD_KEYS.values()}
    record = defaults | (record if isinstance(record, dict) else {})
    try:
        json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:  # half a surrogate pair, which no page can show
        text = error.object[error.start : error.end]
        raise RunError(
            f"{where} has {text!r}, which is not a character; correct or delete that entry"
        ) from error
    for name, kind in REQUIRED.items():
        if not isinstance(record.get(name), kind):
            raise RunError(
                f"{where} has {name} {record.get(name)!r:.100}; correct or delete that entry"
            )
    for key in RECORD_KEYS.values():
        scores = record[key].items()
        record[key] = {name: as_float(value, f"{name} in {where}") for name, value in scores}
    return record


def beside(listing: Path, name: Any) -> Path:
    """A file named by a listing. It must be in the listing's folder, because it will be shown to others."""
    is_plain_name = (
        isinstance(name, str)
        and name.isprintable()
        and Path(name).name == name
        and len(name.encode()) < 256
    )
    if not is_plain_name or (listing.parent / name).is_symlink():
        raise RunError(
            f"{listing} names the file {name!r:.60}, which does not lie beside it; delete that entry"
        )
    return listing.parent / name


def pair_clips(before: Sequence[Clip], after: Sequence[Clip]) -> list[Pair]:
    """Clips of the same prompt, seed and image, in the order of `before`."""
    after_by_request = {clip.request: clip for clip in after}
    return [
        (clip, after_by_request[clip.request])
        for clip in before
        if clip.request in after_by_request
    ]
