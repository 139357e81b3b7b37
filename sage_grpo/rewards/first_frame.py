"""How well a clip begins with its image, from which an image-to-video model may drift away during post-training.

The score is 1 - RMS difference between the first frame and the image as the model saw it, as a fraction of the pixel
range: 1 if they are equal; 0.97 is 30 dB, where differences become visible.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from sage_grpo.data.requests import Request
from sage_grpo.rewards.base import Reward, Setup
from sage_grpo.rewards.video_frames import check_clips


class FirstFrameReward(Reward):
    names: tuple[str, ...] = ("first_frame",)
    sees_requests = True

    def __init__(self, setup: Setup) -> None:
        """There is nothing to load."""

    def check(self, requests: Sequence[Request]) -> None:
        """Reject requests without an image."""
        for request in requests:
            if request.image is None:
                raise ValueError(
                    f"the reward first_frame needs an image, and the prompt {request.text!r} has none"
                )

    def score(
        self, clips: Sequence[Tensor], requests: Sequence[Request], fps: float
    ) -> dict[str, Tensor]:
        check_clips(clips, requests, fps)
        self.check(requests)
        values = [likeness(clip, request) for clip, request in zip(clips, requests, strict=True)]
        return {"first_frame": torch.stack(values)}


def likeness(clip: Tensor, request: Request) -> Tensor:
    """1 - RMS difference between the first frame of a uint8 clip (F, H, W, 3) and the image, cropped to its size."""
    height, width = clip.shape[1:3]
    image = request.sized(height, width).image.cropped()
    difference = clip[0].cpu().double() - torch.from_numpy(np.array(image))
    return 1 - (difference / 255).square().mean().sqrt()
