"""The world that a model folder names; a folder cannot name any other code."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from sage_grpo.data.images import read_image
from sage_grpo.data.requests import Request
from sage_grpo.worlds.registry import check_prompts, drawn, world_of
from sage_grpo.worlds.shapes.world import ShapesWorld


def test_the_folder_names_its_world(tmp_path):
    assert world_of(tmp_path) is None
    (tmp_path / "world.json").write_text('{"world": "shapes"}')
    assert isinstance(world_of(tmp_path), ShapesWorld)


@pytest.mark.parametrize(
    "name", ["earth", "os:system", "sage_grpo.worlds.shapes.world:ShapesWorld", None, ["shapes"]]
)
def test_an_unknown_world_is_refused(tmp_path, name):
    (tmp_path / "world.json").write_text(json.dumps({"world": name}))
    with pytest.raises(ValueError, match=r"world\.json names the world .*; choose from shapes$"):
        world_of(tmp_path)


def test_prompts_are_checked_against_the_world_if_there_is_one(tmp_path):
    check_prompts(tmp_path, ["a purple cat"])
    (tmp_path / "world.json").write_text('{"world": "shapes"}')
    check_prompts(tmp_path, ["a red circle"])
    with pytest.raises(ValueError, match="unknown word 'purple'"):
        check_prompts(tmp_path, ["a red circle", "a purple cat"])


def test_drawn_clips_begin_with_the_images_of_their_requests(tmp_path):
    """Those of requests that have an image: it is replaced by the first frame, and nothing else changes."""
    Image.new("RGB", (8, 8)).save(tmp_path / "black.png")
    texts = ["a large red circle moving left", "a small blue square moving up"]
    requests = [
        Request(text, number, 7, read_image(tmp_path / "black.png", ""))
        for number, text in enumerate(texts)
    ]
    world = world_of("assets/tiny")
    clips, asked = drawn(world, requests, 9, 32, 32, 3)
    assert torch.equal(torch.stack(clips), world.draw(texts, 9, 32, 32, 3))
    for clip, before, after in zip(clips, requests, asked, strict=True):
        assert (after.text, after.index, after.seed) == (before.text, before.index, before.seed)
        assert np.array_equal(np.array(after.image.cropped()), clip[0].numpy())
        assert after.image.size == (32, 32)
        assert after != before
    plain = [Request(text) for text in texts]
    assert drawn(world, plain, 9, 32, 32, 3)[1] == plain
