"""Writes a folder in VideoAlign's format that differs from another one in its reward heads alone; safetensors only."""

import shutil
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from sage_grpo.files.json_files import read_object, write_json
from sage_grpo.rewards.videoalign.folder import newest_checkpoint, read_weights

HEAD = "rm_head.weight"
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
    checkpoint = newest_checkpoint(base)
    for name in SETTINGS:
        (output / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(base / name, output / name)
    for file in (base / "base_config").glob("*.safetensors"):
        shutil.copyfile(file, output / "base_config" / file.name)
    shutil.copytree(checkpoint / "tokenizer", output / checkpoint.name / "tokenizer")
    settings = read_object(base / "model_config.json")
    settings["model_config"]["output_dim"] = len(head)
    write_json(output / "model_config.json", settings)

    for stem in WEIGHTS:
        file = checkpoint / f"{stem}.safetensors"
        if not file.is_file() and not file.with_suffix(".pth").is_file():
            continue
        tensors = read_weights(file)
        for name in tensors:
            if name.endswith(HEAD):
                tensors[name] = head.float().contiguous()
        save_file(tensors, output / checkpoint.name / file.name)
