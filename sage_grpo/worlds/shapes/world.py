"""The moving-shapes world's interface for training and tools."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from sage_grpo.data.requests import Request
from sage_grpo.models.backbone import Backbone
from sage_grpo.worlds.shapes.oracle import read
from sage_grpo.worlds.shapes.reward import ShapesReward
from sage_grpo.worlds.shapes.scenes import captions, render, sample_scenes, scenes_from_prompt

GOLD_METRICS = ("match", "distance", "prompt_distance")
FLOOR_CLIPS = 16
SAME_OBJECT = 0.5  # of the distance between an image and its background: more if the object is two pixels away


class ShapesWorld:
    """Implements `World`."""

    name, reward = "shapes", "shapes"

    def check(self, prompts: Sequence[str]) -> None:
        ShapesReward().check(prompts)

    def gold(self, clips: Tensor, requests: Sequence[Request]) -> dict[str, Tensor]:
        """`match`: whether the clip shows everything its prompt names. `distance`: RMS pixel distance to the manifold;
        `prompt_distance`: to the part of the manifold that the prompt allows.

        If the clips begin with images: `image_distance` from the image to the first frame of the nearest clip of the
        world; `image_match`: whether it is small, which takes the right object within about two pixels of its place.
        """
        reading = read(clips, [request.text for request in requests])
        found = {name: getattr(reading, name).double().cpu() for name in GOLD_METRICS}
        if pictures := [np.array(request.image.cropped()) for request in requests if request.image]:
            images = torch.from_numpy(np.stack(pictures)).flatten(1, 2).double() / 255
            first = render(reading.scenes, *clips.shape[1:4])[:, 0].flatten(1, 2).cpu()
            object_size = rms(
                images - images.median(1, keepdim=True).values
            )  # how far it is from an empty background
            found["image_distance"] = rms(first - images)
            found["image_match"] = (found["image_distance"] < SAME_OBJECT * object_size).double()
        return found

    def draw(
        self, prompts: Sequence[str], frames: int, height: int, width: int, seed: int
    ) -> Tensor:
        scenes = scenes_from_prompt(prompts, torch.Generator().manual_seed(seed))
        return as_uint8(render(scenes, frames, height, width))

    def vae_floor(self, backbone: Backbone) -> dict[str, float]:
        _, decoded, prompts = round_trip(backbone, FLOOR_CLIPS)
        return {
            "distance": self.gold(decoded, [Request(text) for text in prompts])["distance"]
            .mean()
            .item()
        }


def round_trip(backbone: Backbone, count: int, seed: int = 0) -> tuple[Tensor, Tensor, list[str]]:
    """Rendered clips, their VAE reconstructions, uint8 (count, F, H, W, 3) each, and their full captions."""
    settings, scenes = backbone.sampling, sample_scenes(count, torch.Generator().manual_seed(seed))
    clips = as_uint8(render(scenes, settings.frames, settings.height, settings.width))
    return clips, backbone.decode(backbone.encode_video(clips)).cpu(), captions(scenes)


def rms(x: Tensor) -> Tensor:
    return x.square().flatten(1).mean(1).sqrt()


def as_uint8(clips: Tensor) -> Tensor:
    """Quantize clips in [0, 1] as a video file would."""
    return (clips * 255).round().to(torch.uint8)
