"""A taste that the embedded reward does not have, and simulated raters who share it.

They like large shapes in the middle of the frame. The oracle measures both exactly. VideoAlign's VQ of the embedded
model has no opinion about either: it orders clips that differ in this taste no better than a coin.
"""

import hashlib
import random
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from sage_grpo.runs.media import read_mp4
from sage_grpo.tools.prefer.learn import reduced
from sage_grpo.worlds.shapes.oracle import read
from sage_grpo.worlds.shapes.scenes import ATTRIBUTES, sentence

# standard deviations over clips of the embedded model
RADIUS = 0.018  # of the radius
OFFSET = 0.10  # of the distance between the path's center and the frame's
TIE = 1.5  # a rater sees no difference below


def taste(clips: Tensor) -> Tensor:
    """How much the raters like uint8 clips (B, F, H, W, 3), (B,): size minus distance from the middle."""
    scenes = read(clips, [""] * len(clips)).scenes
    offset = torch.hypot(scenes.x - 0.5, scenes.y - 0.5)
    return scenes.radius / RADIUS - offset / OFFSET


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
        difference = self.liking(left) - self.liking(right)
        if self.random.random() < self.noise:
            return self.random.choice(["left", "right", "tie"])
        if abs(difference) < TIE:
            return "tie"
        return "left" if difference > 0 else "right"

    def liking(self, file: Path) -> float:
        clip = reduced(read_mp4(file)[0], self.side, self.side)
        key = hashlib.sha256(clip.numpy().tobytes()).digest()
        if key not in self.known:
            self.known[key] = taste(clip[None]).item()
        return self.known[key]


def ordered_rightly(scores: Sequence[float], tastes: Sequence[float], group: int) -> list[float]:
    """For each pair of clips in consecutive groups that differ in taste: 1 if the scores order it like the taste."""
    right = []
    for start in range(0, len(scores), group):
        members = range(start, start + group)
        for i in members:
            for j in members:
                difference = tastes[i] - tastes[j]
                if difference > TIE:
                    right.append(float(scores[i] > scores[j]))
    return right
