"""Prompts to the text embeddings of Wan 2.1, as the stock pipeline makes them.

UMT5 reads the cleaned prompt. What follows the prompt's tokens is set to zero and not masked: the model attends to it.
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

NUM_TOKENS: int = inspect.signature(WanPipeline.__call__).parameters["max_sequence_length"].default


@dataclass(frozen=True)
class PaddedText(Conditioning):
    """Text embeddings of one prompt with their padding."""

    text: Tensor  # (NUM_TOKENS, text_dim)


class TextEncoder(FolderEncoder):
    kind, parts = PaddedText, ("tokenizer", "text_encoder")
    settings = (
        f"{NUM_TOKENS} {is_ftfy_available()}"  # ftfy repairs damaged Unicode if it is installed
    )

    def load(self) -> tuple[tuple[T5TokenizerFast], tuple[UMT5EncoderModel]]:
        texts, encoder = (self.folder.part(name) for name in self.parts)
        model = load_t5(
            empty_model(UMT5EncoderModel, encoder), open_folder(encoder), self.device, self.dtype
        )
        return (load_tokenizer(T5TokenizerFast, texts),), (model,)

    def embed(self, prompt: str) -> PaddedText:
        limits = {"padding": "max_length", "truncation": True, "max_length": NUM_TOKENS}
        with naming(self.folder.part("tokenizer")):
            tokens = self._tokenizers[0](prompt_clean(prompt), **limits, return_tensors="pt").to(
                self.device
            )
        with naming(self.folder.part("text_encoder")):
            states = self._models[0](tokens.input_ids, tokens.attention_mask).last_hidden_state[0]
        return PaddedText(states.masked_fill(tokens.attention_mask[0, :, None] == 0, 0))
