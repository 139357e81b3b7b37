"""First-frame fidelity and motion: by value, and which requests rewards are given."""

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
    assert scores.total.isnan().all() and "needs an image" in scores.errors[0]


def test_motion_is_the_change_per_second(setup):
    steps = torch.arange(5, dtype=torch.uint8)[:, None, None, None].expand(5, 16, 24, 3)
    grain = torch.zeros(2, 16, 16, 3, dtype=torch.uint8)
    grain[1, ::2, ::2], grain[0, 1::2, ::2] = 100, 100  # it moves, but no square of 8 x 8 changes
    clips = [steps, 3 * steps, steps[:1], grain, steps[:, :4, :4]]
    scores = build_reward("motion", setup).score(clips, ["a"] * 5, 8.0)["motion"]
    assert scores.tolist() == pytest.approx([8 / 255, 24 / 255, 0.0, 0.0, 8 / 255], abs=1e-6)
    faster = build_reward("motion", setup).score([steps], ["a"], 16.0)["motion"]
    assert faster.item() == pytest.approx(16 / 255, abs=1e-6)


def test_a_reward_in_a_file_may_ask_for_requests(setup, request_, tmp_path):
    (tmp_path / "mine.py").write_text(
        "def of_request(clips, requests, fps):\n    return [float(r.image is not None) for r in requests]\n"
        "def of_prompt(clips, prompts):\n    return [float(isinstance(p, str)) for p in prompts]\n"
    )
    rewards = build_rewards(
        [f"{tmp_path}/mine.py:of_request", f"{tmp_path}/mine.py:of_prompt"], setup
    )
    scores = Composite(rewards, None).score([clip_of(request_)] * 2, [request_, PLAIN], 8.0)
    assert {name: values.tolist() for name, values in scores.named.items()} == {
        "of_request.of_request": [1.0, 0.0],
        "of_prompt.of_prompt": [1.0, 1.0],
    }
