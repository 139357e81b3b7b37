"""Make safetensors files of the weights that are only published as torch files.

    python scripts/convert_weights.py ckpts

Converts what it finds of the table below, once: the new file stands beside the old one and names the sha256 of what it
was made from. Torch files are read with `weights_only=True`, here and nowhere else.
"""

import argparse
import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

GLYPH_PREFIX = "module.text_tower.encoder."


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="model folder in Tencent's layout")
    folder = parser.parse_args(arguments).folder
    try:
        found = [(path, tensors_of) for name, tensors_of in CONVERSIONS.items() if (path := folder / name).is_file()]
        if not found:
            raise FileNotFoundError(f"'{folder}' has none of {', '.join(CONVERSIONS)}; run download_weights.sh first.")
        for path, tensors_of in found:
            print(convert(path, tensors_of))
    except (ValueError, FileNotFoundError) as error:
        print(f"convert_weights.py: {error}", file=sys.stderr)
        sys.exit(2)


def convert(path: Path, tensors_of: Callable[[Any], dict[str, Tensor]]) -> str:
    """Write `path` as safetensors unless that was done already; says which."""
    target, sha256 = path.with_suffix(".safetensors"), file_sha256(path)
    if target.is_file() and _made_from(target) == sha256:
        return f"{target} is up to date"
    tensors = tensors_of(torch.load(path, map_location="cpu", weights_only=True))
    if not tensors:
        raise ValueError(f"{path} holds none of the expected tensors; download it again.")
    draft = target.with_suffix(".tmp")
    # safetensors refuses tensors that share memory
    copies = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
    save_file(copies, draft, metadata={"format": "pt", "source": path.name, "source_sha256": sha256})
    draft.replace(target)
    return f"wrote {target}, {len(tensors)} tensors, from {path.name} with sha256 {sha256}"


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _made_from(target: Path) -> str | None:
    with safe_open(target, "pt") as file:
        return (file.metadata() or {}).get("source_sha256")


def glyph_tensors(content: dict[str, Any]) -> dict[str, Tensor]:
    """The ByT5 encoder of Glyph-SDXL-v2 with the names of T5EncoderModel; a whole training state holds more."""
    if "state_dict" in content:
        tensors = content["state_dict"]
        content = {n.removeprefix(GLYPH_PREFIX): t for n, t in tensors.items() if n.startswith(GLYPH_PREFIX)}
    return {f"encoder.{name}": tensor for name, tensor in content.items()}


def same_tensors(content: dict[str, Tensor]) -> dict[str, Tensor]:
    """A plain state dict, its names unchanged."""
    return content


CONVERSIONS: dict[str, Callable[[Any], dict[str, Tensor]]] = {
    "text_encoder/Glyph-SDXL-v2/checkpoints/byt5_model.pt": glyph_tensors,
    "VideoReward/checkpoint-11352/model.pth": same_tensors,
}


if __name__ == "__main__":
    main()
