"""Controlled corruptions of known strength, to measure how the oracle and the rewards respond.

Each function takes clips (B,F,H,W,3) in [0,1] and a strength, 0 meaning none, and returns clips of the same shape.
"""

import torch
from torch import Tensor
from torch.nn.functional import affine_grid, conv2d, grid_sample, pad


def add_noise(clips: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    """Add white Gaussian noise of standard deviation `strength` to every pixel and channel."""
    return (clips + strength * torch.randn(clips.shape, generator=generator)).clamp(0, 1)


def blur(clips: Tensor, strength: float, generator: torch.Generator | None = None) -> Tensor:
    """Gaussian blur within each frame; `strength` is its standard deviation in pixels."""
    if strength == 0:
        return clips
    reach = int(3 * strength) + 1
    kernel = torch.exp(-torch.arange(-reach, reach + 1).square() / (2 * strength**2))
    kernel = kernel / kernel.sum()
    images = clips.movedim(-1, 2).flatten(0, 2)[:, None]
    # the kernel is a product of one along the rows and one along the columns
    images = pad(images, (reach, reach, 0, 0), mode="replicate")
    images = conv2d(images, kernel[None, None, None, :])
    images = pad(images, (0, 0, reach, reach), mode="replicate")
    images = conv2d(images, kernel[None, None, :, None])
    return images.view(clips.movedim(-1, 2).shape).movedim(2, -1)


def jitter(clips: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    """Shift each frame at random; `strength` is the standard deviation in pixels along each axis."""
    frames = clips.shape[0] * clips.shape[1]
    height, width = clips.shape[2:4]
    shift = strength * torch.randn(frames, 2, generator=generator)
    return _warped(clips, torch.ones(frames), 2 * shift / torch.tensor([width, height]))


def pulse(clips: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    """Enlarge each frame at random; `strength` is the standard deviation of the logarithm of the factor."""
    frames = clips.shape[0] * clips.shape[1]
    factor = torch.exp(-strength * torch.randn(frames, generator=generator))
    return _warped(clips, factor, torch.zeros(frames, 2))


def _warped(clips: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Sample each frame at `scale` (frames,) times the place plus `shift` (frames,2), in units of half the frame."""
    frames = clips.movedim(-1, 2).flatten(0, 1)
    matrix = scale[:, None, None] * torch.eye(2, 3)
    matrix[:, :, 2] = shift
    grid = affine_grid(matrix, list(frames.shape), align_corners=False)
    moved = grid_sample(frames, grid, padding_mode="border", align_corners=False)
    return moved.view(clips.movedim(-1, 2).shape).movedim(2, -1).clamp(0, 1)


def flicker(clips: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    """Change the brightness of each frame at random; `strength` is the standard deviation."""
    change = strength * torch.randn(*clips.shape[:2], 1, 1, 1, generator=generator)
    return (clips + change).clamp(0, 1)


def freeze(clips: Tensor, strength: float, generator: torch.Generator | None = None) -> Tensor:
    """Stop the clip after a part of it; `strength` is the share of the frames that repeat the last one shown."""
    frames = clips.shape[1]
    moving = max(1, round((1 - strength) * frames))
    return clips[:, torch.arange(frames).clamp(max=moving - 1)]


def fade(clips: Tensor, strength: float, generator: torch.Generator | None = None) -> Tensor:
    """Fade the object into the background; by the last frame, a fraction `strength` of it is gone."""
    background = clips[:, :1, :1, :1]
    visible = 1 - strength * torch.linspace(0, 1, clips.shape[1])
    return background + visible[:, None, None, None] * (clips - background)


DAMAGES = {
    "noise": add_noise,
    "blur": blur,
    "jitter": jitter,
    "fade": fade,
    "pulse": pulse,
    "flicker": flicker,
    "freeze": freeze,
}
