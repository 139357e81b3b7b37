"""What an audit of a reward measures: known edits of good clips must not raise it, and damage must lower it.

Every change is paired by clip, and verdicts come from 95 % intervals over clips. `scripts/audit_reward.py` audits with
all edits, and the doctor with a few.
"""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import imageio.v3 as imageio
import numpy as np
import torch
from torch import Generator, Tensor
from torch.nn.functional import avg_pool2d, interpolate

from sage_grpo.config.fields import Config
from sage_grpo.data.requests import Request
from sage_grpo.intervals import Interval, interval
from sage_grpo.rewards.base import Composite, Prompts
from sage_grpo.tools.paired import number
from sage_grpo.worlds.registry import drawn, world_of

TOTAL, WRONG_PROMPT, UNCLEAR = "total", "wrong prompt", "unclear"
NOISE = (
    0.25  # changes up to this share of a score's standard deviation over good clips count as noise
)
RULES = tomllib.loads(Path(__file__).with_name("templates").joinpath("audit.toml").read_text())
Scores = dict[str, dict[str, Tensor]]  # kind of clips -> score -> (N,)


def cropped(x: Tensor, _: Generator) -> Tensor:
    top, left = (max(1, round(0.03 * side)) for side in x.shape[2:])
    return interpolate(x[..., top:-top, left:-left], x.shape[2:], mode="bilinear")


def shaken(x: Tensor, generator: Generator) -> Tensor:
    shifts = (
        (0.04 * x.shape[2] * torch.randn(len(x), 2, generator=generator)).round().long().tolist()
    )
    return torch.stack([frame.roll(shift, (1, 2)) for frame, shift in zip(x, shifts, strict=True)])


def encoded(x: Tensor, _: Generator) -> Tensor:
    files = [
        imageio.imwrite("<bytes>", frame, extension=".jpg", quality=90)
        for frame in as_uint8(x).numpy()
    ]
    return torch.from_numpy(np.stack([imageio.imread(file) for file in files])).movedim(-1, 1) / 255


