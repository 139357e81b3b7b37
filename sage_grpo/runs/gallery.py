"""Rollouts to look at: of each logged iteration the best and the worst clip of one group, as small videos.

RUN/rollouts/step-000010/clips.json      two records, best and worst, like those of a validation
RUN/rollouts/step-000010/best.mp4, worst.mp4

Looking at clips is how people notice that a reward is being hacked. At most `most` iterations are kept.
"""

import json
import math
import re
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sage_grpo.background import Work
from sage_grpo.runs.clips import LISTING, Clip, Record, read_clips
from sage_grpo.runs.history import RunError
from sage_grpo.runs.media import write_mp4

FOLDER = "rollouts"
FILES = ("best.mp4", "worst.mp4")
MAX_FRAMES = 49
MAX_SIDE = 320  # pixels
CRF = 20  # of x264: small files
MAX_WAIT = 20.0  # seconds for the last pair, when a run ends


def extremes(totals: Sequence[float], groups: Sequence[Any]) -> tuple[int, int] | None:
    """Positions of the best and the worst clip of the group whose rewards differ most; None if none differ.

    totals: reward of each clip, NaN where it failed. groups: what the clips of a group have in common.
    """
    widest = 0.0
    chosen = None
    for group in dict.fromkeys(groups):
        members = [
            position
            for position, of_clip in enumerate(groups)
            if of_clip == group and math.isfinite(totals[position])
        ]
        if not members:
            continue
        best = max(members, key=totals.__getitem__)
        worst = min(members, key=totals.__getitem__)
        if totals[best] - totals[worst] > widest:
            widest = totals[best] - totals[worst]
            chosen = best, worst
    return chosen


class Gallery:
    """Writes pairs in the background, one at a time; a pair that arrives while another is being written is dropped."""

    def __init__(self, run: Path, most: int) -> None:
        self.folder = run / FOLDER
        self.most = most
        self.work: Work | None = None

    def keep(self, step: int, clips: Sequence[Tensor], records: Sequence[Record], fps: int) -> None:
        """Keep the best and the worst clip, uint8 (F, H, W, 3); raises the error of the previous pair, if any."""
        if self.work is not None:
            if not self.work.done():
                return
            self.work.result()
        self.work = Work(lambda _: self.write(step, clips, records, fps))

    def write(
        self, step: int, clips: Sequence[Tensor], records: Sequence[Record], fps: int
    ) -> None:
        """Write a pair; its listing is written last, so that readers never see half a pair."""
        folder = self.folder / f"step-{step:06d}"
        folder.mkdir(parents=True, exist_ok=True)
        for file, clip in zip(FILES, clips, strict=True):
            frames, kept_fps = small(clip, fps)
            write_mp4(folder / file, frames, kept_fps, CRF)
        listed = [record | {"file": file} for file, record in zip(FILES, records, strict=True)]
        (folder / LISTING).write_text(json.dumps(listed, indent=1) + "\n")
        self.thin_out()

    def thin_out(self) -> None:
        """While there are more than `most` pairs, remove the one whose neighbors are closest to each other.

        The others stay spread over the run; the first and the newest are never removed.
        """
        folders = step_folders(self.folder)
        steps = sorted(folders)
        while len(steps) > max(self.most, 2):
            inner = range(1, len(steps) - 1)
            crowded = min(inner, key=lambda i: steps[i + 1] - steps[i - 1])
            shutil.rmtree(folders[steps.pop(crowded)])

    def finish(self) -> None:
        """Wait for the pair that is being written."""
        if self.work is not None:
            wait([self.work], MAX_WAIT)


def small(clip: Tensor, fps: int) -> tuple[Tensor, int]:
    """A clip (F, H, W, 3) with at most MAX_FRAMES frames and MAX_SIDE pixels on its longer side, and its fps."""
    stride = math.ceil(len(clip) / MAX_FRAMES)
    frames = clip[::stride].cpu()
    factor = MAX_SIDE / max(clip.shape[1:3])
    if factor < 1:
        # H.264 needs even sizes
        size = [max(2, round(side * factor / 2) * 2) for side in clip.shape[1:3]]
        shrunk = torch.nn.functional.interpolate(
            frames.movedim(-1, 1).float(), size=size, mode="area"
        )
        frames = shrunk.round().clamp(0, 255).to(torch.uint8).movedim(1, -1)
    return frames, max(1, round(fps / stride))


def record_of(prompt: str, sample: int, scores: Mapping[str, float]) -> Record:
    """The record of a clip; the number of the clip in its group takes the place of a seed."""
    known = {name: value if math.isfinite(value) else None for name, value in scores.items()}
    return {"prompt": prompt, "seed": sample, "scores": known}


# reading


def step_folders(folder: Path) -> dict[int, Path]:
    """The folders of iterations, by iteration; links are left out."""
    return {
        int(path.name.removeprefix("step-")): path
        for path in folder.glob("step-*")
        if re.fullmatch(r"step-\d{1,16}", path.name) and path.is_dir() and not path.is_symlink()
    }


def read_gallery(run: Path, last: float = math.inf) -> dict[int, tuple[Clip, Clip]]:
    """The best and the worst clip by iteration, in order; pairs that are incomplete or damaged are left out.

    last: the run's present iteration; a resume from before has made pairs of later ones void.
    """
    pairs = {}
    for step, folder in sorted(step_folders(run / FOLDER).items()):
        if step > last:
            continue
        try:
            clips = read_clips(folder)
        except (RunError, OSError):
            continue
        if len(clips) == len(FILES) and all(clip.path.is_file() for clip in clips):
            best, worst = clips
            pairs[step] = (best, worst)
    return pairs
