"""Pairs of clips with a prompt and what an annotator says about them: which is better in VQ, MQ and TA, or a tie.

An annotator sees each difference with an error, and calls a small one a tie. `learn.py` fits the reward to these labels
with the loss of VideoAlign: Bradley-Terry with ties.

Shapes: P pairs, N clips of the pool.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from research.tiny.videoreward.pool import Pool
from sage_grpo.worlds.shapes.scenes import ATTRIBUTES, OPTIONAL, sentence

SCORES = ("VQ", "MQ", "TA")
# of the annotators, for each score: standard deviation of their error, and the difference below which they see a tie
ERROR = (0.4, 0.4, 0.2)
TIE = (0.2, 0.2, 0.1)
KEPT = 0.8  # share of the optional attributes that a prompt names
# that a word of the prompt is taken from the first clip, the second, or at random
CHANCES = (0.4, 0.3, 0.3)


@dataclass(frozen=True)
class Pairs:
    """P comparisons."""

    clips: Tensor  # (P,2) indices into the pool
    prompts: list[str]
    truth: Tensor  # (P,3) first minus second, without the annotator's error
    labels: Tensor  # (P,3) 1: the first is better; -1: the second; 0: a tie


def draw_pairs(pool: Pool, count: int, seed: int) -> Pairs:
    """Random pairs: half of them any two clips of the pool, half two of one source, which are harder to tell apart."""
    generator = torch.Generator().manual_seed(seed)
    attributes = pool.attributes.cpu()
    source = pool.source.cpu()
    first = torch.randint(len(source), (count,), generator=generator)
    second = torch.randint(len(source), (count,), generator=generator)
    for kind in source.unique():  # sources are contiguous, but of different lengths
        members = (source == kind).nonzero()[:, 0]
        half = torch.rand(count, generator=generator) < 0.5
        alike = ((source[first] == kind) & half).nonzero()[:, 0]
        second[alike] = members[torch.randint(len(members), (len(alike),), generator=generator)]
    clips = torch.stack([first, second], 1)
    named = _prompts(attributes[clips], generator)
    is_named = named >= 0
    right = (attributes[clips] == named[:, None]).double() * is_named[:, None]
    alignment = right.sum(-1) / is_named.sum(-1, keepdim=True)
    vq, mq = pool.VQ.cpu()[clips], pool.MQ.cpu()[clips]
    scores = torch.stack([vq, mq, alignment.float()], -1)  # (P,2,3)
    truth = scores[:, 0] - scores[:, 1]
    seen = truth + torch.tensor(ERROR) * torch.randn(truth.shape, generator=generator)
    labels = seen.sign() * (seen.abs() > torch.tensor(TIE))
    return Pairs(clips, [_text(row) for row in named.tolist()], truth, labels)


def _prompts(attributes: Tensor, generator: torch.Generator) -> Tensor:
    """The classes that each pair's prompt names, (P,6), -1 for none; attributes: (P,2,6) of its clips."""
    count = len(attributes)
    columns = [
        torch.randint(len(words), (count,), generator=generator) for words in ATTRIBUTES.values()
    ]
    anything = torch.stack(columns, 1)
    choices = torch.cat([attributes, anything[:, None]], 1)  # (P,3,6)
    chances = torch.tensor(CHANCES).expand(count * len(ATTRIBUTES), -1)
    chosen = torch.multinomial(chances, 1, generator=generator).view(count, 1, -1)
    return _drop(choices.gather(1, chosen)[:, 0], generator)


def captions_of(pool: Pool, seed: int) -> list[str]:
    """What each clip shows, with some of the optional attributes left out."""
    generator = torch.Generator().manual_seed(seed)
    named = _drop(pool.attributes.cpu().clone(), generator)
    return [_text(row) for row in named.tolist()]


def _drop(named: Tensor, generator: torch.Generator) -> Tensor:
    """Leave out some of the optional attributes, in place."""
    for column, name in enumerate(ATTRIBUTES):
        if name in OPTIONAL:
            named[torch.rand(len(named), generator=generator) > KEPT, column] = -1
    return named


def _text(classes: Sequence[int]) -> str:
    """The prompt that names these classes, -1 for none."""
    named = {}
    for (name, words), i in zip(ATTRIBUTES.items(), classes, strict=True):
        named[name] = words[i] if i >= 0 else ""
    return sentence(named)


def accuracy(difference: Tensor, truth: Tensor, least: float = 0.0) -> float:
    """Share of the pairs, among those that truly differ by more than `least`, which the scores order rightly."""
    clear = truth.abs() > least
    return (difference.sign() == truth.sign())[clear].double().mean().item()
