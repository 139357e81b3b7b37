"""Both text encoders and their tokenizers, from either layout.

In Tencent's layout the text encoder is the language model of a whole Qwen2.5-VL, and the glyph encoder is ByT5 with
tokens for colours and fonts behind its own, trained as part of Glyph-SDXL-v2.
"""

import json
from pathlib import Path

import torch
from transformers import (
    ByT5Tokenizer,
    Qwen2_5_VLTextConfig,
    Qwen2_5_VLTextModel,
    Qwen2Tokenizer,
    T5Config,
    T5EncoderModel,
)

from sage_grpo.models.layout import COLOURS, FONTS, GLYPH_WEIGHTS, component, is_tencent
from sage_grpo.models.tencent import Rows
from sage_grpo.models.weights import Weights, load_model, open_file, open_folder


def load_tokenizers(folder: Path, version: str) -> tuple[Qwen2Tokenizer, ByT5Tokenizer]:
    """Of the prompt and of the text that it quotes."""
    parts = [component(folder, name, version) for name in ("tokenizer", "tokenizer_2")]
    text = Qwen2Tokenizer.from_pretrained(parts[0], local_files_only=True)
    glyph = ByT5Tokenizer.from_pretrained(parts[1], local_files_only=True)
    if is_tencent(folder):
        glyph.add_tokens(glyph_tokens(component(folder, "text_encoder_2", version)), special_tokens=True)
    return text, glyph


def load_encoders(
    folder: Path, version: str, device: torch.device, dtype: torch.dtype
) -> tuple[Qwen2_5_VLTextModel, T5EncoderModel]:
    """In evaluation mode."""
    parts = [component(folder, name, version) for name in ("text_encoder", "text_encoder_2")]
    if is_tencent(folder):
        config = T5Config.from_pretrained(component(folder, "tokenizer_2", version), local_files_only=True)
        _, glyph_tokenizer = load_tokenizers(folder, version)
        config.vocab_size = len(glyph_tokenizer)
        return qwen_text_model(parts[0], device, dtype), glyph_model(parts[1], config, device, dtype)
    kinds = (Qwen2_5_VLTextModel, T5EncoderModel)
    text, glyph = (
        kind.from_pretrained(part, dtype=dtype, local_files_only=True, use_safetensors=True).to(device).eval()
        for kind, part in zip(kinds, parts, strict=True)
    )
    return text, glyph


def glyph_tokens(folder: Path) -> list[str]:
    """Tokens of colours and fonts in the order of their embeddings; a font's first two letters are its language."""
    colours, fonts = (json.loads((folder / file).read_text()) for file in (COLOURS, FONTS))
    return [f"<color-{i}>" for i in range(len(colours))] + [f"<{name[:2]}-font-{i}>" for name, i in fonts.items()]


def qwen_text_model(folder: Path, device: torch.device, dtype: torch.dtype) -> Qwen2_5_VLTextModel:
    """The language model of a Qwen2.5-VL folder; older files call it `model`, newer ones `model.language_model`."""
    config = json.loads((folder / "config.json").read_text())
    config = Qwen2_5_VLTextConfig.from_dict(config.get("text_config", config))
    with torch.device("meta"):
        model = Qwen2_5_VLTextModel(config)
    model.rotary_emb = type(model.rotary_emb)(config=config)  # its tables are computed, not stored
    stored = open_folder(folder)
    return load_model(model, stored.renamed(_language_names(stored)), device, dtype).to(device).eval()


def _language_names(weights: Weights) -> dict[str, tuple[Rows, ...]]:
    """Without vision tower and output head; a folder that holds the language model alone has no prefix."""
    names = [name for name in weights.names if "visual." not in name and not name.startswith("lm_head.")]
    return {name.removeprefix("model.").removeprefix("language_model."): (Rows(name),) for name in names}


def glyph_model(folder: Path, config: T5Config, device: torch.device, dtype: torch.dtype) -> T5EncoderModel:
    """ByT5's encoder with the weights of Glyph-SDXL-v2, which `scripts/convert_weights.py` made safe to load."""
    with torch.device("meta"):
        model = T5EncoderModel(config)
    stored = open_file(folder / GLYPH_WEIGHTS)
    recipes = {name: (Rows(name),) for name in stored.names}
    recipes["shared.weight"] = (Rows("encoder.embed_tokens.weight"),)  # one table under two names
    return load_model(model, stored.renamed(recipes), device, dtype).eval()
