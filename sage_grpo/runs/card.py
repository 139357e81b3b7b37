"""The model card of a checkpoint: what a hub shows about the weights, with the curve of the held-out reward."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from sage_grpo import __version__
from sage_grpo.runs.history import RunHistory, column

TEMPLATE = Path(__file__).with_name("card.md")
LORA = 'pipe.transformer.load_lora_adapter("FOLDER", weight_name="pytorch_lora_weights.safetensors")'
FULL = 'pipe.transformer = AutoModel.from_pretrained("FOLDER", subfolder="transformer")'


def model_card(recipe: dict[str, Any], run: RunHistory, **facts: Any) -> dict[str, str | bytes]:
    """README.md with the changed settings of a run and its validations so far, and curves.png of its rollouts."""
    model, files = Path(recipe["pretrained_model_root"]).name, {}
    facts |= {"version": __version__, "recipe": yaml.safe_dump(recipe, sort_keys=False), "model": model, "curves": "\n"}
    facts |= {"what": "An adapter of", "code": LORA} if recipe["use_lora"] else {"what": "All weights of", "code": FULL}
    steps, rewards = (column(run.train, key) for key in ("step", "reward/total"))
    if (known := np.isfinite(rewards)).sum() > 1:
        files["curves.png"] = curve(steps[known], rewards[known])
        facts["curves"] += "![Reward of the rollouts by iteration](curves.png)\n\n"
    if run.validations:
        rows = zip(*(column(run.validations, key) for key in ("step", "reward/total")), strict=True)
        table = "".join(f"| {step:.0f} | {value:.3f} |\n" for step, value in rows)
        facts["curves"] += f"| iteration | reward of held-out prompts |\n|---|---|\n{table}\n"
    return files | {"README.md": TEMPLATE.read_text(encoding="utf-8").format(**facts)}


def curve(steps: Sequence[float], values: Sequence[float]) -> bytes:
    """A line through the points as PNG."""
    from matplotlib.figure import Figure  # a run needs it only where a card is written

    file, figure = io.BytesIO(), Figure(figsize=(7.2, 3), layout="constrained")
    axes = figure.subplots()
    axes.plot(steps, values)
    axes.set(xlabel="iteration", ylabel="reward of the rollouts")
    figure.savefig(file, format="png")
    return file.getvalue()
