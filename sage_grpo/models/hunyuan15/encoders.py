"""Both text encoders and their tokenizers, loaded from either layout.

In Tencent's layout the text encoder is the language model inside a full Qwen2.5-VL, and the glyph encoder is ByT5 with
extra tokens for colors and fonts appended, trained as part of Glyph-SDXL-v2.
"""

from pathlib import Path
from typing import TypeVar

import torch
from transformers import ByT5Tokenizer, Qwen2_5_VLTextModel, Qwen2Tokenizer, T5EncoderModel

from sage_grpo.json_files import naming, read_config, read_object
from sage_grpo.models.hunyuan15.folder import COLOURS, FONTS, GLYPH_WEIGHTS, ModelFolder
from sage_grpo.models.weights import Rows, Weights, load_model, open_file, open_folder

EMBEDDINGS = ("shared.weight", "encoder.embed_tokens.weight")

Model = TypeVar("Model", Qwen2_5_VLTextModel, T5EncoderModel)


def load_tokenizers(folder: ModelFolder) -> tuple[Qwen2Tokenizer, ByT5Tokenizer]:
    """Tokenizers for the prompt and for the text it quotes."""
    found = []
    for kind, part in ((Qwen2Tokenizer, folder.part("tokenizer")), (ByT5Tokenizer, folder.part("tokenizer_2"))):
        with naming(part / "tokenizer_config.json"):
            found.append(kind.from_pretrained(part, local_files_only=True))
    text, glyph = found
    if folder.is_tencent:
        glyph.add_tokens(glyph_tokens(folder.part("text_encoder_2")), special_tokens=True)
    return text, glyph


def load_encoders(
    folder: ModelFolder, device: torch.device, dtype: torch.dtype
) -> tuple[Qwen2_5_VLTextModel, T5EncoderModel]:
    """Both text encoders in evaluation mode."""
    text, glyph = (folder.part(name) for name in ("text_encoder", "text_encoder_2"))
    if folder.is_tencent:
        empty = empty_model(T5EncoderModel, folder.part("tokenizer_2"), vocab_size=len(load_tokenizers(folder)[1]))
        weights = open_file(glyph / GLYPH_WEIGHTS)
    else:
        empty, weights = empty_model(T5EncoderModel, glyph), open_folder(glyph)
    return qwen_text_model(text, device, dtype), glyph_model(weights, empty, device, dtype)


def empty_model(kind: type[Model], folder: Path, **settings: int) -> Model:
    """A transformers model with the config in a folder, and `settings` on top, on the meta device.

    The file may not choose the attention: one named by repository would be downloaded and run. Likewise, nothing here
    uses `from_pretrained`, which follows an `adapter_config.json` to whatever model it names.
    """
    path = folder / "config.json"
    values = read_config(path)
    with naming(path), torch.device("meta"):
        config = kind.config_class.from_dict({**values.get("text_config", values), **settings})
        config._attn_implementation = None  # torch's best
        return kind(config)


def glyph_tokens(folder: Path) -> list[str]:
    """Color and font tokens in the order of their embeddings; a font's first two letters are its language."""
    colours, fonts = (read_object(folder / file) for file in (COLOURS, FONTS))
    return [f"<color-{i}>" for i in range(len(colours))] + [f"<{name[:2]}-font-{i}>" for name, i in fonts.items()]


def qwen_text_model(folder: Path, device: torch.device, dtype: torch.dtype) -> Qwen2_5_VLTextModel:
    """Load the language model of a Qwen2.5-VL folder; old files call it `model`, newer ones `model.language_model`."""
    stored, model = open_folder(folder), empty_model(Qwen2_5_VLTextModel, folder)
    # without the vision tower and the output head; a folder with only the language model has no prefix
    names = [name for name in stored.names if "visual." not in name and not name.startswith("lm_head.")]
    recipes = {name.removeprefix("model.").removeprefix("language_model."): (Rows(name),) for name in names}
    load_model(model, stored.renamed(recipes), device, dtype)
    with naming(folder / "config.json"):
        model.rotary_emb = type(model.rotary_emb)(config=model.config)  # its tables are computed, not stored
    return model.to(device).eval()


def glyph_model(stored: Weights, model: T5EncoderModel, device: torch.device, dtype: torch.dtype) -> T5EncoderModel:
    """ByT5's encoder. Its embedding table has two names, and a file holds one of them: in Glyph-SDXL-v2 the second."""
    recipes = {name: (Rows(name),) for name in stored.names}
    table = next((recipes[name] for name in EMBEDDINGS if name in recipes), None)
    recipes |= dict.fromkeys(EMBEDDINGS, table) if table else {}
    return load_model(model, stored.renamed(recipes), device, dtype).eval()
