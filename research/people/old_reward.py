"""The embedded reward as a held-out one, while training uses another folder: `--holdout_reward FILE.py:old_reward`."""

from pathlib import Path

from sage_grpo.rewards.base import Setup
from sage_grpo.rewards.videoalign.reward import VideoAlign

FOLDER = Path(__file__).parents[2] / "assets" / "tiny" / "VideoReward"


def old_reward(setup: Setup) -> VideoAlign:
    return VideoAlign(FOLDER, setup.device, setup.dtype, setup.sample_fps)
