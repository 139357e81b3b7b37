"""Clips as files, uint8 (F, H, W, 3): mp4 and contact sheets; those of a validation with their scores in clips.json.

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

import imageio.v2 as imageio
import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from sage_grpo.files.json_files import naming, printable
from sage_grpo.intervals import FEWEST, Interval, interval
from sage_grpo.runs.history import RunError, as_float

LISTING, SHEET = "clips.json", "sheet.png"
SHEET_ROWS, COLUMNS = 16, 5
GAP, MARGIN, LABEL_HEIGHT, FONT_SIZE = 6, 14, 20, 13  # pixels
FRAME = (96, 320)  # pixels: minimum shorter side and maximum longer side of a thumbnail
PLACES = {
    "reward": "scores",
    "holdout": "holdout",
    "gold": "gold",
}  # kind of metric -> key of a record

Record = dict[str, Any]


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
    rows = [(thumbnails(c), r) for c, r in zip(clips, records, strict=True) if c is not None][
        :SHEET_ROWS
    ]
    if rows:
        contact_sheet(
            folder / SHEET, [row for row, _ in rows], [sheet_label(record) for _, record in rows]
        )


def sheet_label(record: Record) -> str:
    reward = record["scores"]["total"]
    return f"{'failed' if reward is None else f'{reward:.3f}'}  {record['prompt']}"


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
        values = [value for name, value in self.values.items() if name.startswith("holdout/")]
        return math.fsum(values) if values else math.nan


Pair = tuple[Clip, Clip]  # before, after


def read_clips(folder: Path, anywhere: bool = False) -> list[Clip]:
    """The clips of one validation; empty if none were kept. `anywhere`: trust the listing to point to other folders."""
    path, clips = folder / LISTING, []
    for entry in read_listing(path) if path.is_file() else ():
        values = {
            f"{kind}/{name}": value
            for kind, place in PLACES.items()
            for name, value in entry[place].items()
        }
        file = folder / entry["file"] if anywhere else beside(path, entry["file"])
        clips.append(
            Clip(file, entry["prompt"], entry["seed"], values, str(entry.get("image", "")))
        )
    return clips


def read_listing(path: Path) -> list[Record]:
    """The records of a clips.json; scores are numbers, NaN where there is none."""
    try:
        if not isinstance(records := json.loads(path.read_bytes()), list):
            raise ValueError("it is not a list of clips")
    except (ValueError, RecursionError) as error:
        raise RunError(
            f"{path} is damaged ({error}); delete it, or the folder that it is in"
        ) from error
    return [checked(record, f"{path}, clip {number}") for number, record in enumerate(records, 1)]


def checked(record: Any, where: str) -> Record:
    """A record with all of its parts; one that lacks file or prompt, or has a part of another kind, is rejected."""
    record = (
        {"seed": 0}
        | {place: {} for place in PLACES.values()}
        | (record if isinstance(record, dict) else {})
    )
    kinds = {"file": str, "prompt": str, "seed": int} | dict.fromkeys(PLACES.values(), dict)
    for name, kind in kinds.items():
        if not isinstance(record.get(name), kind):
            raise RunError(
                f"{where} has {name} {record.get(name)!r:.100}; correct or delete that entry"
            )
    named = {place: record[place].items() for place in PLACES.values()}
    return record | {
        place: {k: as_float(v, f"{k} in {where}") for k, v in items}
        for place, items in named.items()
    }


def pair_clips(before: Sequence[Clip], after: Sequence[Clip]) -> list[Pair]:
    """Clips of the same prompt, seed and image, in the order of `before`."""
    found = {clip.request: clip for clip in after}
    return [(clip, found[clip.request]) for clip in before if clip.request in found]


def read_validations(run: Path) -> dict[int, list[Clip]]:
    """The clips of each validation in a run, by iteration."""
    files = [file for file in sorted(run.glob(f"validation/step-*/{LISTING}")) if file.is_file()]
    found = {file.parent.name.removeprefix("step-"): file.parent for file in files}
    return {
        int(n): read_clips(folder, anywhere=True)
        for n, folder in found.items()
        if re.fullmatch(r"\d{1,16}", n)
    }


def beside(listing: Path, name: Any) -> Path:
    """A file named by a listing. It must be in the listing's folder, because it will be shown to others."""
    sound = (
        isinstance(name, str)
        and name.isprintable()
        and Path(name).name == name
        and len(name.encode()) < 256
    )
    if not sound or (listing.parent / name).is_symlink():
        raise RunError(
            f"{listing} names the file {name!r:.60}, which does not lie beside it; delete that entry"
        )
    return listing.parent / name


def change(before: Sequence[Clip], after: Sequence[Clip], name: str) -> Interval:
    """Mean of after - before, of `reward` or `held_out`, over the clips that both contain."""
    return interval(
        getattr(new, name) - getattr(old, name) for old, new in pair_clips(before, after)
    )


