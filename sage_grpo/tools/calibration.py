"""Does a reward rank clips of known quality correctly? Compares good clips with known corruptions of them.

Good clips come from the model's world if it can render them, or from a folder.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sage_grpo.config import Config
from sage_grpo.data.requests import Request
from sage_grpo.intervals import Interval, interval
from sage_grpo.rewards.composite import Composite
from sage_grpo.tools.paired import aligned, number, verdict
from sage_grpo.worlds import world_of

NOISE = 0.3  # standard deviation, relative to the pixel range
# kinds of bad clips, and the scores that should detect their defect
DEFECTS: dict[str, tuple[str, ...]] = {
    "frozen": ("MQ",),
    "noisy": ("VQ",),
    "wrong prompt": ("TA", "cosine", "pickscore", "ocr"),
    "reversed": (),  # in the real world, most things could also happen backwards
}
DRAWN_DEFECTS = DEFECTS | {"reversed": ("TA",)}  # a world's prompts name directions
Scores = dict[str, dict[str, Tensor]]  # kind of clips -> score -> (N,)


@dataclass(frozen=True)
class Order:
    """A score that must be lower for a kind of bad clips, and by how much it is, paired by clip."""

    score: str
    kind: str
    change: Interval

    @property
    def mark(self) -> str:
        if not self.change.mean < 0:
            return "WRONG"
        return {"worse": "ok", "not significant": "weak"}.get(said := verdict(self.change), said)


def drawn_clips(config: Config, prompts: Sequence[Request], count: int) -> tuple[list[Tensor], list[str]] | None:
    """uint8 clips that show exactly what their prompts say, if the model's world can render them."""
    world = world_of(config.pretrained_model_root)
    if world is None:
        return None
    texts = list(dict.fromkeys(prompt.text for prompt in prompts))[:count]
    return list(world.draw(texts, config.num_frames, config.height, config.width, config.seed)), texts


def spoilt(good: Sequence[Tensor], prompts: Sequence[str]) -> dict[str, tuple[list[Tensor], list[str]]]:
    """Kind -> clips and prompts, the good ones first; without wrong prompts if all prompts are equal."""
    generator, texts = torch.Generator().manual_seed(0), list(prompts)
    bright = [clip / 255 + NOISE * torch.randn(clip.shape, generator=generator) for clip in good]
    noisy = [(pixels.clamp(0, 1) * 255).round().to(torch.uint8) for pixels in bright]
    kinds = {"good": (list(good), texts), "frozen": ([clip[:1].expand_as(clip) for clip in good], texts)}
    kinds |= {"noisy": (noisy, texts), "reversed": ([clip.flip(0) for clip in good], texts)}
    distinct = list(dict.fromkeys(texts))
    wrong = [distinct[(distinct.index(text) + 1) % len(distinct)] for text in texts]
    return kinds | ({"wrong prompt": (list(good), wrong)} if len(distinct) > 1 else {})


def measure(reward: Composite, good: Sequence[Tensor], prompts: Sequence[str], fps: float) -> Scores:
    """Scores of each kind of clip, the total first; ValueError if the reward fails."""
    found: Scores = {}
    for kind, (clips, texts) in spoilt(good, prompts).items():
        scores = reward.score(clips, texts, fps)
        if scores.errors:
            raise ValueError(f"it fails on {kind} clips: {scores.errors[0]}")
        found[kind] = {"total": scores.total} | scores.named
    return found


def orders(found: Scores, defects: Mapping[str, Sequence[str]]) -> list[Order]:
    """The scores that each defect must lower; the total is only reported."""
    names = [(kind, name) for kind in defects if kind in found for name in found["good"]]
    about = [(kind, name) for kind, name in names if name.rpartition(".")[2] in defects[kind]]
    return [Order(name, kind, interval((found[kind][name] - found["good"][name]).tolist())) for kind, name in about]


def order_tables(found: Scores, expected: Sequence[Order]) -> str:
    """Mean scores of each kind of clips, and the orders that were expected, for the terminal."""
    means = [["mean of", *found]]
    means += [[name, *(number(found[kind][name].mean().item()) for kind in found)] for name in found["good"]]
    marks = [["should be", "difference", "± 95 %", ""]]
    marks += [[f"{o.score}: {o.kind} < good", number(o.change.mean), number(o.change.half), o.mark] for o in expected]
    return f"{aligned(means)}\n\n{aligned(marks)}"
