"""From clips to what vision models read: which frames are seen, at which size, cut into which patches.

The rules are those with which VideoAlign was trained; its scores move by whole points when one of them is off.

Shapes: T frames of a clip, n of them sampled, H rows, W columns; a vision patch covers 2 frames of 14 x 14 pixels.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

PATCH, MERGE, PAIR = 14, 2, 2  # side of a patch in pixels, of a token in patches, frames of a patch
SIDE = PATCH * MERGE
MIN_FRAMES, MIN_PIXELS = 4, 128 * SIDE * SIDE
MAX_RATIO = 200  # of the longer side to the shorter
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def check_clips(clips: Sequence[Tensor], prompts: Sequence[str], fps: float | Sequence[float]) -> list[float]:
    """The fps of each clip; refuses what is not one prompt and one uint8 (T, H, W, 3) each."""
    rates = [float(fps)] * len(clips) if isinstance(fps, (int, float)) else [float(rate) for rate in fps]
    if not len(clips) or {len(prompts), len(rates)} != {len(clips)}:
        raise ValueError(
            f"{len(clips)} clips, {len(prompts)} prompts and {len(rates)} fps: give one of each for every clip"
        )
    for clip in clips:
        if clip.dtype != torch.uint8 or clip.ndim != 4 or clip.shape[-1] != 3:
            raise ValueError(
                f"a clip is {clip.dtype} {tuple(clip.shape)}, but must be uint8 (frames, height, width, 3)"
            )
    if not all(0 < rate < math.inf for rate in rates):
        raise ValueError(f"fps is {fps}, but must be positive")
    return rates


def sample_indices(frames: int, fps: float, sample_fps: float, num_frames: int | None = None) -> Tensor:
    """(n,) numbers of the frames that are seen, n even: `num_frames`, or `sample_fps` of them for each second."""
    if num_frames is None:
        wanted = min(max(frames / fps * sample_fps, MIN_FRAMES), frames // PAIR * PAIR)
    else:
        wanted = num_frames
    count = round(wanted / PAIR) * PAIR  # halves go to the even number, as in training
    if not PAIR <= count <= frames:
        raise ValueError(f"{count} frames cannot be sampled from a clip of {frames}; at least {PAIR} are needed")
    return torch.linspace(0, frames - 1, count).round().long()


def frame_size(height: int, width: int, max_pixels: int) -> tuple[int, int]:
    """Sides near the clip's own that are multiples of 28, with MIN_PIXELS to `max_pixels` pixels."""
    if max(height, width) > MAX_RATIO * min(height, width):
        raise ValueError(f"frames are {height}x{width}; one side may be at most {MAX_RATIO} times the other")
    near = tuple(max(SIDE, round(side / SIDE) * SIDE) for side in (height, width))
    if math.prod(near) > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        return tuple(max(SIDE, math.floor(side / shrink / SIDE) * SIDE) for side in (height, width))
    if math.prod(near) < MIN_PIXELS:
        grow = math.sqrt(MIN_PIXELS / (height * width))
        return tuple(math.ceil(side * grow / SIDE) * SIDE for side in (height, width))
    return near


def resize(frames: Tensor, size: tuple[int, int]) -> Tensor:
    """uint8 (n, H, W, 3) to float (n, 3, *size) in whole numbers from 0 to 255, as an image file would hold."""
    pixels = frames.permute(0, 3, 1, 2).contiguous().float()  # colours apart: twice as fast from here on
    if pixels.shape[2:] == size:
        return pixels
    return F.interpolate(pixels, size, mode="bicubic", antialias=True).round().clamp(0, 255)


def normalise(pixels: Tensor) -> Tensor:
    """(n, 3, H, W) of 0 to 255, by the mean and deviation that CLIP and Qwen2-VL use."""
    mean, std = (pixels.new_tensor(values)[:, None, None] for values in (MEAN, STD))
    return pixels.div(255).sub_(mean).div_(std)


def patches(pixels: Tensor) -> tuple[Tensor, tuple[int, int, int]]:
    """Rows of 3 * 2 * 14 * 14 numbers, the four patches of a token together, and the grid of patches (time, H, W)."""
    count, colours, height, width = pixels.shape
    grid = (count // PAIR, height // PATCH, width // PATCH)
    cut = pixels.reshape(
        grid[0], PAIR, colours, grid[1] // MERGE, MERGE, PATCH, grid[2] // MERGE, MERGE, PATCH
    )  # time, frame, colour, token row, row in it, pixel row, token column, column in it, pixel column
    return cut.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(math.prod(grid), -1), grid
