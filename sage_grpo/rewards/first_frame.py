"""What post-training an image-to-video model may ruin: it drifts from its image, or freezes to keep it.

first_frame   1 - RMS difference of the first frame and the image as the model saw it, of the pixel range: 1 if they
              are equal; 0.97 is 30 dB, where differences become visible
motion        mean change of a pixel per second, of the pixel range; pixels are averaged over squares of 8 x 8, so
              that grain counts for little. Flicker and cuts are motion too: hold it out, or give it a small weight
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sage_grpo.data.requests import Request
from sage_grpo.rewards.base import Reward, Setup
from sage_grpo.rewards.video_frames import check_clips

SQUARE = 8


class FirstFrame(Reward):
    names, sees_requests = ("first_frame",), True

    def __init__(self, setup: Setup) -> None:
        """There is nothing to load."""

    def check(self, requests: Sequence[Request]) -> None:
        if without := next((request for request in requests if request.image is None), None):
            raise ValueError(f"the reward first_frame needs an image, and the prompt {without.text!r} has none")

    def score(self, clips: Sequence[Tensor], requests: Sequence[Request], fps: float) -> dict[str, Tensor]:
        check_clips(clips, requests, fps)
        self.check(requests)
        return {"first_frame": torch.stack([likeness(*pair) for pair in zip(clips, requests, strict=True)])}


def likeness(clip: Tensor, request: Request) -> Tensor:
    height, width = clip.shape[1:3]
    image = torch.from_numpy(np.array(request.sized(height, width).image.cropped()))
    return 1 - ((clip[0].cpu().double() - image) / 255).square().mean().sqrt()


class Motion(Reward):
    names = ("motion",)

    def __init__(self, setup: Setup) -> None:
        """There is nothing to load."""

    def score(self, clips: Sequence[Tensor], prompts: Sequence[str], fps: float | Sequence[float]) -> dict[str, Tensor]:
        rates = check_clips(clips, prompts, fps)
        return {"motion": torch.stack([rate * change(clip) for clip, rate in zip(clips, rates, strict=True)]).cpu()}


def change(clip: Tensor) -> Tensor:
    """Mean change from one frame to the next; 0 for a single frame."""
    frames = clip.permute(0, 3, 1, 2).float() / 255
    frames = F.avg_pool2d(frames, min(SQUARE, *frames.shape[2:]), ceil_mode=True)
    return frames.diff(dim=0).abs().mean() if len(clip) > 1 else frames.new_zeros(())
