"""What text encoders from a model folder share: loading on first use, release, and a fingerprint for prompt caches."""

import hashlib
from pathlib import Path
from typing import ClassVar

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sage_grpo.data.requests import Request
from sage_grpo.files.fingerprints import file_fingerprint
from sage_grpo.files.json_files import naming, read_config
from sage_grpo.models.embeddings import Conditioning
from sage_grpo.models.folder import DiffusersFolder
from sage_grpo.models.weights import Weights, load_model

# A T5 has one table of token embeddings under two names.
EMBEDDINGS = ("shared.weight", "encoder.embed_tokens.weight")


class FolderEncoder:
    """The text encoders of a model folder, loaded on the first prompt.

    Subclasses define `load`, which returns the tokenizers and the models, and `embed`, which encodes a prompt.
    """

    kind: type[Conditioning]
    parts: ClassVar[tuple[str, ...]]  # folders of tokenizers and encoders
    settings: ClassVar[str]  # what else determines an embedding

    def __init__(self, folder: DiffusersFolder, device: torch.device, dtype: torch.dtype) -> None:
        self.folder = folder
        self.device = device
        self.dtype = dtype
        self._models: tuple[PreTrainedModel, ...] | None = None

    @torch.no_grad()
    def encode(self, request: Request) -> Conditioning:
        if self._models is None:
            self._tokenizers, self._models = self.load()
        return self.embed(request.text)

    def release(self) -> None:
        """Free the encoders; the next prompt loads them again."""
        self._models = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # gigabytes that other parts may need

    def identity(self) -> str:
        """Fingerprint of all that determines an embedding: tokenizers, encoder weights, settings and precision."""
        digest = hashlib.sha256(f"{self.dtype} {self.settings}".encode())
        for part in self.parts:
            for path in sorted(self.folder.part(part).rglob("*")):
                if path.is_file() and ".cache" not in path.parts:  # Hugging Face Hub metadata
                    name = path.relative_to(self.folder.root).as_posix()
                    digest.update(name.encode() + file_fingerprint(path))
        return digest.hexdigest()[:16]


def load_tokenizer(kind: type[PreTrainedTokenizerBase], folder: Path) -> PreTrainedTokenizerBase:
    with naming(folder / "tokenizer_config.json"):
        return kind.from_pretrained(folder, local_files_only=True)


def empty_model(kind: type[PreTrainedModel], folder: Path, **settings: int) -> PreTrainedModel:
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


def load_t5(
    empty: PreTrainedModel, stored: Weights, device: torch.device, dtype: torch.dtype
) -> PreTrainedModel:
    """Fill a T5 encoder, whose table of token embeddings has two names in the model, of which a file holds one."""
    table = next((stored.pieces[name] for name in EMBEDDINGS if name in stored.pieces), None)
    if table is not None:
        stored.pieces.update(dict.fromkeys(EMBEDDINGS, table))
    return load_model(empty, stored, device, dtype).eval()
