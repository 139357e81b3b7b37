"""What a reward is, and how several are combined into one number per clip.

Rewards receive clips in memory, never files; a failed reward is NaN, never a number. `registry.py` is the table of
names, `build.py` builds rewards from names.
"""

import copy
import difflib
import inspect
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from sage_grpo.background import TooSlow, within
from sage_grpo.data.requests import Request
from sage_grpo.files.fingerprints import files_fingerprint
from sage_grpo.plugins import contained
from sage_grpo.rewards.failures import failure_text
from sage_grpo.rewards.reserved import RESERVED_NAMES

MAX_WEIGHT = 1e9  # of a score in the total; beyond it sums lose what the other scores say


class Reward(Protocol):
    """What a reward has. A class need not inherit this; if it does, it gets the defaults of what it leaves out."""

    names: tuple[str, ...]  # names of the scores it returns
    sees_requests: bool = False  # whether it is given requests, with text and image, not prompts
    # frames per second that it looks at, which its fingerprint then includes; None: not recorded
    sample_fps: float | None = None
    # why clips of the last batch have no score, one sentence each; `score` replaces it
    failures: Sequence[str] = ()

    def check(self, prompts: Sequence[str]) -> None:
        """Reject prompts that cannot be scored, before anything is sampled for them; by default none."""

    def score(
        self, clips: Sequence[Tensor], prompts: Sequence[str], fps: float
    ) -> dict[str, Tensor]:
        """Named scores, each (B,), higher is better, for uint8 clips (F, H, W, 3) with one prompt each."""

    def fingerprint(self) -> dict[str, str]:
        """What the scores depend on besides clips, prompts and code, such as weights, by name; by default nothing."""
        return {}


@dataclass(frozen=True)
class Setup:
    """Everything a reward may need at construction."""

    path: Path  # VideoAlign's folder; the weights of other rewards are in sibling folders
    device: torch.device
    sample_fps: float | None = None  # frames sampled per second; None: the reward's own rate
    url: str | None = None  # address of a reward server or a judge
    timeout: float = 300.0  # seconds a call may take
    start_timeout: float = 1800.0  # seconds until a server has answered which scores it has
    judge_model: str | None = None  # None: the only one that the server has
    judge_rubric: str | None = None  # file; None: rubric.txt in this folder
    judge_cache: str | None = None  # folder of scores; None: host memory

    @property
    def sample_fps_or_default(self) -> float:
        """For rewards that have no rate of their own."""
        return 2.0 if self.sample_fps is None else self.sample_fps

    @property
    def dtype(self) -> torch.dtype:
        """Precision of a reward's model, independent of the policy's."""
        return torch.float32 if self.device.type == "cpu" else torch.bfloat16

    def beside(self, name: str) -> Path:
        """Folder of another reward's weights."""
        return self.path.with_name(name)


@dataclass
class Scores:
    """Scores of N clips, fp64 on the CPU, NaN where scoring failed."""

    total: Tensor  # (N,) weighted sum of the named scores
    named: dict[str, Tensor]  # each (N,)
    errors: list[str] = field(default_factory=list)  # one sentence per failure
    weights: Mapping[str, float] = field(default_factory=dict)  # of the named scores in the total
    exceptions: int = 0  # calls that raised an error or took too long


Requests = Sequence[Request | str]  # a plain prompt is a request without an image


