"""Motion by value."""

import pytest
import torch

from sage_grpo.rewards.base import Setup
from sage_grpo.rewards.build import build_reward


@pytest.fixture
def reward(tmp_path):
    return build_reward("motion", Setup(tmp_path, torch.device("cpu")))


STEPS = torch.arange(5, dtype=torch.uint8)[:, None, None, None].expand(5, 16, 24, 3)


def test_motion_is_the_change_per_second(reward):
    clips = [STEPS, 3 * STEPS, STEPS[:1], STEPS[:, :4, :4]]
    scores = reward.score(clips, ["a"] * 4, 8.0)["motion"]
    assert scores.tolist() == pytest.approx([8 / 255, 24 / 255, 0.0, 8 / 255], abs=1e-6)
    faster = reward.score([STEPS], ["a"], 16.0)["motion"]
    assert faster.item() == pytest.approx(16 / 255, abs=1e-6)


def test_grain_is_not_motion(reward):
    grain = torch.zeros(2, 16, 16, 3, dtype=torch.uint8)
    grain[0, 1::2, ::2] = 100
    grain[1, ::2, ::2] = 100  # pixels change, but no mean of 8 x 8 of them does
    assert reward.score([grain], ["a"], 8.0)["motion"].item() == 0