# what is done to a clip (F, 3, H, W) in [0, 1]; a good reward never scores the result higher
EDITS: dict[str, Callable[[Tensor, Generator], Tensor]] = {
    "noisy": lambda x, g: x + 0.3 * torch.randn(x.shape, generator=g),
    "shaky": shaken,
    "frozen": lambda x, _: x[:1].expand_as(x),
    "slowed": lambda x, _: x[torch.arange(len(x)) // 2],
    "blurred": lambda x, _: interpolate(avg_pool2d(x, 3), x.shape[2:], mode="bilinear"),
    "reversed": lambda x, _: x.flip(0),
    "re-encoded": encoded,
    "brighter": lambda x, _: 1.2 * x,
    "cropped": cropped,
    "saturated": lambda x, _: x + 0.5 * (x - x.mean(1, keepdim=True)),
}


def as_uint8(x: Tensor) -> Tensor:
    return (x.movedim(1, -1).clamp(0, 1) * 255).round().to(torch.uint8)


def edited(clips: Sequence[Tensor], kind: str) -> list[Tensor]:
    """uint8 clips (F, H, W, 3) after an edit; the same clip at the same place gets the same noise."""
    seeds = (Generator().manual_seed(i) for i in range(len(clips)))
    return [
        as_uint8(EDITS[kind](clip.movedim(-1, 1) / 255, seed))
        for clip, seed in zip(clips, seeds, strict=True)
    ]


def drawn_clips(
    config: Config, prompts: Sequence[Request], count: int
) -> tuple[list[Tensor], list[Request]] | None:
    """uint8 clips that show exactly what their prompts say, if the model's world can render them."""
    if (world := world_of(config.pretrained_model_root)) is None:
        return None
    distinct = list({prompt.text: prompt for prompt in prompts}.values())[:count]
    return drawn(world, distinct, config.num_frames, config.height, config.width, config.seed)


def measure(
    reward: Composite,
    good: Sequence[Tensor],
    prompts: Prompts,
    fps: float,
    kinds: Mapping[str, Sequence[Tensor]],
) -> Scores:
    """Scores of the good clips, after the edits `kinds` (made here where empty), and with each other's prompts.

    The total comes first. There are no wrong prompts if all are equal. ValueError if the reward fails.
    """
    found, distinct = {}, list(dict.fromkeys(prompts))
    for kind in ("good", *kinds, *([WRONG_PROMPT] if len(distinct) > 1 else [])):
        clips = (kinds[kind] or edited(good, kind)) if kind in kinds else good
        step = int(kind == WRONG_PROMPT)
        scores = reward.score(
            clips, [distinct[(distinct.index(p) + step) % len(distinct)] for p in prompts], fps
        )
        if scores.errors:
            raise ValueError(f"it fails on {kind} clips: {scores.errors[0]}")
        found[kind] = {TOTAL: scores.total} | scores.named
    return found


@dataclass(frozen=True)
class Verdict:
    """How an edit changes a score, and whether it may. If the interval does not decide, the verdict is unclear."""

    score: str
    edit: str
    change: Interval
    noise: float  # changes up to this size count as noise
    must_fall: bool

    @property
    def sentence(self) -> str:
        return (
            f"{self.score} {'does not fall' if self.must_fall else 'rises'} for {self.edit} clips"
        )

    @property
    def mark(self) -> str:
        """In capitals if it is wrong. A single score that rises is only weak: training maximizes the total."""
        low, high = self.change.mean - self.change.half, self.change.mean + self.change.half
        if high < 0:
            return "falls"
        if self.must_fall:
            return "MUST FALL" if low >= -self.noise else UNCLEAR
        if low > self.noise:
            return "RISES" if self.score == TOTAL else "rises"
        return "same" if high <= self.noise else UNCLEAR

    def __str__(self) -> str:
        return f"{number(self.change.mean, sign='+')} ± {number(self.change.half)}"


def give_verdicts(found: Scores, drawn: bool) -> list[Verdict]:
    """A verdict on each edit and score. `drawn`: the clips are of a world."""
    must, verdicts = RULES["must_fall"] | (RULES["drawn_must_fall"] if drawn else {}), []
    for kind in (kind for kind in found if kind != "good"):
        for name, good in found["good"].items():
            change, noise = (
                interval((found[kind][name] - good).tolist()),
                NOISE * good.std(correction=0).item(),
            )
            verdicts.append(
                Verdict(name, kind, change, noise, name.rpartition(".")[2] in must.get(kind, ()))
            )
    return verdicts


def conclude(found: Scores, verdicts: Sequence[Verdict]) -> dict[str, list[str]]:
    """Sentences about what is wrong, what is only weak, and what too few clips leave open."""
    said = RULES["sentences"]
    wrong = [
        f"{said.get(f'{v.score} {v.edit}', v.sentence)} ({v})" for v in verdicts if v.mark.isupper()
    ]
    totals = torch.cat([scores[TOTAL] for scores in found.values()])
    if torch.allclose(totals, totals[:1]):
        wrong = [said["constant"]]
    weak = [f"{v.sentence} ({v})" for v in verdicts if v.mark == "rises"]
    for kind in (kind for kind in RULES["visible"] if kind in found):
        falls = [v for v in verdicts if v.edit == kind and v.score != TOTAL and v.mark == "falls"]
        if not any(-v.change.mean >= v.noise / NOISE for v in falls):
            how = "hardly notices" if falls else "does not notice"
            weak.append(
                f"{how} {kind} clips: no score falls by its standard deviation over good clips"
            )
    left = [v for v in verdicts if v.mark == UNCLEAR and (v.must_fall or v.score == TOTAL)]
    return {"wrong": wrong, "weak": weak, "unclear": [f"{v.score} of {v.edit} clips" for v in left]}
