"""Writes a reward folder in VideoAlign's format, without its weights: settings, rubric, chat template, tokenizer."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from research.tiny.tiny import build_tokenizer
from sage_grpo.rewards.videoalign.folder import DIMENSIONS, MODEL_CONFIG, PREPROCESSOR, TOKENS

CHECKPOINT = "checkpoint-1"
SPECIAL = (
    "<|endoftext|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    *TOKENS,
)
CHAT = (
    "{% for turn in messages %}<|im_start|>{{ turn['role'] }}\n{% for part in turn['content'] %}"
    "{{ '<|vision_start|><|video_pad|><|vision_end|>' if part['type'] == 'video' else part['text'] }}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_folder(
    folder: Path,
    *,
    text: Mapping[str, Any],
    vision: Mapping[str, Any],
    words: Sequence[str],
    template: str,
    settings: Mapping[str, Mapping[str, Any]],
    rows: int | None = None,
) -> int:
    """Write all but the weights; returns the rows of the embedding table, by default as many as there are tokens.

    text, vision: sizes of the two networks. words: each becomes one token. settings: values of `model_config.json`
    beside those that the loader requires.
    """
    tokenizer, rows = tokenizer_of(rows, words)
    ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    required = {name: {**part, **settings.get(name, {})} for name, part in MODEL_CONFIG.items()}
    files = {
        "model_config.json": {**settings, **required},
        "base_config/preprocessor_config.json": PREPROCESSOR,
        "base_config/chat_template.json": {"chat_template": CHAT},
        "base_config/config.json": base_config(text, vision, rows, ids),
        f"{CHECKPOINT}/tokenizer/tokenizer.json": tokenizer,
    }
    for name, value in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(value))
    (folder / "prompt_template.txt").write_bytes(template.encode())
    return rows


def unit_scale() -> dict[str, float]:
    """`inference_config` that leaves scores as they are."""
    scale = {}
    for name in DIMENSIONS:
        scale[f"{name}_mean"] = 0.0
        scale[f"{name}_std"] = 1.0
    return scale


def base_config(
    text: Mapping[str, Any], vision: Mapping[str, Any], rows: int, ids: Mapping[str, int]
) -> dict[str, Any]:
    """`config.json` of Qwen2-VL, flat as it is published."""
    tokens = {
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|endoftext|>"],
    }
    return {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "model_type": "qwen2_vl",
        "vocab_size": rows,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        **text,
        **tokens,
        "vision_config": {
            **vision,
            "hidden_size": text["hidden_size"],
            "mlp_ratio": 4,
            "in_chans": 3,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "spatial_patch_size": 14,
            "temporal_patch_size": 2,
        },
    }


def tokenizer_of(rows: int | None, words: Sequence[str]) -> tuple[dict[str, Any], int]:
    """A `tokenizer.json` and how many tokens it has: one per word, unused ones up to `rows`, then special ones."""
    tokenizer = json.loads(build_tokenizer(words).backend_tokenizer.to_str())
    vocabulary = tokenizer["model"]["vocab"]
    known = {token["content"] for token in tokenizer["added_tokens"]}
    missing = [token for token in SPECIAL if token not in known]
    rows = rows or len(vocabulary) + len(missing)
    if len(vocabulary) + len(missing) > rows:
        raise ValueError(
            f"{len(vocabulary)} words and {len(missing)} special tokens do not fit into {rows} rows"
        )
    for number in range(len(vocabulary), rows - len(missing)):
        vocabulary[f"<unused{number}>"] = number
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    for number, token in enumerate(missing, rows - len(missing)):
        tokenizer["added_tokens"].append({"id": number, "content": token, **flags, "special": True})
    return tokenizer, rows
