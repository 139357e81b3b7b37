"""The model card of a checkpoint: what a hub shows about the weights, with the reward curve of the run."""

import io
import math
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import yaml

from sage_grpo import __version__
from sage_grpo.config.fields import flag_info
from sage_grpo.escape import markdown, without_folders
from sage_grpo.models.backbone import Origin
from sage_grpo.models.comfyui import file_name
from sage_grpo.models.denoiser import TRANSFORMER
from sage_grpo.models.lora import EXPERTS, LORA_FILES
from sage_grpo.runs.history import RunHistory, column
from sage_grpo.runs.preferences import read_preferences

CARD = "README.md"
TEMPLATE = Path(__file__).with_name("card.md")
NO_ORIGIN = Origin()
# settings a card leaves out
PRIVATE = (
    "remote_reward_url",
    "output_dir",
    "resume_from_checkpoint",
)


def model_card(
    recipe: dict[str, Any],
    run: RunHistory,
    *,
    step: int,
    reward: Any,
    base: str,
    image: bool = False,
    comfyui: bool = False,
    origin: Origin = NO_ORIGIN,
    layout: str | None = None,
    experts: Sequence[str] = (TRANSFORMER,),
    num_transformers: int = 1,
) -> dict[str, str | bytes]:
    """The files of the card: README.md, and curves.png if there are two rollouts to draw.

    recipe: the settings that are not defaults. step: iterations trained. reward: what training raised.
    base: fingerprint of the base weights. image: whether clips begin with an image.
    comfyui: whether ComfyUI's layout has a place for the weights. origin: of the base weights.
    layout: of the card's folder, a layout of scripts/export_checkpoint.py or `checkpoint`; None: as training writes it.
    experts: folders of the transformers whose weights these are, out of the model's `num_transformers`.
    """
    layout = layout or ("lora" if recipe["use_lora"] else "checkpoint")
    lora = layout == "lora" or (layout == "comfyui" and recipe["use_lora"])
    files: dict[str, str | bytes] = {}
    steps = column(run.iteration_lines, "step")
    rewards = column(run.iteration_lines, "reward/total")
    known = np.isfinite(rewards)
    if known.sum() > 1:
        files["curves.png"] = curve(steps[known], rewards[known])

    validations = zip(
        column(run.validations, "step"), column(run.validations, "reward/total"), strict=True
    )
    settings = _on_long_lines(_public(recipe))
    longest_ticks = max(map(len, re.findall("`+", settings)), default=0)
    files[CARD] = compiled_template().render(
        front=_on_long_lines(front_matter(origin, lora, image)),
        layout=layout,
        experts=experts,
        num_transformers=num_transformers,
        lora_files=LORA_FILES,
        noise_levels=dict(zip(LORA_FILES, EXPERTS, strict=True)),
        comfyui_files=" and ".join(
            f"`NAME/{file_name('NAME', expert, num_transformers > 1)}`" for expert in experts
        ),
        lora=lora,
        license=markdown(origin.license_name or origin.license),
        model=markdown(Path(recipe["pretrained_model_root"]).name),
        image=image,
        comfyui=comfyui,
        step=step,
        reward=markdown(reward),
        base=markdown(base),
        curves=list(files),
        since=run.breaks[-1]["step"] if run.breaks else None,
        validations=list(validations),
        preferences=_preferences(run),
        version=__version__,
        recipe=settings,
        fence="`" * max(3, longest_ticks + 1),  # a setting cannot close it
    )
    return files


@cache
def compiled_template() -> jinja2.Template:
    """The text of all cards; compiling it takes longer than filling it in."""
    return jinja2.Template(
        TEMPLATE.read_text(encoding="utf-8"), trim_blocks=True, keep_trailing_newline=True
    )


def _on_long_lines(values: dict[str, Any]) -> str:
    """YAML that breaks no line, however long."""
    return yaml.safe_dump(values, sort_keys=False, width=math.inf)


def front_matter(origin: Origin, lora: bool, image: bool) -> dict[str, Any]:
    """The front matter that a hub reads; nothing is claimed about weights of unknown origin."""
    front: dict[str, Any] = {
        "library_name": "diffusers",
        "pipeline_tag": f"{'image' if image else 'text'}-to-video",
        "tags": ["sage-grpo", "grpo", "reinforcement-learning"],
    }
    if origin.base_model:
        front["base_model"] = origin.base_model
        front["base_model_relation"] = "adapter" if lora else "finetune"
    for name in ("license", "license_name", "license_link"):
        if getattr(origin, name):
            front[name] = getattr(origin, name)
    return front


def _preferences(run: RunHistory) -> list[tuple[str, str, str, str]]:
    """What people preferred, as cells; nothing if the file is damaged, because a checkpoint has to be saved."""
    cells = []
    with suppress(ValueError, OSError):
        for row in read_preferences(run.folder):
            names = (markdown(row.system), markdown(row.other), markdown(row.question))
            cells.append((*names, str(row)))
    return cells


def _public(recipe: dict[str, Any]) -> dict[str, Any]:
    """The settings without addresses and folders of the machine that trained."""
    return {
        name: without_folders(value, _names_file(name))
        for name, value in recipe.items()
        if name not in PRIVATE
    }


def _names_file(name: str) -> bool:
    """Whether a setting is a path, or may be `FILE.py:NAME`."""
    info = flag_info(name)
    return info.is_path or info.allows_code


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
