"""How much a clip moves: mean change of a pixel per second, as a fraction of the pixel range.

Meant for image-to-video models, which may freeze to stay close to their image. Pixels are averaged over squares of
8 x 8, so that grain counts for little. Flicker and cuts are motion too: hold the reward out, or give it a small weight.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from sage_grpo.rewards.base import Reward, Setup
from sage_grpo.rewards.video_frames import check_clips

SQUARE = 8  # pixels


class Motion(Reward):
    names: tuple[str, ...] = ("motion",)

    def __init__(self, setup: Setup) -> None:
        """There is nothing to load."""

    def score(
        self, clips: Sequence[Tensor], prompts: Sequence[str], fps: float | Sequence[float]
    ) -> dict[str, Tensor]:
        rates = check_clips(clips, prompts, fps)
        values = [rate * change(clip) for clip, rate in zip(clips, rates, strict=True)]
        return {"motion": torch.stack(values).cpu()}


def change(clip: Tensor) -> Tensor:
    """Mean change of a uint8 clip (F, H, W, 3) from one frame to the next; 0 for a single frame."""
    frames = clip.permute(0, 3, 1, 2).float() / 255
    frames = F.avg_pool2d(frames, min(SQUARE, *frames.shape[2:]), ceil_mode=True)
    if len(clip) == 1:
        return frames.new_zeros(())
    return frames.diff(dim=0).abs().mean()
