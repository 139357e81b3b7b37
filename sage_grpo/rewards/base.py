"""What a reward is, and how one is built from its name.

Rewards receive clips in memory, never files. `REWARDS` in `sage_grpo/rewards/__init__.py` is the table of names.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from sage_grpo import plugins
from sage_grpo.rewards import ALIASES, REWARDS


class Reward(Protocol):
    names: tuple[str, ...]  # names of the scores it returns

    def check(self, prompts: Sequence[str]) -> None:
        """Reject prompts that cannot be scored, before anything is sampled for them."""

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

    @property
    def dtype(self) -> torch.dtype:
        """Precision of a reward's model, independent of the policy's."""
        return torch.float32 if self.device.type == "cpu" else torch.bfloat16

    def beside(self, name: str) -> Path:
        """Folder of another reward's weights."""
        return self.path.with_name(name)


def build_rewards(names: Sequence[str], setup: Setup) -> dict[str, Reward]:
    """Build the named rewards, with aliases resolved. Weights are loaded here and nowhere else."""
    return {name: build_reward(name, setup) for name in (ALIASES.get(name, name) for name in names)}


def build_reward(name: str, setup: Setup) -> Reward:
    """Call the `build(setup)` that the table names."""
    if name not in REWARDS:
        raise ValueError(f"the reward is {name!r}; choose one of {', '.join(REWARDS)}")
    return plugins.load(REWARDS, name)(setup)
