"""The clips of one validation in a run folder: videos, their scores in clips.json, and a contact sheet.

Two validations are compared clip by clip, same prompt and seed. That shows reward hacking: the training reward rises
while a held-out reward, which training never sees, falls. A change counts if the 95 % interval of its mean excludes 0.

RUN/validation/step-000100/clips.json      a record per clip: file, prompt, seed, scores, holdout, gold
RUN/validation/step-000100/*.mp4, sheet.png
"""

import json
import math
import re
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from sage_grpo.intervals import Interval, interval
from sage_grpo.json_files import write_json
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
    write_json(folder / LISTING, records, ensure_ascii=False)


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

    @property
    def held_out(self) -> float:
        """The sum of all held-out scores; NaN if there is none or one is missing."""
        values = [value for name, value in self.values.items() if name.startswith("holdout/")]
        return math.fsum(values) if values else math.nan


Pair = tuple[Clip, Clip]  # before, after


def read_clips(folder: Path, anywhere: bool = False) -> list[Clip]:
    """The clips of one validation; empty if none were kept. `anywhere`: trust the listing to point to other folders."""
    path, clips = folder / LISTING, []
    for entry in read_listing(path) if path.is_file() else ():
        values = {f"{kind}/{name}": value for kind, place in PLACES.items() for name, value in entry[place].items()}
        file = folder / entry["file"] if anywhere else beside(path, entry["file"])
        clips.append(Clip(file, entry["prompt"], entry["seed"], values))
    return clips


def read_listing(path: Path) -> list[Record]:
    """The records of a clips.json; scores are numbers, NaN where there is none."""
    try:
        if not isinstance(records := json.loads(path.read_bytes()), list):
            raise ValueError("it is not a list of clips")
    except (ValueError, RecursionError) as error:
        raise RunError(f"{path} is damaged ({error}); delete it, or the folder that it is in") from error
    return [checked(record, f"{path}, clip {number}") for number, record in enumerate(records, 1)]


def checked(record: Any, where: str) -> Record:
    """A record with all of its parts; one that lacks file or prompt, or has a part of another kind, is rejected."""
    record = {"seed": 0} | {place: {} for place in PLACES.values()} | (record if isinstance(record, dict) else {})
    kinds = {"file": str, "prompt": str, "seed": int} | dict.fromkeys(PLACES.values(), dict)
    for name, kind in kinds.items():
        if not isinstance(record.get(name), kind):
            raise RunError(f"{where} has {name} {record.get(name)!r:.100}; correct or delete that entry")
    named = {place: record[place].items() for place in PLACES.values()}
    return record | {place: {k: as_float(v, f"{k} in {where}") for k, v in items} for place, items in named.items()}


def pair_clips(before: Sequence[Clip], after: Sequence[Clip]) -> list[Pair]:
    """Clips of the same prompt and seed, in the order of `before`."""
    found = {(clip.prompt, clip.seed): clip for clip in after}
    return [(clip, found[clip.prompt, clip.seed]) for clip in before if (clip.prompt, clip.seed) in found]


def read_validations(run: Path) -> dict[int, list[Clip]]:
    """The clips of each validation in a run, by iteration."""
    files = [file for file in sorted(run.glob(f"validation/step-*/{LISTING}")) if file.is_file()]
    found = {file.parent.name.removeprefix("step-"): file.parent for file in files}
    return {int(n): read_clips(folder, anywhere=True) for n, folder in found.items() if re.fullmatch(r"\d{1,16}", n)}


def beside(listing: Path, name: Any) -> Path:
    """A file named by a listing. It must be in the listing's folder, because it will be shown to others."""
    sound = isinstance(name, str) and name.isprintable() and Path(name).name == name and len(name.encode()) < 256
    if not sound or (listing.parent / name).is_symlink():
        raise RunError(f"{listing} names the file {name!r:.60}, which does not lie beside it; delete that entry")
    return listing.parent / name


def change(before: Sequence[Clip], after: Sequence[Clip], name: str) -> Interval:
    """Mean of after - before, of `reward` or `held_out`, over the clips that both contain."""
    return interval(getattr(new, name) - getattr(old, name) for old, new in pair_clips(before, after))


def divergence(folder: Path, step: int) -> str:
    """What is wrong with the validation at `step` of a run folder, in one sentence; empty if nothing is."""
    try:
        found = read_validations(folder)
    except RunError as error:  # a listing that a crash has cut short must not stop the training
        print(f"note: not checked for reward hacking: {error}", file=sys.stderr, flush=True)
        return ""
    if step not in found:  # its clips were not saved: the disk was full
        return ""
    first = min(found)
    reward, holdout = (change(found[first], found[step], value) for value in ("reward", "held_out"))
    if reward.sign < 1 or holdout.sign > -1:
        return ""
    ends = [(c.mean, c.mean - c.half, c.mean + c.half) for c in (reward, holdout)]
    shown = [f"{mean:+.3g} (95 % interval {low:+.3g} to {high:+.3g})" for mean, low, high in ends]
    changes = f"the trained reward changed by {shown[0]} and the held-out one by {shown[1]}"
    remedy = "look at the clips, go back to an earlier checkpoint, change reward_weights or the KL"
    return f"reward hacking: from iteration {first} to {step} {changes}; {remedy}"
