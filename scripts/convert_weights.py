"""Convert weights that are only published as torch files to safetensors.

    python scripts/convert_weights.py ckpts

Converts every file of the table below that it finds, once: the new file is next to the old one and stores its sha256.
Torch files are read with `weights_only=True`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sage_grpo.config.command_line import Parser, answering

if TYPE_CHECKING:
    from torch import Tensor

GLYPH_PREFIX = "module.text_tower.encoder."


@answering("convert_weights.py: ")
def main(arguments: list[str] | None = None) -> None:
    parser = Parser("scripts/convert_weights.py", __doc__)
    parser.add_argument(
        "folder", type=Path, metavar="FOLDER", help="model folder in Tencent's layout"
    )
    convert_folder(parser.parse_args(arguments).folder)


def convert_folder(folder: Path) -> None:
    """Convert every file that the table names, and print what was done."""
    from sage_grpo.files.torch_files import convert  # takes seconds

    any_file = False
    for pattern, tensors_of in CONVERSIONS.items():
        for path in sorted(folder.glob(pattern)):
            any_file = True
            print(convert(path, tensors_of))
    if not any_file:
        raise FileNotFoundError(
            f"'{folder}' has none of {', '.join(CONVERSIONS)}; run download_weights.sh first."
        )


def glyph_tensors(content: dict[str, Any]) -> "dict[str, Tensor]":
    """The ByT5 encoder of Glyph-SDXL-v2 under T5EncoderModel names; a full training state holds more."""
    if "state_dict" not in content:
        return {f"encoder.{name}": tensor for name, tensor in content.items()}
    return {
        f"encoder.{name.removeprefix(GLYPH_PREFIX)}": tensor
        for name, tensor in content["state_dict"].items()
        if name.startswith(GLYPH_PREFIX)
    }


# pattern of files -> what selects and names the tensors in one
CONVERSIONS: "dict[str, Callable[[Any], dict[str, Tensor]]]" = {
    "text_encoder/Glyph-SDXL-v2/checkpoints/byt5_model.pt": glyph_tensors,
    "VideoReward/checkpoint-*/model.pth": dict,
    "VideoReward/checkpoint-*/non_lora_state_dict.pth": dict,
}


if __name__ == "__main__":
    main()
