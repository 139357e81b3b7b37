"""Preprocesses clips for vision models: which frames are sampled, at what size, cut into which patches.

The rules match VideoAlign's training; if one of them is off, its scores change by whole points.

Shapes: T frames of a clip, n of them sampled, H rows, W columns; a vision patch covers 2 frames of 14 x 14 pixels.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

PATCH = 14  # side of a patch, in pixels
PAIR = 2  # frames of a patch
MERGE = 2  # side of a token, in patches
SIDE = PATCH * MERGE  # of a token, in pixels
MIN_FRAMES = 4
MIN_PIXELS = 128 * SIDE * SIDE
MAX_RATIO = 200  # longer side to shorter side

# of the color channels, for CLIP and Qwen2-VL
MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)


def check_clips(
    clips: Sequence[Tensor], prompts: Sequence[str], fps: float | Sequence[float]
) -> list[float]:
    """The fps of each clip; rejects anything but uint8 clips (T, H, W, 3) with one prompt each."""
    if isinstance(fps, (int, float)):
        rates = [float(fps)] * len(clips)
    else:
        rates = [float(rate) for rate in fps]
    if len(clips) == 0 or len(prompts) != len(clips) or len(rates) != len(clips):
        raise ValueError(
            f"{len(clips)} clips, {len(prompts)} prompts and {len(rates)} fps: give one of each per clip"
        )
    for clip in clips:
        if clip.dtype != torch.uint8 or clip.ndim != 4 or clip.shape[-1] != 3:
            raise ValueError(
                f"a clip is {clip.dtype} {tuple(clip.shape)}; it must be uint8 (frames, height, width, 3)"
            )
    if not all(0 < rate < math.inf for rate in rates):
        raise ValueError(f"fps is {fps}, but must be positive")
    return rates


def sample_indices(
    frames: int, fps: float, sample_fps: float, num_frames: int | None = None
) -> Tensor:
    """(n,) indices of the sampled frames, n even: `num_frames`, or `sample_fps` per second.

    A picture is a clip that stands still: its only frame is repeated.
    """
    if frames == 1:
        return torch.zeros(num_frames or PAIR, dtype=torch.long)
    if num_frames is None:
        wanted = min(max(frames / fps * sample_fps, MIN_FRAMES), frames // PAIR * PAIR)
    else:
        wanted = num_frames
    count = round(wanted / PAIR) * PAIR  # halves round to even, as in training
    if not PAIR <= count <= frames:
        raise ValueError(
            f"{count} frames cannot be sampled from a clip of {frames}; at least {PAIR} are needed"
        )
    return torch.linspace(0, frames - 1, count).round().long()


def frame_size(
    height: int, width: int, max_pixels: int, min_pixels: int = MIN_PIXELS
) -> tuple[int, int]:
    """The nearest (height, width) in multiples of 28, with `min_pixels` to `max_pixels` pixels."""
    if max(height, width) > MAX_RATIO * min(height, width):
        raise ValueError(
            f"frames are {height}x{width}; one side may be at most {MAX_RATIO} times the other"
        )
    sides = (height, width)
    nearest = tuple(max(SIDE, round(side / SIDE) * SIDE) for side in sides)
    if math.prod(nearest) > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        return tuple(max(SIDE, math.floor(side / shrink / SIDE) * SIDE) for side in sides)
    if math.prod(nearest) < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        return tuple(math.ceil(side * grow / SIDE) * SIDE for side in sides)
    return nearest


def resize(frames: Tensor, size: tuple[int, int]) -> Tensor:
    """uint8 (n, H, W, 3) to float (n, 3, *size), integers from 0 to 255 as in an image file."""
    # channels first in memory too: everything after is twice as fast
    pixels = frames.permute(0, 3, 1, 2).contiguous().float()
    if pixels.shape[2:] == size:
        return pixels
    return F.interpolate(pixels, size, mode="bicubic", antialias=True).round().clamp(0, 255)


def normalize(pixels: Tensor) -> Tensor:
    """Normalize (n, 3, H, W) in 0 to 255 with the mean and standard deviation of CLIP and Qwen2-VL."""
    mean = pixels.new_tensor(MEAN)[:, None, None]
    std = pixels.new_tensor(STD)[:, None, None]
    return pixels.div(255).sub_(mean).div_(std)


def patches(pixels: Tensor) -> tuple[Tensor, tuple[int, int, int]]:
    """Rows of 3 * 2 * 14 * 14 values, the four patches of a token adjacent, and the patch grid (time, H, W)."""
    count, _, height, width = pixels.shape
    # t: time, f: frame in a pair; y, i, p: rows of tokens, of patches in a token, of pixels in a patch;
    # x, j, q: columns, likewise
    rows = rearrange(
        pixels,
        "(t f) c (y i p) (x j q) -> (t y x i j) (c f p q)",
        f=PAIR,
        i=MERGE,
        p=PATCH,
        j=MERGE,
        q=PATCH,
    )
    return rows, (count // PAIR, height // PATCH, width // PATCH)
