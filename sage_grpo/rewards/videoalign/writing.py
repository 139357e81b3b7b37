"""Writes a folder in VideoAlign's format: weights under their published names, in safetensors."""

import re
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from sage_grpo.files.json_files import read_object, write_json
from sage_grpo.rewards.videoalign.folder import newest_checkpoint

WEIGHTS = "model.safetensors"
COPIED = (
    "prompt_template.txt",
    "base_config/config.json",
    "base_config/preprocessor_config.json",
    "base_config/chat_template.json",
)


def write_weights(checkpoint: Path, model: nn.Module, head: Tensor, dtype: torch.dtype) -> None:
    """Write a Qwen2-VL, LoRA merged, in `dtype`, and its reward head (output_dim, hidden)."""
    weights = {
        re.sub("^language_model", "model", name): value
        for name, value in model.state_dict().items()
    }
    tensors = {name: value.detach().to(dtype).cpu().contiguous() for name, value in weights.items()}
    tensors["rm_head.weight"] = head.detach().cpu().contiguous()
    save_file(tensors, checkpoint / WEIGHTS)


def write_variant(
    base: Path, output: Path, model: nn.Module, head: Tensor, dtype: torch.dtype
) -> None:
    """Write the reward of the folder `base` with other weights: all in one file, LoRA merged, same normalization."""
    checkpoint = newest_checkpoint(base)
    for name in COPIED:
        (output / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(base / name, output / name)
    shutil.copytree(checkpoint / "tokenizer", output / checkpoint.name / "tokenizer")
    settings = read_object(base / "model_config.json")
    settings["model_config"]["output_dim"] = len(head)
    settings["peft_lora_config"]["lora_enable"] = False
    write_json(output / "model_config.json", settings)
    write_weights(output / checkpoint.name, model, head, dtype)
