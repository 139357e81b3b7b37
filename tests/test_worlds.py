"""The world that a model folder names; a folder cannot name any other code."""

import json

import pytest

from embedded.shapes.world import ShapesWorld
from sage_grpo.worlds import check_prompts, world_of


def test_the_folder_names_its_world(tmp_path):
    assert world_of(tmp_path) is None
    (tmp_path / "world.json").write_text('{"world": "shapes"}')
    assert isinstance(world_of(tmp_path), ShapesWorld)


@pytest.mark.parametrize("name", ["earth", "os:system", "embedded.shapes.world:ShapesWorld", None, ["shapes"]])
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
