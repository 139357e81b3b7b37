"""Prompts to packed text embeddings, and the two encoders that make them, from either layout.

Same result as the stock pipeline's `encode_prompt` without padding: Qwen2.5-VL reads the chat template, its
third-to-last hidden state is kept and the template's 108 tokens are cropped; ByT5 reads only quoted text. In Tencent's
layout the text encoder is the language model inside a full Qwen2.5-VL, and the glyph encoder is ByT5 with extra tokens
for colors and fonts appended, trained as part of Glyph-SDXL-v2.

Shapes: L text tokens, M glyph tokens.
"""

import inspect
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import HunyuanVideo15Pipeline
from diffusers.pipelines.hunyuan_video1_5.pipeline_hunyuan_video1_5 import (
    extract_glyph_texts,
    format_text_input,
)
from torch import Tensor
from transformers import ByT5Tokenizer, Qwen2_5_VLTextModel, Qwen2Tokenizer, T5EncoderModel

from sage_grpo.files.json_files import naming, read_object
from sage_grpo.models.embeddings import Conditioning
from sage_grpo.models.hunyuan15.folder import COLORS, FONTS, GLYPH_WEIGHTS, ModelFolder
from sage_grpo.models.text import FolderEncoder, empty_model, load_t5, load_tokenizer
from sage_grpo.models.weights import Weights, load_model, open_file, open_folder

# The stock pipeline's settings are defaults of its methods.
_STOCK_TEXT = inspect.signature(HunyuanVideo15Pipeline._get_mllm_prompt_embeds).parameters
SYSTEM_MESSAGE: str = _STOCK_TEXT["system_message"].default
TEMPLATE_TOKENS: int = _STOCK_TEXT["crop_start"].default
MAX_TEXT_TOKENS: int = _STOCK_TEXT["tokenizer_max_length"].default
HIDDEN_STATE = -(_STOCK_TEXT["num_hidden_layers_to_skip"].default + 1)

_STOCK_GLYPH = inspect.signature(HunyuanVideo15Pipeline._get_byt5_prompt_embeds).parameters
MAX_GLYPH_TOKENS: int = _STOCK_GLYPH["tokenizer_max_length"].default

Tokenizers = tuple[Qwen2Tokenizer, ByT5Tokenizer]
Encoders = tuple[Qwen2_5_VLTextModel, T5EncoderModel]


@dataclass(frozen=True)
class TextConditioning(Conditioning):
    """Text embeddings of one prompt without padding."""

    text: Tensor  # (L, text_dim)
    glyph: Tensor  # (M, glyph_dim), M = 0 if the prompt quotes nothing

    @property
    def tokens(self) -> tuple[Tensor, ...]:
        """Context tokens, which join those of the video."""
        return self.text, self.glyph


class TextEncoder(FolderEncoder):
    """Both text encoders of a model folder."""

    kind = TextConditioning
    parts = ("tokenizer", "text_encoder", "tokenizer_2", "text_encoder_2")
    settings = f"{TEMPLATE_TOKENS} {HIDDEN_STATE} {SYSTEM_MESSAGE}"

    def load(self) -> tuple[Tokenizers, Encoders]:
        return load_tokenizers(self.folder), load_encoders(self.folder, self.device, self.dtype)

    def embed(self, prompt: str) -> TextConditioning:
        return TextConditioning(text=self._text(prompt), glyph=self._glyph(prompt))

    def _text(self, prompt: str) -> Tensor:
        """(L, text_dim), without padding: in a causal model, right padding cannot affect earlier tokens."""
        turns = format_text_input([prompt], SYSTEM_MESSAGE)
        with naming(self.folder.part("tokenizer")):
            tokens = self._tokenizers[0].apply_chat_template(
                turns,
                truncation=True,
                max_length=MAX_TEXT_TOKENS + TEMPLATE_TOKENS,
                add_generation_prompt=True,
                tokenize=True,
                return_dict=True,
                return_tensors="pt",
            )
        with naming(self.folder.part("text_encoder")):
            input_ids = tokens.input_ids.to(self.device)
            output = self._models[0](input_ids=input_ids, output_hidden_states=True)
            return output.hidden_states[HIDDEN_STATE][0, TEMPLATE_TOKENS:].clone()

    def _glyph(self, prompt: str) -> Tensor:
        """(M, glyph_dim); M = 0 if the prompt quotes nothing."""
        quoted = extract_glyph_texts(prompt)
        if quoted is None:
            width = self._models[1].config.d_model
            return torch.zeros(0, width, dtype=self.dtype, device=self.device)
        with naming(self.folder.part("tokenizer_2")):
            tokens = self._tokenizers[1](
                quoted, truncation=True, max_length=MAX_GLYPH_TOKENS, return_tensors="pt"
            )
        with naming(self.folder.part("text_encoder_2")):
            return self._models[1](input_ids=tokens.input_ids.to(self.device)).last_hidden_state[0]


def load_tokenizers(folder: ModelFolder) -> Tokenizers:
    """Tokenizers for the prompt and for the text it quotes."""
    text = load_tokenizer(Qwen2Tokenizer, folder.part("tokenizer"))
    glyph = load_tokenizer(ByT5Tokenizer, folder.part("tokenizer_2"))
    if folder.is_tencent:
        glyph.add_tokens(glyph_tokens(folder.part("text_encoder_2")), special_tokens=True)
    return text, glyph


def load_encoders(folder: ModelFolder, device: torch.device, dtype: torch.dtype) -> Encoders:
    """Both text encoders in evaluation mode."""
    text = folder.part("text_encoder")
    glyph = folder.part("text_encoder_2")
    if folder.is_tencent:
        _, tokenizer = load_tokenizers(folder)
        empty = empty_model(T5EncoderModel, folder.part("tokenizer_2"), vocab_size=len(tokenizer))
        stored = open_file(glyph / GLYPH_WEIGHTS)
    else:
        empty = empty_model(T5EncoderModel, glyph)
        stored = open_folder(glyph)
    return qwen_text_model(text, device, dtype), load_t5(empty, stored, device, dtype)


def glyph_tokens(folder: Path) -> list[str]:
    """Color and font tokens in the order of their embeddings; a font's first two letters are its language."""
    colors = read_object(folder / COLORS)
    fonts = read_object(folder / FONTS)
    color_tokens = [f"<color-{i}>" for i in range(len(colors))]
    font_tokens = [f"<{name[:2]}-font-{i}>" for name, i in fonts.items()]
    return color_tokens + font_tokens


def qwen_text_model(folder: Path, device: torch.device, dtype: torch.dtype) -> Qwen2_5_VLTextModel:
    """Load the language model of a Qwen2.5-VL folder, without its vision tower and output head.

    Old files call it `model`, newer ones `model.language_model`; a folder with only the language model has no prefix.
    """
    stored = open_folder(folder)
    pieces = {
        name.removeprefix("model.").removeprefix("language_model."): piece
        for name, piece in stored.pieces.items()
        if "visual." not in name and not name.startswith("lm_head.")
    }
    model = empty_model(Qwen2_5_VLTextModel, folder)
    load_model(model, Weights(folder, pieces), device, dtype)
    with naming(folder / "config.json"):
        # its tables are computed, not stored
        model.rotary_emb = type(model.rotary_emb)(config=model.config)
    return model.to(device).eval()
