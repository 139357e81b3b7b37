"""What an audit of a reward measures: known edits of good clips must not raise it, and damage must lower it.

Every change is paired by clip, and verdicts come from 95 % intervals over clips. `scripts/audit_reward.py` audits with
all edits, and the doctor with a few.
"""

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
from sage_grpo.rewards.base import Composite, Requests
from sage_grpo.tools.paired import aligned, number
from sage_grpo.worlds.registry import drawn, world_of

GOOD = "good"
WRONG_PROMPT = "wrong prompt"
TOTAL = "total"

# changes up to this share of a score's standard deviation over good clips count as noise
NOISE = 0.25
SHORT = ("noisy", "frozen", "reversed")  # the doctor's edits
VISIBLE = ("slowed", "blurred")  # a reward that does not notice these is weak
# edit -> scores that must fall
MUST_FALL = {
    "noisy": ("VQ",),
    "shaky": ("MQ",),
    "frozen": ("MQ",),
    WRONG_PROMPT: ("TA", "cosine", "pickscore", "ocr"),  # they claim to read the prompt
}
# for clips drawn by a world, whose prompts name directions; real things could also happen backwards
MUST_FALL_IF_DRAWN = MUST_FALL | {"reversed": ("TA",)}

BLIND = (
    "prompt-blind: the total is the same with wrong prompts, so training may forget what is asked; "
    "if it is meant to judge the clip alone, hold out or add a reward that reads the prompt"
)
PAYS = "this reward pays for {} clips: hold it out, or combine it with another"
DAMAGE = ("noisy", "shaky", "frozen", "blurred", WRONG_PROMPT)
FLIPPED = "flipped: damage raises the total and none lowers it, as if its sign were wrong"

Scores = dict[str, dict[str, Tensor]]  # kind of clips -> score -> (N,)


# edits


def cropped(x: Tensor, _: Generator) -> Tensor:
    height, width = x.shape[2:]
    top = max(1, round(0.03 * height))
    left = max(1, round(0.03 * width))
    return interpolate(x[..., top:-top, left:-left], x.shape[2:], mode="bilinear")


def shaken(x: Tensor, generator: Generator) -> Tensor:
    offsets = 0.04 * x.shape[2] * torch.randn(len(x), 2, generator=generator)
    shifts = offsets.round().long().tolist()
    return torch.stack([frame.roll(shift, (1, 2)) for frame, shift in zip(x, shifts, strict=True)])


def encoded(x: Tensor, _: Generator) -> Tensor:
    """Through JPEG and back."""
    frames = []
    for frame in as_uint8(x).numpy():
        file = imageio.imwrite("<bytes>", frame, extension=".jpg", quality=90)
        frames.append(imageio.imread(file))
    return torch.from_numpy(np.stack(frames)).movedim(-1, 1) / 255


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
    """(F, 3, H, W) in [0, 1] -> uint8 (F, H, W, 3)."""
    return (x.movedim(1, -1).clamp(0, 1) * 255).round().to(torch.uint8)


def edited(clips: Sequence[Tensor], kind: str) -> list[Tensor]:
    """uint8 clips (F, H, W, 3) after an edit; the same clip at the same place gets the same noise."""
    results = []
    for seed, clip in enumerate(clips):
        x = clip.movedim(-1, 1) / 255
        results.append(as_uint8(EDITS[kind](x, Generator().manual_seed(seed))))
    return results


# measurement


def drawn_clips(
    config: Config, requests: Sequence[Request], count: int
) -> tuple[list[Tensor], list[Request]] | None:
    """uint8 clips that show exactly what their prompts say, if the model's world can render them."""
    world = world_of(config.pretrained_model_root)
    if world is None:
        return None
    distinct = list({request.text: request for request in requests}.values())[:count]
    return drawn(world, distinct, config.num_frames, config.height, config.width, config.seed)


