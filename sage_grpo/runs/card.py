"""The model card of a checkpoint: what a hub shows about the weights, with the curve of the held-out reward."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import yaml

from sage_grpo import __version__
from sage_grpo.runs.history import RunHistory, column

TEMPLATE = Path(__file__).with_name("card.md")


def model_card(recipe: dict[str, Any], run: RunHistory, **facts: Any) -> dict[str, str | bytes]:
    """README.md with the changed settings of a run and its validations so far, and curves.png of its rollouts."""
    steps, rewards = (column(run.train, key) for key in ("step", "reward/total"))
    known = np.isfinite(rewards)
    files = {"curves.png": curve(steps[known], rewards[known])} if known.sum() > 1 else {}
    facts |= {
        "version": __version__,
        "recipe": yaml.safe_dump(recipe, sort_keys=False),
        "lora": recipe["use_lora"],
    }
    facts |= {"model": Path(recipe["pretrained_model_root"]).name, "curves": list(files)}
    rows = zip(*(column(run.validations, key) for key in ("step", "reward/total")), strict=True)
    card = jinja2.Template(
        TEMPLATE.read_text(encoding="utf-8"), trim_blocks=True, keep_trailing_newline=True
    )
    return files | {"README.md": card.render(facts, validations=list(rows))}


def curve(steps: Sequence[float], values: Sequence[float]) -> bytes:
    """A line through the points as PNG."""
    from matplotlib.figure import Figure  # a run needs it only where a card is written

    file, figure = io.BytesIO(), Figure(figsize=(7.2, 3), layout="constrained")
    axes = figure.subplots()
    axes.plot(steps, values)
    axes.set(xlabel="iteration", ylabel="reward of the rollouts")
    figure.savefig(file, format="png")
    return file.getvalue()
