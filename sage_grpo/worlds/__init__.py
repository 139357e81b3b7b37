"""Worlds whose data manifold is known exactly.

A model folder that was trained on one says so in its `world.json`; then prompts can be checked before anything runs.
"""

from collections.abc import Sequence
from pathlib import Path

from sage_grpo.json_files import read_object
from sage_grpo.worlds import shapes

PROMPT_PARSERS = {"shapes": shapes.parse}


def world_of(folder: Path) -> str | None:
    """The world that a model folder names, None for models of the real one."""
    path = Path(folder) / "world.json"
    if not path.is_file():
        return None
    name = read_object(path).get("world")
    if name not in list(PROMPT_PARSERS):
        raise ValueError(f"{path} names the world {name!r}; known are {', '.join(PROMPT_PARSERS)}")
    return name


def check_prompts(folder: Path, prompts: Sequence[str]) -> None:
    """Refuse a prompt with words that the model's world does not know."""
    world = world_of(folder)
    if world is not None:
        for prompt in prompts:
            PROMPT_PARSERS[world](prompt)