def reward_inputs(reward: Reward, requests: Requests) -> list[Any]:
    """What a reward is given for each clip: the request if it sees requests, otherwise the prompt."""
    complete = [Request(request) if isinstance(request, str) else request for request in requests]
    if getattr(reward, "sees_requests", False):
        return complete
    return [request.text for request in complete]


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

        Without weights, every score has weight 1. A single score also gets weight 1 if the weights name only scores
        of other rewards, as those of a recipe may. `timeout`: seconds that a batch may take.
        """
        self.rewards = dict(rewards)
        self.batch_size = batch_size
        self.timeout = timeout
        self.on_batch: Callable[[], None] = lambda: None  # called before each batch is scored
        self._check_names()
        self.note = ""  # what weighs nothing in the total, in a sentence
        if weights and _are_for_other_rewards(self.rewards, weights):
            (score,) = self.names
            given = ", ".join(map(str, weights))
            self.note = (
                f"reward_weights names scores of other rewards ({given}); "
                f"the single score, {score}, gets weight 1"
            )
            weights = None
        if weights is None:
            weights = {name: dict.fromkeys(reward.names, 1.0) for name, reward in rewards.items()}
        self.weights = {
            self._label(name, score): weight
            for (name, score), weight in _flat_weights(self.rewards, weights).items()
        }
        for name, reward in self.rewards.items():
            if not any(self.weights.get(self._label(name, score)) for score in reward.names):
                self.note = f"the reward {name} has weight 0 and is only measured"

    def __str__(self) -> str:
        return " + ".join(f"{weight:g} {name}" for name, weight in self.weights.items() if weight)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all scores."""
        return tuple(label for label, _ in self._labels())

    @property
    def owners(self) -> dict[str, str]:
        """The reward that each score comes from."""
        return dict(self._labels())

    def _labels(self) -> list[tuple[str, str]]:
        """The name of each score, and of its reward."""
        return [
            (self._label(name, score), name)
            for name, reward in self.rewards.items()
            for score in reward.names
        ]

    def _label(self, name: str, score: str) -> str:
        return score if len(self.rewards) == 1 else f"{name}.{score}"

    def _check_names(self) -> None:
        """Reject names of scores that the metrics use for something else, or that cannot be shown."""
        for name in self.names:
            if not isinstance(name, str) or not name or not name.isprintable():
                raise ValueError(f"a score is called {name!r}; use letters and digits")
            if self.names.count(name) > 1:
                raise ValueError(f"two scores are called {name}; rename one of them")
            if name in RESERVED_NAMES or name.endswith("_stderr"):
                raise ValueError(f"a score is called {name}, which the metrics use; rename it")

    def fingerprint(self) -> dict[str, str]:
        """What the scores depend on besides clips and prompts: the code, weights and settings of each reward."""
        fingerprints = {}
        for name, reward in self.rewards.items():
            parts = {"code": _code_fingerprint(reward)}
            sample_fps = getattr(reward, "sample_fps", None)
            if sample_fps is not None:
                parts["sample_fps"] = str(sample_fps)
            if hasattr(reward, "fingerprint"):
                parts.update(reward.fingerprint())
            for part, value in parts.items():
                fingerprints[f"{name} {part}"] = value
        return fingerprints

    def check(self, requests: Requests) -> None:
        """Reject requests that one of the rewards cannot score."""
        for name, reward in self.rewards.items():
            with contained(f"the reward {name} cannot check the prompts"):
                reward.check(reward_inputs(reward, requests))

    def total(self, named: Mapping[str, Any]) -> Any:
        """The weighted sum; a score with weight 0 may be NaN."""
        return sum(weight * named[name] for name, weight in self.weights.items() if weight)

    def one_per_call(self) -> "Composite":
        """A copy that passes its rewards one clip at a time."""
        alone = copy.copy(self)
        alone.batch_size = 1
        return alone

    def score(self, clips: Sequence[Tensor | None], requests: Requests, fps: float) -> Scores:
        """Score uint8 clips (F, H, W, 3); None is a clip that could not be decoded and counts as failed."""
        named = {
            name: torch.full((len(clips),), math.nan, dtype=torch.float64) for name in self.names
        }
        errors: list[str] = []
        exceptions = 0
        decoded = [row for row, clip in enumerate(clips) if clip is not None]
        for name, reward in self.rewards.items():
            for rows in self._batches(decoded):
                self.on_batch()
                # copies, because a reward may change what it is given
                batch_clips = [clips[row].clone() for row in rows]
                inputs = reward_inputs(reward, [requests[row] for row in rows])
                try:
                    scores = within(self.timeout, reward.score, batch_clips, inputs, fps)
                    scores = _checked(reward, scores, len(rows))
                    failed_clips = [f"{name}: {text}" for text in getattr(reward, "failures", ())]
                except TooSlow as error:
                    errors.append(f"{name}: {error}")
                    exceptions += 1
                    break  # the next batch would take just as long
                except Exception as error:  # any failure of a reward means no score
                    errors.append(failure_text(name, error))
                    exceptions += 1
                    continue

                errors += failed_clips
                for score, values in scores.items():
                    named[self._label(name, score)][rows] = values

        total = self.total(named)
        not_finite = int((~total.isfinite()).sum())
        not_decoded = len(clips) - len(decoded)
        if not_finite > not_decoded and not errors:
            errors.append(f"{not_finite - not_decoded} score(s) are not finite")
        return Scores(
            total=total,
            named=named,
            errors=errors,
            weights=self.weights,
            exceptions=exceptions,
        )

    def num_batches(self, num_clips: int) -> int:
        """How often `on_batch` is called while so many clips are scored."""
        return len(self.rewards) * -(-num_clips // self.batch_size)

    def _batches(self, rows: Sequence[int]) -> Iterator[Sequence[int]]:
        for start in range(0, len(rows), self.batch_size):
            yield rows[start : start + self.batch_size]


def _code_fingerprint(reward: Reward) -> str:
    """The hash of the file that defines the reward's class; "unknown" if there is none."""
    try:
        file = inspect.getsourcefile(type(reward))
    except TypeError:
        file = None
    return files_fingerprint([Path(file)]) if file and Path(file).is_file() else "unknown"


def _checked(reward: Reward, scores: Mapping[str, Tensor], count: int) -> dict[str, Tensor]:
    """Scores as fp64 on the CPU, infinities as NaN; rejects wrong names or lengths."""
    if set(scores) != set(reward.names):
        raise ValueError(
            f"the scores are {', '.join(sorted(scores))}; expected {', '.join(reward.names)}"
        )
    checked = {}
    for name, score in scores.items():
        values = torch.as_tensor(score).double().cpu()
        if values.shape != (count,):
            raise ValueError(f"{name} has shape {tuple(values.shape)} for {count} clips")
        checked[name] = torch.where(values.isfinite(), values, math.nan)
    return checked


def _are_for_other_rewards(rewards: Mapping[str, Reward], weights: Mapping[str, Any]) -> bool:
    """Whether there is a single score, and the weights name only other rewards, such as those of a recipe.

    A name that is nearly right is a mistake: False, so that it is refused later.
    """
    names = [*rewards, *(score for reward in rewards.values() for score in reward.names)]
    if len(names) != 2:
        return False
    return not any(difflib.get_close_matches(str(given), names, 1) for given in weights)


def _flat_weights(
    rewards: Mapping[str, Reward], weights: Mapping[str, Any]
) -> dict[tuple[str, str], float]:
    """Weights by reward and score."""
    if len(rewards) == 1 and not set(weights) <= set(rewards):
        weights = dict.fromkeys(rewards, weights)  # given by score alone
    unknown = [name for name in weights if name not in rewards]
    if unknown:
        raise ValueError(f"reward_weights names {unknown[0]}; the rewards are {', '.join(rewards)}")

    flat = {}
    for name, reward in rewards.items():
        for score, weight in _weights_of(name, reward, weights.get(name, {})).items():
            flat[name, score] = weight
    if not any(flat.values()):
        raise ValueError("reward_weights are all 0: nothing to learn from")
    return flat


def _weights_of(name: str, reward: Reward, given: Any) -> dict[str, float]:
    """Weights of one reward by score; `given` may be a number if it has a single score."""
    if not isinstance(given, Mapping):
        if len(reward.names) > 1:
            raise ValueError(
                f"reward_weights must have a number for each of {name}'s {', '.join(reward.names)}"
            )
        given = {reward.names[0]: given}

    weights = {}
    for score, weight in given.items():
        if score not in reward.names:
            example = json.dumps(dict.fromkeys(reward.names, 1))
            raise ValueError(
                f"reward_weights names {score}, not a score of {name}; "
                f"give --reward_weights '{example}'"
            )
        if not isinstance(weight, (int, float)) or not abs(weight) <= MAX_WEIGHT:
            raise ValueError(
                f"reward_weights gives {score} the weight {weight!r:.100}; "
                f"it must be a number of at most {MAX_WEIGHT:g}"
            )
        weights[score] = float(weight)
    return weights
