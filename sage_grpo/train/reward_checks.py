"""Questions to a reward that cost a few calls: does it work at all, and does a clip's score depend on its call?"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sage_grpo.data.requests import Request
from sage_grpo.parallel.ranks import Ranks
from sage_grpo.rewards.base import Composite, Scores

NUM_TRIALS = 3  # made-up clips, all of which a broken reward fails to score
NUM_RESCORED = 8  # clips of each rank that are scored again

# what a clip scored, by score and in units of the total reward; None where scoring failed
ByScore = dict[str, float | None]
Rescored = dict[str, ByScore]  # by scoring: "together", "alone", "alone_again"


def trial_clip(frames: int, height: int, width: int, number: int) -> Tensor:
    """A colorful pattern that moves, uint8 (F, H, W, 3); each number gives another one."""
    row = torch.linspace(0, 1, height).view(-1, 1, 1)
    column = torch.linspace(0, 1, width).view(1, -1, 1)
    channel = torch.arange(3).view(1, 1, -1) / 3
    waves = torch.sin(2 * math.pi * ((number + 1) * column + row + channel))
    picture = (127.5 + 127.5 * waves).round().to(torch.uint8)
    return torch.stack([picture.roll(frame, 1) for frame in range(frames)])


def trial_error(
    reward: Composite, request: Request, shape: tuple[int, int, int], fps: float
) -> str:
    """Why a reward cannot score made-up clips (frames, height, width); empty if it can score one of them.

    Only calls that raise count: for a clip that shows nothing, a reward may well have no finite answer.
    """
    clips = [trial_clip(*shape, number) for number in range(NUM_TRIALS)]
    scores = reward.one_per_call().score(clips, [request] * NUM_TRIALS, fps)
    always_fails = scores.exceptions > 0 and not scores.total.isfinite().any()
    return scores.errors[0] if always_fails else ""


def rescored(
    reward: Composite, clips: Sequence[Tensor | None], requests: Sequence[Request], fps: float
) -> list[Rescored]:
    """Score the first few decoded clips again: in calls of several, one per call, and one per call in another order."""
    rows = [row for row, clip in enumerate(clips) if clip is not None][:NUM_RESCORED]
    last_first = rows[::-1]
    evens_first = rows[::2] + rows[1::2]
    scorings = {
        "together": (reward, last_first),
        "alone": (reward.one_per_call(), last_first),
        "alone_again": (reward.one_per_call(), evens_first),
    }

    by_row: dict[int, Rescored] = {row: {} for row in rows}
    for name, (scorer, order) in scorings.items():
        scores = scorer.score([clips[row] for row in order], [requests[row] for row in order], fps)
        for place, row in enumerate(order):
            by_row[row][name] = _weighted(scores, place)
    return list(by_row.values())


def _weighted(scores: Scores, row: int) -> ByScore:
    """The parts of a clip's total reward."""
    values = {}
    for name, weight in scores.weights.items():
        value = weight * scores.named[name][row].item()
        if weight:
            values[name] = value if math.isfinite(value) else None
    return values


def from_all_ranks(ranks: Ranks, rank_clips: Sequence[Rescored]) -> list[Rescored]:
    """The clips that all data-parallel ranks have scored again; all ranks must call."""
    texts = ranks.texts(json.dumps(rank_clips))
    return [clip for text in texts for clip in json.loads(text)]


def rescoring_record(clips: Sequence[Rescored]) -> dict[str, Any]:
    """What the diagnosis needs of clips that were scored again; NaN where nothing is known.

    Differences are standard deviations, in units of the total reward. Of several scores, the one that depends most on
    its call is reported.
    """
    record: dict[str, Any] = {
        "signal/rescoring": _difference(_totals(clips, "alone"), _totals(clips, "alone_again")),
        "signal/call_failures": _failures_alone(clips),
        "signal/call_difference": math.nan,
        "signal/call_sorted": math.nan,
    }
    names = dict.fromkeys(name for clip in clips for name in clip["together"])
    for name in names:
        together = _column(clips, "together", name)
        alone = _column(clips, "alone", name)
        known = np.isfinite(together) & np.isfinite(alone)
        difference = _difference(together[known], alone[known])
        if math.isnan(record["signal/call_difference"]) or difference > float(
            record["signal/call_difference"]
        ):
            record["signal/call_difference"] = difference
            # the same scores given to other clips differ, but not once both are sorted
            record["signal/call_sorted"] = _difference(
                np.sort(together[known]), np.sort(alone[known])
            )
            record["signal/call_score"] = name
    return record


def _column(clips: Sequence[Rescored], scoring: str, name: str) -> np.ndarray:
    """A score of all clips in one of the scorings, (N,); NaN where it failed."""
    return np.array([clip[scoring].get(name) for clip in clips], dtype=float)


def _totals(clips: Sequence[Mapping[str, ByScore]], scoring: str) -> np.ndarray:
    """Total rewards in one of the scorings, (N,); NaN where a score failed."""
    parts = [np.array(list(clip[scoring].values()), dtype=float) for clip in clips]
    return np.array([part.sum() for part in parts])


def _difference(first: np.ndarray, second: np.ndarray) -> float:
    """Standard deviation of a score between two scorings (N,) of the same clips; NaN if no clip has both."""
    squares = np.square(first - second) / 2
    squares = squares[np.isfinite(squares)]
    return math.sqrt(squares.mean()) if len(squares) else math.nan


def _failures_alone(clips: Sequence[Rescored]) -> float:
    """Share of the clips scored in a call of several that failed twice in a call of their own."""
    together = np.isfinite(_totals(clips, "together"))
    alone = np.isfinite(_totals(clips, "alone")) | np.isfinite(_totals(clips, "alone_again"))
    return float((together & ~alone).sum() / together.sum()) if together.any() else math.nan
