"""First-frame fidelity, by value, and that it needs an image."""

import numpy as np
import pytest
import torch
from PIL import Image

from sage_grpo.data.images import read_image
from sage_grpo.data.requests import Request
from sage_grpo.rewards.base import Composite, Setup
from sage_grpo.rewards.build import build_reward, build_rewards

PLAIN = Request("a boat")


@pytest.fixture
def setup(tmp_path):
    return Setup(tmp_path, torch.device("cpu"))


@pytest.fixture
def request_(tmp_path):
    pixels = np.random.default_rng(0).integers(20, 230, (16, 24, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "p.png")
    return Request("a boat", image=read_image(tmp_path / "p.png", "here"))


def clip_of(request, frames=5, height=16, width=24, change=0):
    image = torch.from_numpy(np.array(request.sized(height, width).image.cropped()))
    return torch.stack([image + change] * frames).to(torch.uint8)


def test_frame_0_is_compared_with_the_image_in_the_size_of_the_clip(setup, request_):
    reward = build_reward("first_frame", setup)
    clips = [
        clip_of(request_),
        clip_of(request_, change=10),
        clip_of(request_, height=32, width=32),
    ]
    clips[0][1:] = 0  # only the first frame counts
    scores = reward.score(clips, [request_] * 3, 8.0)["first_frame"]
    assert scores.tolist() == pytest.approx([1.0, 1 - 10 / 255, 1.0], abs=1e-12)


def test_first_frame_refuses_prompts_without_an_image(setup, request_):
    reward = Composite(build_rewards(["first_frame"], setup), None)
    reward.check([request_])
    for prompt in (PLAIN, "a boat"):
        with pytest.raises(
            ValueError,
            match=r"^the reward first_frame needs an image, and the prompt 'a boat' has none$",
        ):
            reward.check([request_, prompt])
    scores = reward.score([clip_of(request_)], [PLAIN], 8.0)
    assert scores.total.isnan().all()
    assert "needs an image" in scores.errors[0]
