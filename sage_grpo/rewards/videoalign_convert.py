"""Convert VideoAlign's published `.pth` files to safetensors, once.

    python -m sage_grpo.rewards.videoalign_convert VideoReward

Only tensors are taken from a `.pth` (`weights_only=True`); code in one is refused. The new file keeps the published
names and the SHA-256 of its source. The source stays and may be deleted.
"""

import argparse
import hashlib
import os
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

SOURCES = ("model.pth", "non_lora_state_dict.pth")


def convert_videoalign(folder: str | Path) -> list[Path]:
    """Write a `.safetensors` beside every published `.pth` of the folder; returns the new files."""
    sources = [path for path in sorted(Path(folder).glob("checkpoint-*/*.pth")) if path.name in SOURCES]
    if not sources:
        raise FileNotFoundError(f"{folder} has no checkpoint-N/{' or '.join(SOURCES)}; nothing to convert")
    return [convert_file(source) for source in sources]


def convert_file(source: Path) -> Path:
    """One file. The language head is left out: rewards do not use it, and it shares memory with the embedding."""
    try:
        tensors = torch.load(source, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged bytes raise whatever they lead to
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{source} is damaged or holds more than tensors ({reason}); download it again") from error
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items() if not name.endswith("lm_head.weight")}
    with source.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    target = source.with_suffix(".safetensors")
    unfinished = target.with_suffix(".tmp")
    save_file(tensors, unfinished, metadata={"source": source.name, "source_sha256": digest})
    os.replace(unfinished, target)
    return target


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("videoalign_convert", description="VideoAlign's .pth files to safetensors.")
    parser.add_argument("folder", type=Path, help="the VideoReward folder")
    try:
        for path in convert_videoalign(parser.parse_args(arguments).folder):
            print(f"wrote {path}")
    except (OSError, ValueError) as error:
        print(f"videoalign_convert: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
