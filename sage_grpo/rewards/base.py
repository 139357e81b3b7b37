"""What a reward is, and the closed table of those that a command line can name.

A reward gets clips in memory, never files. To add one, write a class and a line in REWARDS: docs/rewards.md. Classes
with large models are imported when they are built, so that this file stays light.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from sage_grpo.rewards import shapes


class Reward(Protocol):
    names: tuple[str, ...]  # the scores that it gives

    def check(self, prompts: Sequence[str]) -> None:
        """Refuse prompts that cannot be scored, before anything is sampled for them."""

    def score(self, clips: Sequence[Tensor], prompts: Sequence[str], fps: float) -> dict[str, Tensor]:
        """Named scores, each (B,), higher is better, of uint8 clips (F, H, W, 3) with one prompt each."""


@dataclass(frozen=True)
class Setup:
    """What a reward may need to be built."""

    path: Path  # VideoAlign's folder; other weights lie beside it
    device: torch.device
    sample_fps: float = 2.0  # frames seen of each second
    url: str | None = None  # of a reward server
    timeout: float = 300.0  # seconds that it may take

    @property
    def dtype(self) -> torch.dtype:
        """Of a reward's model, whatever the policy's is."""
        return torch.float32 if self.device.type == "cpu" else torch.bfloat16

    def beside(self, name: str) -> Path:
        return self.path.with_name(name)


def _videoalign(setup: Setup) -> Reward:
    from sage_grpo.rewards.videoalign import VideoAlign

    return VideoAlign(setup.path, setup.device, setup.dtype, sample_fps=setup.sample_fps)


def _clipscore(setup: Setup) -> Reward:
    from sage_grpo.rewards.clip import ClipScore

    return ClipScore(setup.beside("clip-vit-large-patch14"), setup.device, setup.dtype, setup.sample_fps)


def _pickscore(setup: Setup) -> Reward:
    from sage_grpo.rewards.clip import PickScore

    return PickScore(setup.beside("PickScore_v1"), setup.device, setup.dtype, setup.sample_fps)


def _ocr(setup: Setup) -> Reward:
    try:
        from sage_grpo.rewards.ocr import OcrReward
    except ImportError as error:
        raise ValueError(
            f"the reward ocr needs a package ({error}): pip install --no-deps -r requirements-ocr.txt"
        ) from error
    return OcrReward(setup.sample_fps)


def _remote(setup: Setup) -> Reward:
    from sage_grpo.rewards.remote import RemoteReward

    if setup.url is None:
        raise ValueError("the reward remote needs the address of its server: give --remote_reward_url")
    return RemoteReward(setup.url, setup.timeout)


REWARDS: dict[str, Callable[[Setup], Reward]] = {
    "shapes": lambda setup: shapes.ShapesReward(),
    "videoalign": _videoalign,
    "clipscore": _clipscore,
    "pickscore": _pickscore,
    "ocr": _ocr,
    "remote": _remote,
}
ALIASES = {"videoalign_local": "videoalign"}


def build_rewards(names: Sequence[str], setup: Setup) -> dict[str, Reward]:
    """The named rewards, aliases under their proper name. Weights are loaded here and nowhere else."""
    return {name: build_reward(name, setup) for name in (ALIASES.get(name, name) for name in names)}


def build_reward(name: str, setup: Setup) -> Reward:
    if name not in REWARDS:
        raise ValueError(f"the reward is {name!r}; choose one of {', '.join(REWARDS)}")
    return REWARDS[name](setup)
