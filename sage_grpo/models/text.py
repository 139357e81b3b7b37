"""Prompts to packed text embeddings; each prompt is encoded once, and then the encoders may leave the device.

Same result as the stock pipeline's `encode_prompt` with its padding removed: Qwen2.5-VL reads the chat template, its
third hidden state from the end is kept and the template's 108 tokens are cropped; ByT5 reads only quoted text.

Shapes: L text tokens, M glyph tokens.
"""

import hashlib
import inspect
import os
import uuid
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path

import torch
from diffusers import HunyuanVideo15Pipeline
from diffusers.pipelines.hunyuan_video1_5.pipeline_hunyuan_video1_5 import extract_glyph_texts, format_text_input
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm
from transformers import ByT5Tokenizer, Qwen2_5_VLTextModel, Qwen2Tokenizer, T5EncoderModel

from sage_grpo.models.encoders import load_encoders, load_tokenizers
from sage_grpo.models.layout import DEFAULT_VERSION, component
from sage_grpo.models.policy import Conditioning

_STOCK = inspect.signature(HunyuanVideo15Pipeline._get_mllm_prompt_embeds).parameters
SYSTEM_MESSAGE: str = _STOCK["system_message"].default
TEMPLATE_TOKENS: int = _STOCK["crop_start"].default
MAX_TEXT_TOKENS: int = _STOCK["tokenizer_max_length"].default
HIDDEN_STATE = -(_STOCK["num_hidden_layers_to_skip"].default + 1)
MAX_GLYPH_TOKENS: int = (
    inspect.signature(HunyuanVideo15Pipeline._get_byt5_prompt_embeds).parameters["tokenizer_max_length"].default
)

ENCODER_PARTS = ("tokenizer", "text_encoder", "tokenizer_2", "text_encoder_2")