def divergence(folder: Path, step: int) -> str:
    """What is wrong with the validation at `step` of a run folder, in one sentence; empty if nothing is."""
    try:
        found = read_validations(folder)
        earlier = (
            [n for n in sorted(found) if n < step] if step in found else []
        )  # not saved if the disk was full
        best = sorted(earlier, key=lambda n: -change(found[earlier[0]], found[n], "held_out").mean)[
            :1
        ]
        for start in dict.fromkeys(
            earlier[:1] + best
        ):  # a held-out reward may rise before it falls
            reward, holdout = (
                change(found[start], found[step], value) for value in ("reward", "held_out")
            )
            if min(reward.count, holdout.count) < FEWEST:
                raise RunError(f"that takes {FEWEST} clips in each validation")
            if reward.sign > 0 > holdout.sign:
                ends = [(c.mean, c.mean - c.half, c.mean + c.half) for c in (reward, holdout)]
                shown = [
                    f"{mean:+.3g} (95 % interval {low:+.3g} to {high:+.3g})"
                    for mean, low, high in ends
                ]
                changes = (
                    f"the trained reward changed by {shown[0]} and the held-out one by {shown[1]}"
                )
                remedy = "look at the clips, go back to an earlier checkpoint, change reward_weights or the KL"
                return f"reward hacking: from iteration {start} to {step} {changes}; {remedy}"
    except RunError as error:  # such as a listing that a crash has cut short; training must go on
        print(f"note: not checked for reward hacking: {error}", file=sys.stderr, flush=True)
    return ""


def enlarge(clip: Tensor, least: int) -> np.ndarray:
    """(F, H, W, 3) array, magnified by an integer so that the shorter side has at least `least` pixels."""
    frames = clip.cpu().numpy()
    factor = max(1, -(-least // min(frames.shape[1:3])))
    return frames.repeat(factor, 1).repeat(factor, 2)


def write_mp4(path: Path, clip: Tensor, fps: int) -> None:
    """Write near-lossless H.264. Tiny clips are magnified: players and chroma subsampling need some pixels."""
    frames = enlarge(clip, 256 if min(clip.shape[1:3]) < 128 else 1)
    imageio.mimwrite(
        path, frames, "FFMPEG", fps=fps, codec="libx264", quality=9, macro_block_size=2
    )
    if not path.is_file() or not path.stat().st_size:  # ffmpeg fails silently
        path.unlink(missing_ok=True)
        raise OSError(f"{path} could not be written; is the disk full?")


def read_mp4(path: Path) -> tuple[Tensor, float]:
    """Read a clip (F, H, W, 3) and its frames per second."""
    with naming(path), imageio.get_reader(path, format="FFMPEG") as reader:
        return torch.from_numpy(np.stack(list(reader.iter_data()))), float(
            reader.get_meta_data()["fps"]
        )


def thumbnails(clip: Tensor, columns: int = COLUMNS) -> np.ndarray:
    """Evenly spaced frames (columns, h, w, 3), magnified or shrunk to fit a sheet."""
    frames = enlarge(
        clip[torch.linspace(0, len(clip) - 1, min(columns, len(clip))).round().long()], FRAME[0]
    )
    factor = min(1.0, FRAME[1] / max(frames.shape[1:3]))
    size = (round(frames.shape[2] * factor), round(frames.shape[1] * factor))
    return np.stack([np.asarray(Image.fromarray(frame).resize(size)) for frame in frames])


def contact_sheet(path: Path, rows: Sequence[np.ndarray], labels: Sequence[str]) -> None:
    """Write one row of `thumbnails` per clip, under its label."""
    from matplotlib import (
        get_data_path,
    )  # for its font; a run needs it only where sheets are written

    font = ImageFont.truetype(f"{get_data_path()}/fonts/ttf/DejaVuSans.ttf", FONT_SIZE)
    width = max(len(row) * (row.shape[2] + GAP) for row in rows) - GAP
    heights = [row.shape[1] + LABEL_HEIGHT + MARGIN for row in rows]
    sheet = Image.new("RGB", (width + 2 * MARGIN, sum(heights) + MARGIN), "white")
    draw, top = ImageDraw.Draw(sheet), MARGIN
    for row, label, height in zip(rows, labels, heights, strict=True):
        draw.text((MARGIN, top), fitted(label, font, width), "#1f2933", font)
        for number, frame in enumerate(row):
            sheet.paste(
                Image.fromarray(frame),
                (MARGIN + number * (frame.shape[1] + GAP), top + LABEL_HEIGHT),
            )
        top += height
    try:
        sheet.save(path)
    except OSError:  # a partial image would pass for a complete one
        path.unlink(missing_ok=True)
        raise


def fitted(label: str, font: ImageFont.FreeTypeFont, width: int) -> str:
    """One printable line of text, cut to the width in pixels."""
    text = printable(label)
    while len(text) > 1 and font.getlength(text) > width:
        text = f"{text[:-2]}…"
    return text
