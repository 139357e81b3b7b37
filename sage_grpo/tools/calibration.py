"""Does a reward rank clips of known quality as it should? Good ones against the same clips, spoilt in known ways.

Good clips come from the model's world where it can draw them, or from a folder of one's own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sage_grpo.config import Config
from sage_grpo.intervals import Interval, interval
from sage_grpo.rewards.composite import Composite
from sage_grpo.tools.paired import aligned, number
from sage_grpo.worlds import world_of
from sage_grpo.worlds.damage import add_noise
from sage_grpo.worlds.shapes import render, scenes_from_prompt

NOISE = 0.3  # standard deviation, of the range of a pixel
# kinds of bad clips, and the scores that are about their defect
DEFECTS: dict[str, tuple[str, ...]] = {
    "frozen": ("MQ",),
    "noisy": ("VQ",),
    "wrong prompt": ("TA", "cosine", "pickscore", "ocr"),
    "reversed": (),  # of the real world, most things may as well happen backwards
}
DRAWN_DEFECTS = DEFECTS | {"reversed": ("TA",)}  # prompts of a world name directions
Scores = dict[str, dict[str, Tensor]]  # kind of clips -> score -> (N,)


@dataclass(frozen=True)
class Order:
    """A score that must be lower for a kind of bad clips, and by how much it is, clip by clip."""

    score: str
    kind: str
    change: Interval

    @property
    def mark(self) -> str:
        if not self.change.mean < 0:
            return "WRONG"
        return "ok" if self.change.sign < 0 else "weak"


def drawn_clips(config: Config, prompts: Sequence[str], count: int) -> tuple[list[Tensor], list[str]] | None:
    """uint8 clips that show exactly what their prompts say, where the model's world can draw them."""
    if world_of(Path(config.pretrained_model_root)) is None:
        return None
    texts = list(dict.fromkeys(prompts))[:count]
    scenes = scenes_from_prompt(texts, torch.Generator().manual_seed(config.seed))
    return list((render(scenes, config.num_frames, config.height, config.width) * 255).round().to(torch.uint8)), texts


def spoilt(good: Sequence[Tensor], prompts: Sequence[str]) -> dict[str, tuple[list[Tensor], list[str]]]:
    """Kind -> clips and prompts, the good ones first; no prompt is wrong where all are equal."""
    generator, texts = torch.Generator().manual_seed(0), list(prompts)
    noisy = [(add_noise(clip[None] / 255, NOISE, generator)[0] * 255).round().to(torch.uint8) for clip in good]
    kinds = {"good": (list(good), texts), "frozen": ([clip[:1].expand_as(clip) for clip in good], texts)}
    kinds |= {"noisy": (noisy, texts), "reversed": ([clip.flip(0) for clip in good], texts)}
    distinct = list(dict.fromkeys(texts))
    wrong = [distinct[(distinct.index(text) + 1) % len(distinct)] for text in texts]
    return kinds | ({"wrong prompt": (list(good), wrong)} if len(distinct) > 1 else {})


def measure(reward: Composite, good: Sequence[Tensor], prompts: Sequence[str], fps: float) -> Scores:
    """Scores of each kind of clips, the total first; ValueError where the reward fails."""
    found: Scores = {}
    for kind, (clips, texts) in spoilt(good, prompts).items():
        scores = reward.score(clips, texts, fps)
        if scores.errors:
            raise ValueError(f"it fails on {kind} clips: {scores.errors[0]}")
        found[kind] = {"total": scores.total} | scores.named
    return found


def orders(found: Scores, defects: Mapping[str, Sequence[str]]) -> list[Order]:
    """What each defect must lower; the total only for people to see."""
    names = [(kind, name) for kind in defects if kind in found for name in found["good"]]
    about = [(kind, name) for kind, name in names if name.rpartition(".")[2] in defects[kind]]
    return [Order(name, kind, interval((found[kind][name] - found["good"][name]).tolist())) for kind, name in about]


def means_table(found: Scores) -> str:
    rows = [["mean of", *found]]
    rows += [[name, *(number(found[kind][name].mean().item()) for kind in found)] for name in found["good"]]
    return aligned(rows)


def orders_table(found: Sequence[Order]) -> str:
    rows = [["should be", "difference", "+-", ""]]
    rows += [[f"{o.score}: {o.kind} < good", number(o.change.mean), number(o.change.half), o.mark] for o in found]
    return aligned(rows)
