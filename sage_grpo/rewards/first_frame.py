"""What post-training an image-to-video model may ruin: it drifts from its image, or freezes to keep it.

first_frame: 1 - RMS difference of the first frame and the image as the model saw it, of the pixel range: 1 if they are
equal; 0.97 is 30 dB, where differences become visible.

motion: mean change of a pixel per second, of the pixel range. Pixels are averaged over squares of 8 x 8, so that grain
counts for little. Flicker and cuts are motion too: hold it out, or give it a small weight.
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


class Motion(Reward):
    names: tuple[str, ...] = ("motion",)

    def __init__(self, setup: Setup) -> None:
        """There is nothing to load."""

    def score(
        self, clips: Sequence[Tensor], prompts: Sequence, fps: float | Sequence[float]
    ) -> dict[str, Tensor]:
        values = [
            rate * change(clip)
            for clip, rate in zip(clips, check_clips(clips, prompts, fps), strict=True)
        ]
        return {"motion": torch.stack(values).cpu()}


def change(clip: Tensor) -> Tensor:
    """Mean change from one frame to the next; 0 for a single frame."""
    frames = clip.permute(0, 3, 1, 2).float() / 255
    frames = F.avg_pool2d(frames, min(SQUARE, *frames.shape[2:]), ceil_mode=True)
    return frames.diff(dim=0).abs().mean() if len(clip) > 1 else frames.new_zeros(())


class FirstFrame(Motion):
    names, sees_requests = ("first_frame",), True

    def check(self, requests: Sequence[Request]) -> None:
        if without := next((request for request in requests if request.image is None), None):
            raise ValueError(
                f"the reward first_frame needs an image, and the prompt {without.text!r} has none"
            )

    def score(
        self, clips: Sequence[Tensor], requests: Sequence[Request], fps: float
    ) -> dict[str, Tensor]:
        check_clips(clips, requests, fps)
        self.check(requests)
        sized = [
            request.sized(*clip.shape[1:3]) for clip, request in zip(clips, requests, strict=True)
        ]
        images = [torch.from_numpy(np.array(request.image.cropped())) for request in sized]
        changes = [
            clip[0].cpu().double() - image for clip, image in zip(clips, images, strict=True)
        ]
        return {
            "first_frame": torch.stack(
                [1 - (each / 255).square().mean().sqrt() for each in changes]
            )
        }