class PromptEncoder:
    """Both text encoders of a model folder; loaded at the first prompt that the cache does not hold.

    Embeddings wait on disk where there is a `cache_dir`, else in host memory.
    """

    def __init__(
        self,
        folder: Path,
        device: torch.device,
        dtype: torch.dtype,
        cache_dir: Path | None = None,
        version: str = DEFAULT_VERSION,
    ) -> None:
        self.folder, self.device, self.dtype, self.version = folder, device, dtype, version
        self._models: tuple[Qwen2_5_VLTextModel, T5EncoderModel] | None = None
        self._tokenizers: tuple[Qwen2Tokenizer, ByT5Tokenizer] | None = None
        self.cache: dict[str, Conditioning] | EmbeddingCache = {}
        if cache_dir is not None:
            self.cache = EmbeddingCache(cache_dir, encoder_identity(folder, dtype, version))

    def __call__(self, prompts: Sequence[str]) -> list[Conditioning]:
        """One conditioning per prompt, on the encoder's device."""
        return [self._cached(prompt).to(self.device) for prompt in prompts]

    def prepare(self, prompts: Iterable[str], rank: int = 0, count: int = 1) -> None:
        """Encode what the cache lacks, so that no call for one of these prompts needs the encoders again.

        `count` ranks share the work where they share a folder. Each takes its part, then what others have not done
        yet, from the far end: nobody waits for anybody, and a rank that is slow or missing is made up for.
        """
        missing = [prompt for prompt in dict.fromkeys(prompts) if prompt not in self.cache]
        start, end = 0, len(missing)
        if isinstance(self.cache, EmbeddingCache):
            start, end = (len(missing) * part // count for part in (rank, rank + 1))
        bar = tqdm(missing[start:end], "prompt embeddings", unit="prompt", disable=rank > 0 or start == end)
        for prompt in chain(bar, reversed(missing[end:] + missing[:start])):
            self._cached(prompt)

    def release(self) -> None:
        """Free the encoders; the next uncached prompt loads them again."""
        self._models = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # gigabytes that others on the device may need

    def _cached(self, prompt: str) -> Conditioning:
        if prompt not in self.cache:
            self.cache[prompt] = self._encode(prompt).to("cpu")
        return self.cache[prompt]

    @torch.no_grad()
    def _encode(self, prompt: str) -> Conditioning:
        if self._models is None:
            self._load()
        return Conditioning(text=self._text(prompt), glyph=self._glyph(prompt))

    def _load(self) -> None:
        self._tokenizers = load_tokenizers(self.folder, self.version)
        self._models = load_encoders(self.folder, self.version, self.device, self.dtype)

    def _text(self, prompt: str) -> Tensor:
        """(L, text_dim). Right padding cannot reach the tokens before it in a causal model, so there is none."""
        tokens = self._tokenizers[0].apply_chat_template(
            format_text_input([prompt], SYSTEM_MESSAGE),
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            truncation=True,
            max_length=MAX_TEXT_TOKENS + TEMPLATE_TOKENS,
            return_tensors="pt",
        )
        hidden = self._models[0](input_ids=tokens.input_ids.to(self.device), output_hidden_states=True).hidden_states
        return hidden[HIDDEN_STATE][0, TEMPLATE_TOKENS:].clone()

    def _glyph(self, prompt: str) -> Tensor:
        """(M, glyph_dim); M = 0 where the prompt quotes nothing."""
        quoted = extract_glyph_texts(prompt)
        if quoted is None:
            return torch.zeros(0, self._models[1].config.d_model, dtype=self.dtype, device=self.device)
        tokens = self._tokenizers[1](quoted, truncation=True, max_length=MAX_GLYPH_TOKENS, return_tensors="pt")
        return self._models[1](input_ids=tokens.input_ids.to(self.device)).last_hidden_state[0]


class EmbeddingCache:
    """One safetensors file per prompt in a folder per encoder, read as a dictionary; processes may share it."""

    def __init__(self, folder: Path, identity: str) -> None:
        self.folder = Path(folder) / identity

    def __contains__(self, prompt: str) -> bool:
        """Whether it is stored; a file that is not whole is refused here, long before it is needed."""
        path = self.path(prompt)
        if not path.exists():
            return False
        try:
            with safe_open(path, "pt"):
                return True
        except SafetensorError as error:
            raise ValueError(f"prompt_cache: {path} is damaged ({error}); delete it") from error

    def __getitem__(self, prompt: str) -> Conditioning:
        """The stored conditioning on the CPU."""
        return Conditioning(**load_file(self.path(prompt)))

    def __setitem__(self, prompt: str, cond: Conditioning) -> None:
        """Write under a name of its own and rename, so that no reader meets half a file."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"prompt_cache: {self.folder} cannot be made ({error}); name another folder") from error
        path = self.path(prompt)
        unfinished = path.with_suffix(f".{uuid.uuid4().hex}.tmp")
        tensors = {"text": cond.text.contiguous(), "glyph": cond.glyph.contiguous()}
        save_file(tensors, unfinished, metadata={"prompt": prompt})
        os.replace(unfinished, path)

    def path(self, prompt: str) -> Path:
        return self.folder / f"{hashlib.sha256(prompt.encode()).hexdigest()[:32]}.safetensors"


def encoder_identity(folder: Path, dtype: torch.dtype, version: str = DEFAULT_VERSION) -> str:
    """Fingerprint of everything that decides an embedding: tokenizers, encoder weights, template and precision."""
    digest = hashlib.sha256(f"{dtype} {TEMPLATE_TOKENS} {HIDDEN_STATE} {SYSTEM_MESSAGE}".encode())
    for name in ENCODER_PARTS:
        part = component(folder, name, version)
        for path in sorted(p for p in part.rglob("*") if p.is_file() and ".cache" not in p.parts):  # the hub's notes
            digest.update(path.relative_to(folder).as_posix().encode())
            digest.update(file_fingerprint(path))
    return digest.hexdigest()[:16]


def file_fingerprint(path: Path, blocks: int = 64, block_size: int = 1 << 20) -> bytes:
    """Hash of the size and of evenly spaced blocks of a file; of all of it up to `blocks * block_size` bytes.

    Reading 16 GB of weights at every start would cost a minute; another encoder differs in nearly every block.
    """
    size = path.stat().st_size
    stride = max(block_size, -(-size // blocks))
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for start in range(0, size, stride):
            file.seek(start)
            digest.update(file.read(block_size))
    return digest.digest()
