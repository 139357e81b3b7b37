"""What a reward is, how one is built from its name, and how several are combined into one number per clip.

Rewards receive clips in memory, never files; a failed reward is NaN, never a number. `REWARDS` in
`sage_grpo/rewards/registry.py` is the table of names.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from sage_grpo.background import within
from sage_grpo.data.requests import Request


class Reward(Protocol):
    names: tuple[str, ...]  # names of the scores it returns
    sees_requests = False  # whether it is given requests, with text and image, instead of prompts

    def check(self, prompts: Sequence[str]) -> None:
        """Reject prompts that cannot be scored, before anything is sampled for them; none, unless a reward does."""

    def score(
        self, clips: Sequence[Tensor], prompts: Sequence[str], fps: float
    ) -> dict[str, Tensor]:
        """Named scores, each (B,), higher is better, for uint8 clips (F, H, W, 3) with one prompt each."""


@dataclass(frozen=True)
class Setup:
    """Everything a reward may need at construction."""

    path: Path  # VideoAlign's folder; other rewards' weights are in sibling folders
    device: torch.device
    sample_fps: float = 2.0  # frames sampled per second
    url: str | None = None  # address of a reward server
    timeout: float = 300.0  # seconds a call may take
    start_timeout: float = 1800.0  # seconds until a server has answered what it scores
    judge: tuple[str | None, ...] = (
        None,
        None,
        None,
    )  # its model, file of its rubric, folder of its answers

    @property
    def dtype(self) -> torch.dtype:
        """Precision of a reward's model, independent of the policy's."""
        return torch.float32 if self.device.type == "cpu" else torch.bfloat16

    def beside(self, name: str) -> Path:
        """Folder of another reward's weights."""
        return self.path.with_name(name)


@dataclass
class Scores:
    """Rewards of N clips: the weighted total and every named score, fp64 on the CPU, NaN where scoring failed."""

    total: Tensor  # (N,)
    named: dict[str, Tensor]  # each (N,)
    errors: list[str] = field(default_factory=list)  # one sentence per failure
    weights: Mapping[str, float] = field(default_factory=dict)  # of the named scores in the total


Prompts = Sequence[str | Request]


def told(reward: Reward, prompts: Prompts) -> list[Any]:
    """What a reward is given for each clip: the request if it asks for it, else the prompt."""
    requests = [Request(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
    return (
        requests
        if getattr(reward, "sees_requests", False)
        else [request.text for request in requests]
    )


class Composite:
    """Weighted sum of the named scores of several rewards; each scores `batch_size` clips at a time."""

    def __init__(
        self,
        rewards: Mapping[str, Reward],
        weights: Mapping[str, Any] | None,
        batch_size: int = 4,
        timeout: float = 300,
    ) -> None:
        """`weights`: by score name; with several rewards, by reward and then name (a number if it has one score).

        Without weights, every score has weight 1.
        """
        self.rewards, self.batch_size, self.timeout = dict(rewards), batch_size, timeout
        if weights is None:
            weights = {name: dict.fromkeys(reward.names, 1.0) for name, reward in rewards.items()}
        self.weights = {
            self._label(*key): weight
            for key, weight in _flat_weights(self.rewards, weights).items()
        }
        self.on_batch: Callable[[], None] = lambda: None  # called before each batch is scored

    def __str__(self) -> str:
        return " + ".join(f"{weight:g} {name}" for name, weight in self.weights.items() if weight)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(
            self._label(name, score)
            for name, reward in self.rewards.items()
            for score in reward.names
        )

    def _label(self, name: str, score: str) -> str:
        return score if len(self.rewards) == 1 else f"{name}.{score}"

    def check(self, prompts: Prompts) -> None:
        for reward in self.rewards.values():
            reward.check(told(reward, prompts))

    def total(self, named: Mapping[str, Any]) -> Any:
        """The weighted sum; a score with weight 0 may be NaN."""
        return sum(weight * named[name] for name, weight in self.weights.items() if weight)

    def score(self, clips: Sequence[Tensor | None], prompts: Prompts, fps: float) -> Scores:
        """Score uint8 clips (F, H, W, 3); None is a clip that could not be decoded and counts as failed."""
        named = {
            name: torch.full((len(clips),), math.nan, dtype=torch.float64) for name in self.names
        }
        errors: list[str] = []
        there = [i for i, clip in enumerate(clips) if clip is not None]
        for name, reward in self.rewards.items():
            for start in range(0, len(there), self.batch_size):
                rows = there[start : start + self.batch_size]
                self.on_batch()
                batch = ([clips[i] for i in rows], told(reward, [prompts[i] for i in rows]), fps)
                try:
                    scores = _checked(reward, within(self.timeout, reward.score, *batch), len(rows))
                except TimeoutError as error:  # the next batch would wait just as long
                    errors.append(f"{name}: {error}")
                    break
                except Exception as error:  # any failure of a reward means no score
                    errors.append(f"{name}: {type(error).__name__}: {error}")
                    continue
                errors += [
                    f"{name}: {text}" for text in getattr(reward, "failures", ())
                ]  # of single clips
                for score, values in scores.items():
                    named[self._label(name, score)][rows] = values
        total = self.total(named)
        lost = int((~total.isfinite()).sum()) - (len(clips) - len(there))
        if lost and not errors:
            errors.append(f"{lost} score(s) are not finite")
        return Scores(total, named, errors, self.weights)


def _checked(reward: Reward, scores: Mapping[str, Tensor], count: int) -> dict[str, Tensor]:
    """Scores as fp64 on the CPU; rejects wrong names or lengths."""
    if set(scores) != set(reward.names):
        raise ValueError(
            f"the scores are {', '.join(sorted(scores))}; expected {', '.join(reward.names)}"
        )
    values = {name: torch.as_tensor(value).double().cpu() for name, value in scores.items()}
    if wrong := next((name for name, value in values.items() if value.shape != (count,)), None):
        raise ValueError(f"{wrong} has shape {tuple(values[wrong].shape)} for {count} clips")
    return {name: torch.where(value.isfinite(), value, math.nan) for name, value in values.items()}


def _flat_weights(
    rewards: Mapping[str, Reward], weights: Mapping[str, Any]
) -> dict[tuple[str, str], float]:
    """Weights by reward and score."""
    if len(rewards) == 1 and not set(weights) <= set(rewards):
        weights = dict.fromkeys(rewards, weights)
    flat: dict[tuple[str, str], float] = {}
    if unknown := [name for name in weights if name not in rewards]:
        raise ValueError(f"reward_weights names {unknown[0]}; the rewards are {', '.join(rewards)}")
    for name, reward in rewards.items():
        given = weights.get(name, {})
        if not isinstance(given, Mapping):
            if len(reward.names) > 1:
                raise ValueError(
                    f"reward_weights must have a number for each of {name}'s {', '.join(reward.names)}"
                )
            given = {reward.names[0]: given}
        for score, weight in given.items():
            if score not in reward.names:
                own = json.dumps(dict.fromkeys(reward.names, 1))
                raise ValueError(
                    f"reward_weights names {score}, not a score of {name}; give --reward_weights '{own}'"
                )
            if not isinstance(weight, (int, float)) or not math.isfinite(weight):
                raise ValueError(
                    f"reward_weights gives {score} the weight {weight!r}; it must be a number"
                )
            flat[name, score] = float(weight)
    if not any(flat.values()):
        raise ValueError("reward_weights are all 0: nothing to learn from")
    return flat
