"""Prompts to the text embeddings of Wan 2.1, as the stock pipeline makes them.

UMT5 reads the cleaned prompt. The padding after the prompt's tokens is zero and not masked: the model attends to it.
"""

import inspect
from dataclasses import dataclass

from diffusers import WanPipeline
from diffusers.pipelines.wan.pipeline_wan import is_ftfy_available, prompt_clean
from torch import Tensor
from transformers import T5TokenizerFast, UMT5EncoderModel

from sage_grpo.files.json_files import naming
from sage_grpo.models.embeddings import Conditioning
from sage_grpo.models.text import FolderEncoder, empty_model, load_t5, load_tokenizer
from sage_grpo.models.weights import open_folder

_STOCK = inspect.signature(WanPipeline.__call__).parameters
NUM_TOKENS: int = _STOCK["max_sequence_length"].default


@dataclass(frozen=True)
class PaddedText(Conditioning):
    """Text embeddings of one prompt, padded with zeros."""

    text: Tensor  # (NUM_TOKENS, text_dim)


class TextEncoder(FolderEncoder):
    kind = PaddedText
    parts = ("tokenizer", "text_encoder")
    settings = f"{NUM_TOKENS} {is_ftfy_available()}"  # if installed, ftfy repairs damaged Unicode

    def load(self) -> tuple[tuple[T5TokenizerFast], tuple[UMT5EncoderModel]]:
        tokenizer = load_tokenizer(T5TokenizerFast, self.folder.part("tokenizer"))
        place = self.folder.part("text_encoder")
        empty = empty_model(UMT5EncoderModel, place)
        model = load_t5(empty, open_folder(place), self.device, self.dtype)
        return (tokenizer,), (model,)

    def embed(self, prompt: str) -> PaddedText:
        [tokenizer] = self._tokenizers
        [model] = self._models
        with naming(self.folder.part("tokenizer")):
            tokens = tokenizer(
                prompt_clean(prompt),
                padding="max_length",
                truncation=True,
                max_length=NUM_TOKENS,
                return_tensors="pt",
            ).to(self.device)
        with naming(self.folder.part("text_encoder")):
            states = model(tokens.input_ids, tokens.attention_mask).last_hidden_state[0]
        is_padding = tokens.attention_mask[0, :, None] == 0
        return PaddedText(states.masked_fill(is_padding, 0))
