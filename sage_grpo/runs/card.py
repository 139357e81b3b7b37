"""The model card of a checkpoint: what a hub shows about the weights, with the reward curve of the run."""

import io
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import yaml

from sage_grpo import __version__
from sage_grpo.runs.history import RunHistory, column

TEMPLATE = Path(__file__).with_name("card.md")


def model_card(
    recipe: dict[str, Any],
    run: RunHistory,
    *,
    step: int,
    reward: Any,
    base: str,
    image: bool = False,
) -> dict[str, str | bytes]:
    """The files of the card: README.md, and curves.png if there are two rollouts to draw.

    recipe: the settings that are not defaults. step: iterations trained. reward: what training raised.
    base: fingerprint of the base weights. image: whether clips begin with an image.
    """
    files: dict[str, str | bytes] = {}
    steps = column(run.train, "step")
    rewards = column(run.train, "reward/total")
    known = np.isfinite(rewards)
    if known.sum() > 1:
        files["curves.png"] = curve(steps[known], rewards[known])

    validations = zip(
        column(run.validations, "step"), column(run.validations, "reward/total"), strict=True
    )
    template = jinja2.Template(
        TEMPLATE.read_text(encoding="utf-8"), trim_blocks=True, keep_trailing_newline=True
    )
    files["README.md"] = template.render(
        model=Path(recipe["pretrained_model_root"]).name,
        lora=recipe["use_lora"],
        image=image,
        step=step,
        reward=reward,
        base=base,
        curves=list(files),
        validations=list(validations),
        version=__version__,
        recipe=yaml.safe_dump(recipe, sort_keys=False),
    )
    return files


def curve(steps: np.ndarray, rewards: np.ndarray) -> bytes:
    """A line through the points, as PNG."""
    from matplotlib.figure import Figure  # slow to import, and needed only where a card is written

    figure = Figure(figsize=(7.2, 3), layout="constrained")
    axes = figure.subplots()
    axes.plot(steps, rewards)
    axes.set(xlabel="iteration", ylabel="reward of the rollouts")
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()
