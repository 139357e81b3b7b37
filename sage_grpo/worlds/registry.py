"""Worlds whose data manifold is known exactly: their interface for training and tools, and the table of names.

A model folder trained on a world names it in `world.json`. To add one, write a class with the methods of `World` and
add a row to WORLDS (docs/extending.md).
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from sage_grpo import plugins
from sage_grpo.data.images import drawn_image
from sage_grpo.files.json_files import read_object

if TYPE_CHECKING:
    from torch import Tensor

    from sage_grpo.data.requests import Request
    from sage_grpo.models.backbone import Backbone

WORLDS = {"shapes": "sage_grpo.worlds.shapes.world:ShapesWorld"}


class World(Protocol):
    """Clips are uint8 (F, H, W, 3), or (B, F, H, W, 3) in one tensor."""

    name: str
    reward: str  # name of the reward for models on this world whose folder brings none
    # rewards in which no clip beats what `draw` makes; a world may leave this out
    bounded_rewards: tuple[str, ...] = ()

    def check(self, prompts: Sequence[str]) -> None:
        """Reject prompts with words that the world does not know."""

    def gold(self, clips: "Tensor", requests: Sequence["Request"]) -> dict[str, "Tensor"]:
        """Gold metrics that training never sees, each (B,) fp64 on the CPU; names ending in `distance` are costs."""

    def draw(
        self, prompts: Sequence[str], frames: int, height: int, width: int, seed: int
    ) -> "Tensor":
        """Render one clip per prompt that shows exactly what the prompt says, (B, F, H, W, 3)."""

    def vae_floor(self, backbone: "Backbone") -> dict[str, float]:
        """Gold metrics of rendered clips after a pass through the model's VAE: the best that a sample can reach."""


def drawn(
    world: World, requests: Sequence["Request"], frames: int, height: int, width: int, seed: int
) -> tuple[list["Tensor"], list["Request"]]:
    """Clips that show exactly what the requests ask for, and the requests.

    A request with an image is returned with the first frame of its clip as the image.
    """
    texts = [request.text for request in requests]
    clips = list(world.draw(texts, frames, height, width, seed))
    drawn_requests = []
    for clip, request in zip(clips, requests, strict=True):
        if request.image:
            request = replace(request, image=drawn_image(clip[0].numpy()))
        drawn_requests.append(request)
    return clips, drawn_requests


def world_of(folder: str | Path) -> World | None:
    """The world that a model folder names; None for real-world models."""
    path = Path(folder) / "world.json"
    if not path.is_file():
        return None
    name = read_object(path).get("world")
    if name not in list(WORLDS):
        raise ValueError(f"{path} names the world {name!r}; choose from {', '.join(WORLDS)}")
    return plugins.load(WORLDS, name)()


def check_prompts(folder: str | Path, prompts: Sequence[str]) -> None:
    """Reject prompts with words that the model's world does not know."""
    world = world_of(folder)
    if world:
        world.check(prompts)