def measure(
    reward: Composite,
    good: Sequence[Tensor],
    requests: Requests,
    fps: float,
    kinds: Mapping[str, Sequence[Tensor]],
) -> Scores:
    """Scores of the good clips, after the edits `kinds` (made here where empty), and with each other's prompts.

    The total comes first. There are no wrong prompts if all are equal. ValueError if the reward fails.
    """

    def score(kind: str, clips: Sequence[Tensor], requests: Requests) -> dict[str, Tensor]:
        scores = reward.score(clips, requests, fps)
        if scores.errors:
            raise ValueError(f"it fails on {kind} clips: {scores.errors[0]}")
        return {TOTAL: scores.total} | scores.named

    scores = {GOOD: score(GOOD, good, requests)}
    for kind, clips in kinds.items():
        scores[kind] = score(kind, clips or edited(good, kind), requests)

    distinct = list(dict.fromkeys(requests))
    if len(distinct) > 1:
        following = dict(zip(distinct, distinct[1:] + distinct[:1], strict=True))
        others_requests = [following[request] for request in requests]
        scores[WRONG_PROMPT] = score(WRONG_PROMPT, good, others_requests)
    return scores


# verdicts


@dataclass(frozen=True)
class Verdict:
    """How an edit changes a score, and whether it may. If the interval does not decide, the verdict is unclear."""

    score: str
    edit: str
    change: Interval
    noise: float  # changes up to this size count as noise
    must_fall: bool

    @property
    def mark(self) -> str:
        """In capitals if it is wrong. A single score that rises is only weak: training maximizes the total."""
        low = self.change.mean - self.change.half
        high = self.change.mean + self.change.half
        if high < 0:
            return "falls"
        if self.must_fall:
            return "MUST FALL" if low >= -self.noise else "unclear"
        if low > self.noise:
            return "RISES" if self.score == TOTAL else "rises"
        return "same" if high <= self.noise else "unclear"

    @property
    def is_wrong(self) -> bool:
        return self.mark in ("MUST FALL", "RISES")

    @property
    def is_blind(self) -> bool:
        """Whether the total ignores the prompt, which is a fault, or intended, as in aesthetic rewards."""
        return self.score == TOTAL and self.edit == WRONG_PROMPT and self.mark == "same"

    @property
    def sentence(self) -> str:
        verb = "does not fall" if self.must_fall else "rises"
        return f"{self.score} {verb} for {self.edit} clips"

    def __str__(self) -> str:
        return f"{number(self.change.mean, sign='+')} ± {number(self.change.half)}"


def give_verdicts(scores: Scores, drawn: bool) -> list[Verdict]:
    """A verdict on each edit and score. `drawn`: the clips are rendered by a world."""
    must_fall = MUST_FALL_IF_DRAWN if drawn else MUST_FALL
    verdicts = []
    for kind, edited_scores in scores.items():
        if kind == GOOD:
            continue
        for name, good in scores[GOOD].items():
            short_name = name.rpartition(".")[2]  # without the name of its reward
            verdict = Verdict(
                score=name,
                edit=kind,
                change=interval((edited_scores[name] - good).tolist()),
                noise=NOISE * good.std(correction=0).item(),
                must_fall=short_name in must_fall.get(kind, ()),
            )
            verdicts.append(verdict)
    return verdicts


