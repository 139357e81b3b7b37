"""What a reward is, and the closed table of those that a command line can name.

A reward gets clips in memory, never files. To add one, write a class with `score` and a line in REWARDS.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from sage_grpo.rewards import shapes


class Reward(Protocol):
    names: tuple[str, ...]  # the scores that it gives

    def check(self, prompts: Sequence[str]) -> None:
        """Refuse prompts that cannot be scored, before anything is sampled for them."""
        ...

    def score(self, clips: Sequence[Tensor], prompts: Sequence[str], fps: float) -> dict[str, Tensor]:
        """Named scores, each (B,), higher is better, of uint8 clips (F, H, W, 3) with one prompt each."""
        ...


REWARDS: dict[str, Callable[[], Reward]] = {"shapes": shapes.ShapesReward}


ALIASES = {"videoalign_local": "videoalign"}


def build_rewards(names: Sequence[str]) -> dict[str, Reward]:
    """The named rewards, aliases under their proper name."""
    return {name: build_reward(name) for name in (ALIASES.get(name, name) for name in names)}


def build_reward(name: str) -> Reward:
    if name not in REWARDS:
        raise ValueError(f"the reward is {name!r}; choose one of {', '.join(REWARDS)}")
    return REWARDS[name]()


def perfect_scores(name: str) -> dict[str, float] | None:
    """Mean scores of perfect clips, where the reward knows what perfect is."""
    return shapes.perfect_scores() if name == "shapes" else None
