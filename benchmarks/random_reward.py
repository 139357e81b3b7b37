"""VideoAlign with random weights: the published folder's files, tensor names and sizes (`random_model.py --reward`)."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2VLConfig, Qwen2VLModel

from benchmarks.random_model import Writer
from embedded.tiny import build_tokenizer
from sage_grpo.rewards.videoalign_folder import DIMENSIONS, MODEL_CONFIG, PREPROCESSOR, TOKENS

SPECIAL = ("<|endoftext|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", *TOKENS)
CHAT = (
    "{% for turn in messages %}<|im_start|>{{ turn['role'] }}\n{% for part in turn['content'] %}"
    "{{ '<|vision_start|><|video_pad|><|vision_end|>' if part['type'] == 'video' else part['text'] }}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATE_BYTES = 3997  # of the published rubric
FULL = {
    "rows": 151660,  # the embedding table has one row per token
    "rank": 64,
    "text": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
             "num_key_value_heads": 2, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}},
    "vision": {"depth": 32, "embed_dim": 1280, "hidden_size": 1536, "num_heads": 16},
}  # fmt: skip
TINY = {
    "rows": None,  # as many as the tokenizer needs
    "rank": 8,
    "text": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}},
    "vision": {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2},
}  # fmt: skip
LORA = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_reward(folder: Path, tiny: bool, words: Sequence[str], writer: Writer) -> int:
    """Begin to write the folder; returns the number of stored values."""
    sizes = TINY if tiny else FULL
    checkpoint, base = folder / "checkpoint-1", folder / "base_config"
    for part in (checkpoint / "tokenizer", base):
        part.mkdir(parents=True)
    tokenizer, rows = tokenizer_of(sizes["rows"], words)
    ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    files = {
        folder / "model_config.json": settings(sizes["rank"]),
        base / "preprocessor_config.json": PREPROCESSOR,
        base / "chat_template.json": {"chat_template": CHAT},
        base / "config.json": base_config(sizes, rows, ids),
        checkpoint / "tokenizer" / "tokenizer.json": tokenizer,
    }
    for path, value in files.items():
        path.write_text(json.dumps(value))
    (folder / "prompt_template.txt").write_bytes(template().encode())
    shapes = published_shapes(Qwen2VLConfig.from_pretrained(base), rows, sizes["rank"])
    writer.file(checkpoint / "model.safetensors", shapes)
    return sum(torch.Size(shape).numel() for shape in shapes.values())


def settings(rank: int) -> dict[str, Any]:
    """`model_config.json`: what the loader requires, and the published numbers; scores are not normalized."""
    numbers = {
        "data_config": {"fps": 2.0, "max_frame_pixels": 200704, "num_frames": None},
        "model_config": {"output_dim": 1},
        "peft_lora_config": {"lora_enable": True, "lora_r": rank, "lora_alpha": 2 * rank},
    }
    norm = {f"{name}_{kind}": value for name in DIMENSIONS for kind, value in (("mean", 0.0), ("std", 1.0))}
    return {name: {**part, **numbers[name]} for name, part in MODEL_CONFIG.items()} | {"inference_config": norm}


def base_config(sizes: Mapping[str, Any], rows: int, ids: Mapping[str, int]) -> dict[str, Any]:
    """`config.json` of Qwen2-VL, flat as it is published."""
    tokens = {f"{name}_token_id": ids[f"<|{name}|>"] for name in ("vision_start", "vision_end")}
    tokens |= {f"{name}_token_id": ids[f"<|{name}_pad|>"] for name in ("image", "video")}
    tokens |= dict.fromkeys(("bos_token_id", "eos_token_id"), ids["<|endoftext|>"])
    vision = {"mlp_ratio": 4, "in_chans": 3, "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14}
    return {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "model_type": "qwen2_vl",
        "vocab_size": rows,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        **sizes["text"],
        **tokens,
        "vision_config": {**sizes["vision"], **vision, "temporal_patch_size": 2},
    }


def tokenizer_of(rows: int | None, words: Sequence[str]) -> tuple[dict[str, Any], int]:
    """A `tokenizer.json` and how many tokens it has: one per word, unused ones up to `rows`, then special ones."""
    tokenizer = json.loads(build_tokenizer(words).backend_tokenizer.to_str())
    vocabulary, known = tokenizer["model"]["vocab"], {token["content"] for token in tokenizer["added_tokens"]}
    missing = [token for token in SPECIAL if token not in known]
    rows = rows or len(vocabulary) + len(missing)
    if len(vocabulary) + len(missing) > rows:
        raise ValueError(f"{len(vocabulary)} words and {len(missing)} special tokens do not fit into {rows} rows")
    for number in range(len(vocabulary), rows - len(missing)):
        vocabulary[f"<unused{number}>"] = number
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    for number, token in enumerate(missing, rows - len(missing)):
        tokenizer["added_tokens"].append({"id": number, "content": token, **flags, "special": True})
    return tokenizer, rows


def template() -> str:
    """A rubric in our words, as long as the published one."""
    parts = [
        f"Look at the clip and give a mark for {name}.\n{{filler}}\n<|{token}_reward|>\n"
        for name, token in (("the picture", "VQ"), ("the motion", "MQ"), ("the match with {text_prompt}", "TA"))
    ]
    filler = "A good clip is sharp, steady and shows what the prompt asks for. "
    room = TEMPLATE_BYTES - sum(len(part) - len("{filler}") for part in parts)
    lengths = [room // 3, room // 3, room - 2 * (room // 3)]
    text = filler * (TEMPLATE_BYTES // len(filler))
    return "".join(part.replace("{filler}", text[:length]) for part, length in zip(parts, lengths, strict=True))


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
    heads = {"base_model.model.lm_head.weight": (rows, hidden), "base_model.model.rm_head.weight": (1, hidden)}
    return shapes | heads