def conclude(
    scores: Scores, verdicts: Sequence[Verdict], as_part: bool = False
) -> dict[str, list[str]]:
    """Sentences about what is wrong, what may be intended, what is only weak, and what too few clips leave unclear.

    as_part: the reward may be one of several, or held out, so it may pay for damage that none of its scores is about.
    """
    flipped = is_flipped(verdicts)
    judged = {v.edit for v in verdicts if v.must_fall} | {WRONG_PROMPT}
    allowed = [v for v in verdicts if v.is_wrong and v.edit not in judged]
    if flipped or not as_part:
        allowed = []
    wrong = [f"{_wrong_sentence(v)} ({v})" for v in verdicts if v.is_wrong and v not in allowed]
    warnings = [f"{BLIND} ({v})" for v in verdicts if v.is_blind]
    warnings += [f"{PAYS.format(v.edit)} ({v})" for v in allowed]
    if flipped:
        wrong.insert(0, FLIPPED)
    totals = torch.cat([by_name[TOTAL] for by_name in scores.values()])
    if torch.allclose(totals, totals[:1]):
        wrong = [
            "constant: every clip gets the same total, even after edits, so there is nothing to learn"
        ]
        warnings = []

    weak = [f"{v.sentence} ({v})" for v in verdicts if v.mark == "rises"]
    for kind in VISIBLE:
        if kind not in scores:
            continue
        of_scores = [v for v in verdicts if v.edit == kind and v.score != TOTAL]
        falls = [v for v in of_scores if v.mark == "falls"]
        if not any(-v.change.mean >= v.noise / NOISE for v in falls):
            how = "hardly notices" if falls else "does not notice"
            weak.append(
                f"{how} {kind} clips: no score falls by its standard deviation over good clips"
            )

    unclear = [
        f"{v.score} of {v.edit} clips"
        for v in verdicts
        if v.mark == "unclear" and (v.must_fall or v.score == TOTAL)
    ]
    return {"wrong": wrong, "warnings": warnings, "weak": weak, "unclear": unclear}


def is_flipped(verdicts: Sequence[Verdict]) -> bool:
    """Whether several kinds of damage raise the total and none lowers it."""
    marks = [v.mark for v in verdicts if v.score == TOTAL and v.edit in DAMAGE]
    return marks.count("RISES") > 1 and "falls" not in marks


def _wrong_sentence(verdict: Verdict) -> str:
    """What the worst faults lead to; for other faults, the fault itself."""
    if verdict.score == TOTAL and verdict.edit == WRONG_PROMPT:
        return "prefers wrong prompts: the total rises with them"
    if verdict.score == TOTAL and verdict.edit == "frozen":
        return "prefers frozen clips: their total rises, so training will stop the motion"
    return verdict.sentence


# text


def audit_table(scores: Scores, verdicts: Sequence[Verdict]) -> str:
    """Mean and standard deviation over good clips, then changes with 95 % intervals and verdicts."""
    good = scores[GOOD]
    rows = [[f"{len(good[TOTAL])} clips", *good]]
    cells = [
        f"{number(values.mean().item())} (std {number(values.std(correction=0).item())})"
        for values in good.values()
    ]
    rows.append([GOOD, *cells])
    for kind in scores:
        if kind != GOOD:
            rows.append([kind, *(f"{v} {v.mark}" for v in verdicts if v.edit == kind)])
    return aligned(rows)


def audit_summary(
    scores: Scores,
    verdicts: Sequence[Verdict],
    conclusions: Mapping[str, Sequence[str]],
    output: Path,
) -> str:
    """What an audit prints; `output` is the folder of its files."""
    lines = [
        audit_table(scores, verdicts),
        "",
        "Changes are means over clips with 95 % intervals. MUST FALL and RISES are wrong; "
        "unclear: too few clips to tell.",
    ]
    lines += [f"WRONG: {text}" for text in conclusions["wrong"]]
    lines += [f"warning: {text}" for text in conclusions["warnings"]]
    lines += [f"weak: {text}" for text in conclusions["weak"]]
    if conclusions["unclear"]:
        lines.append(f"too few clips to tell: {', '.join(conclusions['unclear'])}")

    if conclusions["wrong"]:
        verdict = "Not fit for training."
    elif conclusions["unclear"]:
        verdict = "Nothing is wrong, but not everything could be decided."
    elif conclusions["warnings"]:
        verdict = "Fit for training, if it is meant to ignore the prompt."
    else:
        verdict = "Fit for training."
    lines.append(f"{verdict} See {output}/audit.json and sheet.png.")
    return "\n".join(lines)
