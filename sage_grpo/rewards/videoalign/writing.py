"""Writes folders in VideoAlign's format, safetensors only: with other reward heads, or with all weights of a model."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from sage_grpo.files.json_files import read_object, write_json
from sage_grpo.rewards.videoalign.folder import (
    newest_checkpoint,
    open_weights,
    read_weights,
    weight_files,
)

HEAD = "rm_head.weight"
EMBEDDINGS = "embed_tokens.weight"
SETTINGS = (
    "prompt_template.txt",
    "base_config/config.json",
    "base_config/preprocessor_config.json",
    "base_config/chat_template.json",
)
# either layout; `folder.py` describes them
WEIGHTS = ("model", "adapter_model", "non_lora_state_dict")


def write_with_head(base: Path, output: Path, head: Tensor) -> None:
    """Write the reward of `base` with another head (3, hidden) into `output`; all other weights stay as stored."""

    def change(settings: dict[str, Any]) -> None:
        settings["model_config"]["output_dim"] = len(head)

    checkpoint = copy_settings(base, output, change)
    for file in (base / "base_config").glob("*.safetensors"):
        shutil.copyfile(file, output / "base_config" / file.name)
    for stem in WEIGHTS:
        file = checkpoint / f"{stem}.safetensors"
        if not file.is_file() and not file.with_suffix(".pth").is_file():
            continue
        tensors = read_weights(file)
        for name in tensors:
            if name.endswith(HEAD):
                tensors[name] = head.float().contiguous()
        save_file(tensors, output / checkpoint.name / file.name)


def write_with_weights(base: Path, output: Path, model: nn.Module, head: Tensor) -> None:
    """Write the reward of `base` with all weights of a model and a head (3, hidden) into `output`, as one file."""

    def change(settings: dict[str, Any]) -> None:
        settings["model_config"]["output_dim"] = len(head)
        settings["peft_lora_config"]["lora_enable"] = False  # merged

    checkpoint = copy_settings(base, output, change)
    weights = published_weights(model, stored_dtype(base))
    weights[HEAD] = head.detach().float().cpu().contiguous()
    save_file(weights, output / checkpoint.name / "model.safetensors")


def copy_settings(base: Path, output: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Copy all but the weights, with changed values of `model_config.json`; returns the checkpoint of `base`."""
    checkpoint = newest_checkpoint(base)
    for name in SETTINGS:
        (output / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(base / name, output / name)
    shutil.copytree(checkpoint / "tokenizer", output / checkpoint.name / "tokenizer")
    settings = read_object(base / "model_config.json")
    change(settings)
    write_json(output / "model_config.json", settings)
    return checkpoint


def published_weights(model: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """The weights of a `Qwen2VLModel` under their published names, on the CPU."""
    weights = {}
    for name, value in model.state_dict().items():
        published = re.sub("^language_model", "model", name)
        weights[published] = value.detach().to(dtype).cpu().contiguous()
    return weights


def stored_dtype(base: Path) -> torch.dtype:
    """The precision in which a folder stores its weights; they are not read."""
    # with adapters apart, the base model has a table of its own, which comes first
    dtypes = [
        tensor.dtype
        for file in weight_files(base, newest_checkpoint(base))
        for name, tensor in open_weights(file).items()
        if name.endswith(EMBEDDINGS)
    ]
    return dtypes[-1]
