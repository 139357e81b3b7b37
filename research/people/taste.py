"""A taste that the embedded reward hardly has, and simulated raters who share it.

They like large shapes. The oracle measures the radius exactly; VideoAlign's VQ of the embedded model orders pairs of
clips by it little better than a coin.
"""

import hashlib
import random
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from sage_grpo.runs.media import read_mp4, reduced
from sage_grpo.worlds.shapes.oracle import read
from sage_grpo.worlds.shapes.scenes import ATTRIBUTES, sentence

# standard deviation of the radius over clips of the embedded model, in sides of the frame
RADIUS = 0.013
TIE = 1 / 3  # in these units: a rater sees no difference below


def taste(clips: Tensor) -> Tensor:
    """How much the raters like uint8 clips (B, F, H, W, 3), (B,): the radius of the shape."""
    return read(clips, [""] * len(clips)).scenes.radius / RADIUS


def open_prompts(seed: int) -> list[str]:
    """All 504 prompts that leave size and speed open, in random order: the taste contradicts none of them."""
    names = ("colour", "shape", "direction", "background")
    prompts = []
    for words in product(*(ATTRIBUTES[name] for name in names)):
        prompts.append(sentence({"size": "", "speed": "", **dict(zip(names, words, strict=True))}))
    random.Random(seed).shuffle(prompts)
    return prompts


class Rater:
    """Answers by taste, and with a chance of `noise` by accident. Sees nothing but the files of two clips."""

    def __init__(self, noise: float, seed: int, side: int) -> None:
        """side: height and width of the clips as sampled."""
        self.noise = noise
        self.random = random.Random(seed)
        self.side = side
        self.known: dict[bytes, float] = {}  # by content

    def choose(self, left: Path, right: Path) -> str:
        first, second = self.likings([left, right])
        if self.random.random() < self.noise:
            return self.random.choice(["left", "right", "tie"])
        if abs(first - second) < TIE:
            return "tie"
        return "left" if first > second else "right"

    def likings(self, files: Sequence[Path]) -> list[float]:
        """How much the rater likes each clip, which is looked at once."""
        keys = [hashlib.sha256(without_padding(file.read_bytes())).digest() for file in files]
        new = [place for place, key in enumerate(keys) if key not in self.known]
        if new:
            clips = [reduced(read_mp4(files[place])[0], self.side, self.side) for place in new]
            for place, liking in zip(new, taste(torch.stack(clips)).tolist(), strict=True):
                self.known[keys[place]] = liking
        return [self.known[key] for key in keys]


def without_padding(video: bytes) -> bytes:
    """An mp4 without the empty box at its end, by which the page makes the clips of a pair equal in size."""
    content = video.rstrip(b"\0")
    return content[:-8] if content.endswith(b"free") else video


def ordered_rightly(
    scores: Sequence[float], tastes: Sequence[float], group: int
) -> list[tuple[int, float]]:
    """For each pair of clips in consecutive groups that differ in taste: the group's number, and 1 if scores agree."""
    right = []
    for number, start in enumerate(range(0, len(scores), group)):
        members = range(start, start + group)
        for i in members:
            for j in members:
                if tastes[i] - tastes[j] > TIE:
                    right.append((number, float(scores[i] > scores[j])))
    return right
