"""Builds rewards from their names: rows of the registry, or `FILE.py:NAME` from a command line."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from sage_grpo import plugins
from sage_grpo.rewards.base import Reward, Setup
from sage_grpo.rewards.registry import ALIASES, REWARDS


def build_rewards(names: Sequence[str], setup: Setup) -> dict[str, Reward]:
    """Build the named rewards, with aliases resolved. Weights are loaded here and nowhere else."""
    names = list(dict.fromkeys(ALIASES.get(name, name) for name in names))
    labels = [plugins.label(name) for name in names]
    if twice := next((label for label in labels if labels.count(label) > 1), None):
        raise ValueError(f"two rewards are called {twice}; rename one of them")
    return {label: build_reward(name, setup) for label, name in zip(labels, names, strict=True)}


def build_reward(name: str, setup: Setup) -> Reward:
    """Call what the table names with the setup, or make a reward of what a file defines."""
    if plugins.in_file(name):
        return FileReward(name, setup)
    if name not in REWARDS:
        raise ValueError(
            f"the reward is {name!r}; choose one of {', '.join(REWARDS)}, or FILE.py:NAME"
        )
    return plugins.load(REWARDS, name)(setup)


class FileReward:
    """A reward from `FILE.py:NAME`: a function of clips, prompts and perhaps fps; a class; or a `build(setup)`.

    If it calls its second parameter `requests`, it is given requests.
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
            parameters = inspect.signature(self._score).parameters
            self._count, self.sees_requests = len(parameters), "requests" in parameters
        except Exception as error:  # the file may do anything
            raise ValueError(
                f"the reward {name} cannot be built: {type(error).__name__}: {error}"
            ) from error
        self.names = tuple(getattr(made, "names", [plugins.label(name)]))
        self.check = getattr(made, "check", lambda prompts: None)

    def score(self, clips: Sequence[Tensor], prompts: Sequence[str], fps: float) -> dict[str, Any]:
        scores = self._score(*(clips, prompts, fps)[: self._count])
        return dict(scores) if isinstance(scores, Mapping) else dict.fromkeys(self.names, scores)
