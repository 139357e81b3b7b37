"""Encodes each request once, so that the encoders can leave the device."""

import dataclasses
import hashlib
import os
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm

from sage_grpo.data.requests import Request
from sage_grpo.json_files import printable


@dataclass(frozen=True)
class Conditioning:
    """An encoded request. Subclasses add tensors as fields, which are opaque to everything but their backbone."""

    def tensors(self) -> dict[str, Tensor]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "Conditioning":
        """A copy on `device` and in `dtype`; None leaves either unchanged."""
        moved = {name: value.to(device=device, dtype=dtype) for name, value in self.tensors().items()}
        return dataclasses.replace(self, **moved)

    @property
    def shapes(self) -> tuple[torch.Size, ...]:
        return tuple(value.shape for value in self.tensors().values())

    def together(self, others: "Sequence[Conditioning]") -> "Conditioning":
        """The conditionings of several clips, equal in shape, with the clips as the first axis of each tensor."""
        rows = [other.tensors() for other in others]
        return dataclasses.replace(self, **{name: torch.stack([row[name] for row in rows]) for name in rows[0]})


class Encoder(Protocol):
    """The encoders of a model folder, loaded on first use."""

    kind: type[Conditioning]

    def encode(self, request: Request) -> Conditioning: ...

    def release(self) -> None:
        """Free the memory; the next call loads the encoders again."""

    def identity(self) -> str:
        """Fingerprint of everything that determines an embedding: weights, tokenizers, templates and precision."""


class Embeddings:
    """Conditionings by request; kept on disk if there is a `cache_dir`, else in host memory."""

    def __init__(self, encoder: Encoder, device: torch.device, cache_dir: str | Path | None = None) -> None:
        self.encoder, self.device = encoder, device
        self.cache: dict[Request, Conditioning] | EmbeddingCache = {}
        if cache_dir is not None:
            self.cache = EmbeddingCache(Path(cache_dir) / encoder.identity(), encoder.kind)

    def __call__(self, requests: Sequence[Request]) -> list[Conditioning]:
        """One conditioning per request, on the device."""
        return [self._cached(request).to(self.device) for request in requests]

    def prepare(self, requests: Sequence[Request], rank: int = 0, count: int = 1) -> None:
        """Encode requests missing from the cache, so that later calls for them do not need the encoders.

        `count` ranks share the work if they share a folder. Each does its part, then whatever others have not done yet,
        starting from the far end: no rank waits, and a slow or missing rank is covered by the others.
        """
        missing = [one for one in dict.fromkeys(request.content for request in requests) if one not in self.cache]
        start, end = 0, len(missing)
        if isinstance(self.cache, EmbeddingCache):
            start, end = (len(missing) * part // count for part in (rank, rank + 1))
        bar = tqdm(missing[start:end], "prompt embeddings", unit="prompt", disable=rank > 0 or start == end)
        for request in chain(bar, reversed(missing[end:] + missing[:start])):
            self._cached(request)
        self.encoder.release()

    def _cached(self, request: Request) -> Conditioning:
        content = request.content
        if content not in self.cache:
            self.cache[content] = self.encoder.encode(content).to("cpu")
        return self.cache[content]


class EmbeddingCache:
    """A dictionary backed by a folder with one safetensors file per request; processes may share it."""

    def __init__(self, folder: Path, kind: type[Conditioning]) -> None:
        """folder: named after the identity of the encoder."""
        self.folder, self.kind, self.noted = folder, kind, False

    def __contains__(self, request: Request) -> bool:
        """Whether the request is stored; a damaged file is rejected here, long before it is needed.

        A file that was made for another prompt or by another encoder, whatever its name says, counts as missing.
        """
        path = self.path(request)
        if not path.exists():
            return False
        try:
            with safe_open(path, "pt") as file:
                names, made_for = set(file.keys()), (file.metadata() or {}).get("made_for")
        except (SafetensorError, OSError) as error:
            raise ValueError(f"prompt_cache: {path} is damaged ({printable(error)}); delete it") from error
        if made_for == self.label(request) and names == {field.name for field in dataclasses.fields(self.kind)}:
            return True
        if not self.noted:
            text = f"{path} was not made for its prompt by this encoder; encoding such prompts again"
            print(f"note: prompt_cache: {text}", file=sys.stderr, flush=True)
        self.noted = True
        return False

    def label(self, request: Request) -> str:
        """Fingerprint of encoder and prompt, stored inside the file."""
        return hashlib.sha256(f"{self.folder.name} {request.text}".encode()).hexdigest()

    def __getitem__(self, request: Request) -> Conditioning:
        """The stored conditioning, on the CPU."""
        return self.kind(**load_file(self.path(request)))

    def __setitem__(self, request: Request, cond: Conditioning) -> None:
        """Write to a unique temporary name and rename, so that no reader sees a partial file."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"prompt_cache: {self.folder} cannot be created ({error}); name another folder") from error
        path = self.path(request)
        unfinished = path.with_suffix(f".{uuid.uuid4().hex}.tmp")
        tensors = {name: value.contiguous() for name, value in cond.tensors().items()}
        save_file(tensors, unfinished, metadata={"prompt": request.text, "made_for": self.label(request)})
        os.replace(unfinished, path)

    def path(self, request: Request) -> Path:
        return self.folder / f"{request.key}.safetensors"
