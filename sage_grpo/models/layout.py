"""Where the parts of a model folder are, in the layout of diffusers or of Tencent, and how the model is sampled.

diffusers   transformer/  vae/  text_encoder/  tokenizer/  text_encoder_2/  tokenizer_2/
Tencent     transformer/VERSION/  vae/  text_encoder/{llm, byt5-small, Glyph-SDXL-v2}/
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from sage_grpo.json_files import read_object
from sage_grpo.models import tencent
from sage_grpo.models.policy import LARGEST, Sampling

DEFAULT_VERSION = "480p_t2v"
GLYPH_WEIGHTS = "checkpoints/byt5_model.safetensors"
FONTS, COLOURS = "assets/multilingual_10-lang_idx.json", "assets/color_idx.json"

# The files without which a part cannot be loaded.
MODEL = ("config.json", "*.safetensors")
DIFFUSERS_FILES = {
    "transformer": MODEL,
    "vae": MODEL,
    "text_encoder": MODEL,
    "text_encoder_2": MODEL,
    "tokenizer": ("tokenizer_config.json",),
    "tokenizer_2": ("tokenizer_config.json",),
}
TENCENT_FILES = DIFFUSERS_FILES | {
    "text_encoder_2": (COLOURS, FONTS, GLYPH_WEIGHTS),
    "tokenizer_2": ("config.json", "tokenizer_config.json"),
}
TENCENT_FOLDERS = {
    "transformer": "transformer/{version}",
    "vae": "vae",
    "text_encoder": "text_encoder/llm",
    "tokenizer": "text_encoder/llm",
    "text_encoder_2": "text_encoder/Glyph-SDXL-v2",
    "tokenizer_2": "text_encoder/byt5-small",
}

# (target_size, task_type) of the transformer. Distilled versions share these and differ in guidance.
SAMPLING = {
    (640, "t2v"): Sampling(frames=81, height=352, width=624, fps=24, shift=5.0, guidance=6.0, num_steps=20),
    (960, "t2v"): Sampling(frames=81, height=720, width=1280, fps=24, shift=9.0, guidance=6.0, num_steps=20),
}


def is_tencent(folder: Path) -> bool:
    """Whether the folder has Tencent's layout: versions of a transformer instead of one, or Tencent's encoders."""
    if (folder / "transformer" / "config.json").is_file():
        return False
    return (folder / "text_encoder" / "llm").is_dir() or bool(versions(folder))


def versions(folder: Path) -> list[str]:
    """The transformer versions of a folder in Tencent's layout."""
    return sorted(path.parent.name for path in (folder / "transformer").glob("*/config.json"))


def missing_files(folder: Path, version: str = DEFAULT_VERSION) -> list[str]:
    """Everything that a complete folder has and this one has not, relative to it; a pattern where any name will do."""
    return list(dict.fromkeys(file for part in DIFFUSERS_FILES for file in _missing(folder, part, version)))


def _missing(folder: Path, part: str, version: str) -> list[str]:
    place = _place(folder, part, version)
    needed = (TENCENT_FILES if is_tencent(folder) else DIFFUSERS_FILES)[part]
    for index in (folder / place).glob("*.safetensors.index.json"):
        needed += tuple(sorted(set(read_index(index).values())))
    return [f"{place}/{file}" for file in needed if not any((folder / place).glob(file))]


def read_index(path: Path) -> dict[str, str]:
    """The file of each tensor, by a `*.safetensors.index.json`; it can name no file that does not lie beside it."""
    files = read_object(path).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise ValueError(f"{path} has no weight_map; download it again.")
    for file in files.values():
        if not isinstance(file, str) or not re.fullmatch(r"[\w.-]+\.safetensors", file):
            raise ValueError(f"{path} names {file!r}, which is no safetensors file beside it; download it again.")
    return files


def _place(folder: Path, part: str, version: str) -> str:
    return TENCENT_FOLDERS[part].format(version=version) if is_tencent(folder) else part


def component(folder: Path, name: str, version: str = DEFAULT_VERSION) -> Path:
    """The sub-folder of one part; if that is not complete, the error tells all that the model folder lacks."""
    check_version(folder, version)
    if _missing(folder, name, version):
        raise FileNotFoundError(_incomplete(folder, version))
    return folder / _place(folder, name, version)


def check_folder(folder: Path, version: str = DEFAULT_VERSION) -> None:
    """Refuse a folder that lacks anything."""
    check_version(folder, version)
    if missing_files(folder, version):
        raise FileNotFoundError(_incomplete(folder, version))


def check_version(folder: Path, version: str) -> None:
    """The folder is there, and a version is chosen where there are some to choose from."""
    if not folder.is_dir():
        raise FileNotFoundError(f"Model folder '{folder}' does not exist; download_weights.sh makes one.")
    if is_tencent(folder):
        if versions(folder) and version not in versions(folder):
            raise FileNotFoundError(
                f"'{folder}/transformer' has no {version}; choose pretrained_transformer_version of "
                f"{', '.join(versions(folder))}, or get it: bash download_weights.sh --version {version}."
            )
    elif version != DEFAULT_VERSION:
        raise ValueError(
            f"pretrained_transformer_version {version} chooses a folder in Tencent's layout, but '{folder}' has the "
            "layout of diffusers, which holds one transformer; leave it out."
        )


def _incomplete(folder: Path, version: str) -> str:
    missing = missing_files(folder, version)
    text = f"Model folder '{folder}' lacks {', '.join(missing)}; download_weights.sh gets what is missing"
    if any(file.endswith(GLYPH_WEIGHTS) for file in missing):
        text += f", and 'python scripts/convert_weights.py {folder}' makes {Path(GLYPH_WEIGHTS).name} of byt5_model.pt"
    return f"{text}."


def part_config(folder: Path, part: str, version: str = DEFAULT_VERSION) -> dict[str, Any]:
    """Settings of the `transformer` or the `vae` as diffusers calls them."""
    config = read_object(component(folder, part, version) / "config.json")
    if not is_tencent(folder):
        return config
    return tencent.transformer_config(config, version) if part == "transformer" else tencent.vae_config(config)


def sampling_defaults(folder: Path, version: str = DEFAULT_VERSION) -> Sampling:
    """`sampling.json` of the folder, else the built-in table with the guidance that the model was made for."""
    if (folder / "sampling.json").is_file():
        return Sampling.from_json(folder / "sampling.json")
    config = part_config(folder, "transformer", version)
    kind = (config.get("target_size"), config.get("task_type"))
    if kind not in list(SAMPLING):
        known = ", ".join(f"{size} {task}" for size, task in SAMPLING)
        raise ValueError(
            f"'{folder}/transformer' has target_size and task_type {kind[0]!r} {kind[1]!r}, which is none of "
            f"{known}; put a sampling.json into the folder to say how it is sampled."
        )
    guidance = _own_guidance(folder, version)
    return SAMPLING[kind] if guidance is None else replace(SAMPLING[kind], guidance=guidance)


def _own_guidance(folder: Path, version: str) -> float | None:
    if is_tencent(folder):
        return 1.0 if tencent.read_version(version).distilled else None
    guider = folder / "guider" / "guider_config.json"
    if not guider.is_file():
        return None
    guidance = read_object(guider).get("guidance_scale")
    if type(guidance) not in (int, float) or not 0 <= guidance < LARGEST:
        raise ValueError(
            f"{guider} has guidance_scale {guidance!r}; it must be a number of at least 0, below {LARGEST}."
        )
    return guidance
