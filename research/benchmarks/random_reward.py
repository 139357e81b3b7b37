"""VideoAlign with random weights: the published folder's files, tensor names and sizes (`random_model.py --reward`)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2VLConfig, Qwen2VLModel

from research.benchmarks.random_weights import Writer
from research.tiny.videoreward.folder import CHECKPOINT, unit_scale, write_folder

TEMPLATE_BYTES = 3997  # of the published rubric
FULL = {
    "rows": 151660,  # the embedding table has one row per token
    "rank": 64,
    "text": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
             "num_key_value_heads": 2, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}},
    "vision": {"depth": 32, "embed_dim": 1280, "num_heads": 16},
}  # fmt: skip
TINY = {
    "rows": None,  # as many as the tokenizer needs
    "rank": 8,
    "text": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}},
    "vision": {"depth": 2, "embed_dim": 32, "num_heads": 2},
}  # fmt: skip
LORA = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_reward(folder: Path, tiny: bool, words: Sequence[str], writer: Writer) -> int:
    """Begin to write the folder; returns the number of stored values."""
    sizes = TINY if tiny else FULL
    rows = write_folder(
        folder,
        text=sizes["text"],
        vision=sizes["vision"],
        words=words,
        rows=sizes["rows"],
        template=template(),
        settings=settings(sizes["rank"]),
    )
    config = Qwen2VLConfig.from_pretrained(folder / "base_config")
    shapes = published_shapes(config, rows, sizes["rank"])
    writer.file(folder / CHECKPOINT / "model.safetensors", shapes)
    return sum(torch.Size(shape).numel() for shape in shapes.values())


def settings(rank: int) -> dict[str, Any]:
    """The published numbers of `model_config.json`; scores are not normalized."""
    return {
        "data_config": {"fps": 2.0, "max_frame_pixels": 200704, "num_frames": None},
        "model_config": {"output_dim": 1},
        "peft_lora_config": {"lora_enable": True, "lora_r": rank, "lora_alpha": 2 * rank},
        "inference_config": unit_scale(),
    }


def template() -> str:
    """A rubric in our words, as long as the published one."""
    subjects = {"VQ": "the picture", "MQ": "the motion", "TA": "the match with {text_prompt}"}
    parts = [
        f"Look at the clip and give a mark for {subject}.\n{{filler}}\n<|{token}_reward|>\n"
        for token, subject in subjects.items()
    ]
    filler = "A good clip is sharp, steady and shows what the prompt asks for. "
    room = TEMPLATE_BYTES - sum(len(part) - len("{filler}") for part in parts)
    third = room // 3
    lengths = [third, third, room - 2 * third]
    text = filler * (TEMPLATE_BYTES // len(filler))
    filled = [
        part.replace("{filler}", text[:length]) for part, length in zip(parts, lengths, strict=True)
    ]
    return "".join(filled)


def published_shapes(config: Qwen2VLConfig, rows: int, rank: int) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors of `model.pth`: Qwen2-VL, LoRA on the language model's linear layers, both heads."""
    with torch.device("meta"):
        model = Qwen2VLModel(config)
    hidden = config.text_config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {}
    for name, tensor in model.state_dict().items():
        language = name.startswith("language_model.")
        full = f"base_model.model.{name.replace('language_model.', 'model.', 1)}"
        layer, _, kind = full.rpartition(".")
        if not language or not layer.endswith(LORA):
            shapes[full] = tuple(tensor.shape)
            continue
        shapes[f"{layer}.base_layer.{kind}"] = tuple(tensor.shape)
        if kind == "weight":
            shapes[f"{layer}.lora_A.default.weight"] = (rank, tensor.shape[1])
            shapes[f"{layer}.lora_B.default.weight"] = (tensor.shape[0], rank)
    heads = {
        "base_model.model.lm_head.weight": (rows, hidden),
        "base_model.model.rm_head.weight": (1, hidden),
    }
    return shapes | heads
