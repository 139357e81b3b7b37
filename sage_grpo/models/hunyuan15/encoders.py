"""Both text encoders and their tokenizers, loaded from either layout.

In Tencent's layout the text encoder is the language model inside a full Qwen2.5-VL, and the glyph encoder is ByT5 with
extra tokens for colors and fonts appended, trained as part of Glyph-SDXL-v2.
"""

from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import (
    ByT5Tokenizer,
    Qwen2_5_VLTextConfig,
    Qwen2_5_VLTextModel,
    Qwen2Tokenizer,
    T5Config,
    T5EncoderModel,
)

from sage_grpo.json_files import read_object
from sage_grpo.models.hunyuan15.folder import COLOURS, FONTS, GLYPH_WEIGHTS, ModelFolder
from sage_grpo.models.weights import Rows, Weights, load_model, open_file, open_folder

EMBEDDINGS = ("shared.weight", "encoder.embed_tokens.weight")

Config = TypeVar("Config", Qwen2_5_VLTextConfig, T5Config)


def load_tokenizers(folder: ModelFolder) -> tuple[Qwen2Tokenizer, ByT5Tokenizer]:
    """Tokenizers for the prompt and for the text it quotes."""
    parts = [folder.part(name) for name in ("tokenizer", "tokenizer_2")]
    text = Qwen2Tokenizer.from_pretrained(parts[0], local_files_only=True)
    glyph = ByT5Tokenizer.from_pretrained(parts[1], local_files_only=True)
    if folder.is_tencent:
        glyph.add_tokens(glyph_tokens(folder.part("text_encoder_2")), special_tokens=True)
    return text, glyph


def load_encoders(
    folder: ModelFolder, device: torch.device, dtype: torch.dtype
) -> tuple[Qwen2_5_VLTextModel, T5EncoderModel]:
    """Both text encoders in evaluation mode."""
    text, glyph = (folder.part(name) for name in ("text_encoder", "text_encoder_2"))
    if folder.is_tencent:
        config = read_config(T5Config, read_object(folder.part("tokenizer_2") / "config.json"))
        config.vocab_size = len(load_tokenizers(folder)[1])
        weights = open_file(glyph / GLYPH_WEIGHTS)
    else:
        config, weights = read_config(T5Config, read_object(glyph / "config.json")), open_folder(glyph)
    return qwen_text_model(text, device, dtype), glyph_model(weights, config, device, dtype)


def read_config(kind: type[Config], values: dict[str, Any]) -> Config:
    """Build the config of a transformers model.

    The file may not choose the attention: one named by repository would be downloaded and run. Likewise, nothing here
    uses `from_pretrained`, which follows an `adapter_config.json` to whatever model it names.
    """
    config = kind.from_dict(values)
    config._attn_implementation = None  # torch's best
    return config


def glyph_tokens(folder: Path) -> list[str]:
    """Color and font tokens in the order of their embeddings; a font's first two letters are its language."""
    colours, fonts = (read_object(folder / file) for file in (COLOURS, FONTS))
    return [f"<color-{i}>" for i in range(len(colours))] + [f"<{name[:2]}-font-{i}>" for name, i in fonts.items()]


def qwen_text_model(folder: Path, device: torch.device, dtype: torch.dtype) -> Qwen2_5_VLTextModel:
    """Load the language model of a Qwen2.5-VL folder; old files call it `model`, newer ones `model.language_model`."""
    values = read_object(folder / "config.json")
    config = read_config(Qwen2_5_VLTextConfig, values.get("text_config", values))
    with torch.device("meta"):
        model = Qwen2_5_VLTextModel(config)
    model.rotary_emb = type(model.rotary_emb)(config=config)  # its tables are computed, not stored
    stored = open_folder(folder)
    return load_model(model, stored.renamed(_language_names(stored)), device, dtype).to(device).eval()


def _language_names(weights: Weights) -> dict[str, tuple[Rows, ...]]:
    """Tensor names without the vision tower and output head; a folder with only the language model has no prefix."""
    names = [name for name in weights.names if "visual." not in name and not name.startswith("lm_head.")]
    return {name.removeprefix("model.").removeprefix("language_model."): (Rows(name),) for name in names}


def glyph_model(stored: Weights, config: T5Config, device: torch.device, dtype: torch.dtype) -> T5EncoderModel:
    """ByT5's encoder. Its embedding table has two names, and a file holds one of them: in Glyph-SDXL-v2 the second."""
    with torch.device("meta"):
        model = T5EncoderModel(config)
    recipes = {name: (Rows(name),) for name in stored.names}
    table = next((recipes[name] for name in EMBEDDINGS if name in recipes), None)
    recipes |= dict.fromkeys(EMBEDDINGS, table) if table else {}
    return load_model(model, stored.renamed(recipes), device, dtype).eval()
