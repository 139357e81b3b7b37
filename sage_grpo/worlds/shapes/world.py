"""The moving-shapes world's interface for training and tools."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from sage_grpo.data.requests import Request
from sage_grpo.models.backbone import Backbone
from sage_grpo.worlds.shapes.oracle import read
from sage_grpo.worlds.shapes.scenes import (
    captions,
    parse,
    render,
    sample_scenes,
    scenes_from_prompt,
)

FLOOR_CLIPS = 16
# An image's object is in its place if the image is at most this far away, as a fraction of its distance from an empty
# background. An object two pixels away is farther.
SAME_OBJECT = 0.5


class ShapesWorld:
    """Implements `World`."""

    name = "shapes"
    reward = "shapes"
    bounded_rewards = ("shapes", "videoalign")  # the model's VideoAlign learned from this world

    def check(self, prompts: Sequence[str]) -> None:
        """Reject prompts with words that the world does not know."""
        for prompt in prompts:
            parse(prompt)

    def gold(self, clips: Tensor, requests: Sequence[Request]) -> dict[str, Tensor]:
        """`match`: whether the clip shows everything its prompt names. `distance`: RMS pixel distance to the manifold;
        `prompt_distance`: to the part of the manifold that the prompt allows.

        If the clips begin with images: `image_distance` from the image to the first frame of the nearest clip of the
        world; `image_match`: whether it is small, which takes the right object within about two pixels of its place.
        """
        reading = read(clips, [request.text for request in requests])
        metrics = {
            "match": reading.match.double().cpu(),
            "distance": reading.distance.double().cpu(),
            "prompt_distance": reading.prompt_distance.double().cpu(),
        }
        pictures = [np.array(request.image.cropped()) for request in requests if request.image]
        if pictures:
            frames, height, width = clips.shape[1:4]
            first_frames = render(reading.scenes, frames, height, width)[:, 0].flatten(1, 2).cpu()
            images = torch.from_numpy(np.stack(pictures)).flatten(1, 2).double() / 255
            empty_distance = rms(images - images.median(1, keepdim=True).values)
            image_distance = rms(first_frames - images)
            metrics["image_distance"] = image_distance
            metrics["image_match"] = (image_distance < SAME_OBJECT * empty_distance).double()
        return metrics

    def draw(
        self, prompts: Sequence[str], frames: int, height: int, width: int, seed: int
    ) -> Tensor:
        """Render one clip per prompt that shows exactly what the prompt says, (B, F, H, W, 3)."""
        scenes = scenes_from_prompt(prompts, torch.Generator().manual_seed(seed))
        return as_uint8(render(scenes, frames, height, width))

    def vae_floor(self, backbone: Backbone) -> dict[str, float]:
        """Gold metrics of rendered clips after a pass through the model's VAE: the best that a sample can reach."""
        _, decoded, prompts = round_trip(backbone, FLOOR_CLIPS)
        metrics = self.gold(decoded, [Request(text) for text in prompts])
        return {"distance": metrics["distance"].mean().item()}


def round_trip(backbone: Backbone, count: int, seed: int = 0) -> tuple[Tensor, Tensor, list[str]]:
    """Rendered clips, their VAE reconstructions, uint8 (count, F, H, W, 3) each, and their full captions."""
    sampling = backbone.sampling
    scenes = sample_scenes(count, torch.Generator().manual_seed(seed))
    clips = as_uint8(render(scenes, sampling.frames, sampling.height, sampling.width))
    decoded = backbone.decode(backbone.encode_video(clips)).cpu()
    return clips, decoded, captions(scenes)


def rms(x: Tensor) -> Tensor:
    """(B, ...) -> (B,)"""
    return x.square().flatten(1).mean(1).sqrt()


def as_uint8(clips: Tensor) -> Tensor:
    """Quantize clips in [0, 1] as a video file would."""
    return (clips * 255).round().to(torch.uint8)
