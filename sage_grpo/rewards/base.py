"""What a reward is, and how one is built from its name.

Rewards receive clips in memory, never files. `REWARDS` in `sage_grpo/rewards/__init__.py` is the table of names.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from sage_grpo import plugins
from sage_grpo.rewards import ALIASES, REWARDS


class Reward(Protocol):
    names: tuple[str, ...]  # names of the scores it returns

    def check(self, prompts: Sequence[str]) -> None:
        """Reject prompts that cannot be scored, before anything is sampled for them; none, unless a reward does."""

    def score(self, clips: Sequence[Tensor], prompts: Sequence[str], fps: float) -> dict[str, Tensor]:
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
    judge: tuple[str | None, ...] = (None, None, None)  # its model, file of its rubric, folder of its answers

    @property
    def dtype(self) -> torch.dtype:
        """Precision of a reward's model, independent of the policy's."""
        return torch.float32 if self.device.type == "cpu" else torch.bfloat16

    def beside(self, name: str) -> Path:
        """Folder of another reward's weights."""
        return self.path.with_name(name)


def build_rewards(names: Sequence[str], setup: Setup) -> dict[str, Reward]:
    """Build the named rewards, with aliases resolved. Weights are loaded here and nowhere else."""
    names = list(dict.fromkeys(ALIASES.get(name, name) for name in names))
    labels = [plugins.label(name) for name in names]
    if twice := next((label for label in labels if labels.count(label) > 1), None):
        raise ValueError(f"two rewards are called {twice}; rename one of them")
    return {label: build_reward(name, setup) for label, name in zip(labels, names, strict=True)}


def build_reward(name: str, setup: Setup) -> Reward:
    """Call the `build(setup)` that the table names, or make a reward of what a file defines."""
    if plugins.in_file(name):
        return FileReward(name, setup)
    if name not in REWARDS:
        raise ValueError(f"the reward is {name!r}; choose one of {', '.join(REWARDS)}, or FILE.py:NAME")
    return plugins.load(REWARDS, name)(setup)


class FileReward:
    """A reward from `FILE.py:NAME`: a function of clips, prompts and perhaps fps; a class; or a `build(setup)`.

    A class may take the setup, and may leave out `check`; with a single score it may also leave out `names`, which is
    then NAME, and return plain values.
    """

    def __init__(self, name: str, setup: Setup) -> None:
        made = plugins.resolved(name)
        try:
            count = len(inspect.signature(made).parameters)
            if isinstance(made, type) or count < 2:
                made = made(*[setup][:count])
            self._score = getattr(made, "score", made)
            self._count = len(inspect.signature(self._score).parameters)
        except Exception as error:  # the file may do anything
            raise ValueError(f"the reward {name} cannot be built: {type(error).__name__}: {error}") from error
        self.names = tuple(getattr(made, "names", [plugins.label(name)]))
        self.check = getattr(made, "check", lambda prompts: None)

    def score(self, clips: Sequence[Tensor], prompts: Sequence[str], fps: float) -> dict[str, Any]:
        scores = self._score(*(clips, prompts, fps)[: self._count])
        return dict(scores) if isinstance(scores, Mapping) else dict.fromkeys(self.names, scores)
