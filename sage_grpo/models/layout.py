"""Where the parts of a diffusers-layout model folder are, and how the model in it is meant to be sampled."""

import json
from dataclasses import replace
from pathlib import Path

from sage_grpo.models.policy import Sampling

# The file without which a part cannot be loaded; parts with weights need those as well.
CONFIG_FILES = {
    "transformer": "config.json",
    "vae": "config.json",
    "text_encoder": "config.json",
    "text_encoder_2": "config.json",
    "tokenizer": "tokenizer_config.json",
    "tokenizer_2": "tokenizer_config.json",
}

# (target_size, task_type) of the transformer's config. Distilled versions share these and differ in guidance.
SAMPLING = {
    (640, "t2v"): Sampling(frames=81, height=352, width=624, fps=24, shift=5.0, guidance=6.0, num_steps=20),
    (960, "t2v"): Sampling(frames=81, height=720, width=1280, fps=24, shift=9.0, guidance=6.0, num_steps=20),
}


def component(folder: Path, name: str) -> Path:
    """The sub-folder of one part; FileNotFoundError names what is missing."""
    if not folder.is_dir():
        raise FileNotFoundError(f"Model folder '{folder}' does not exist; pass a folder in the diffusers layout.")
    part = folder / name
    if not (part / CONFIG_FILES[name]).is_file():
        raise FileNotFoundError(
            f"Model folder '{folder}' has no '{name}/{CONFIG_FILES[name]}'; "
            f"a diffusers-layout folder holds {', '.join(CONFIG_FILES)}."
        )
    if CONFIG_FILES[name] == "config.json" and not any(part.glob("*.safetensors")):
        raise FileNotFoundError(f"'{part}' has a config but no weights (*.safetensors); download that part again.")
    return part


def sampling_defaults(folder: Path) -> Sampling:
    """`sampling.json` of the folder, else the built-in table with the guidance of the folder's guider."""
    if (folder / "sampling.json").is_file():
        return Sampling.from_json(folder / "sampling.json")
    config = json.loads((component(folder, "transformer") / "config.json").read_text())
    version = (config["target_size"], config["task_type"])
    if version not in SAMPLING:
        known = ", ".join(f"{size} {task}" for size, task in SAMPLING)
        raise ValueError(
            f"'{folder}/transformer' has target_size and task_type {version[0]} {version[1]}, which is none of "
            f"{known}; put a sampling.json into the folder to say how it is sampled."
        )
    guider = folder / "guider" / "guider_config.json"
    if not guider.is_file():
        return SAMPLING[version]
    return replace(SAMPLING[version], guidance=json.loads(guider.read_text())["guidance_scale"])
