"""Encodes each request once, so that the encoders can leave the device."""

import hashlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import chain
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from tqdm import tqdm

from sage_grpo.data.requests import Request
from sage_grpo.files.foreign import new_name
from sage_grpo.files.json_files import printable


@dataclass(frozen=True)
class Conditioning:
    """An encoded request. Subclasses add tensors as fields, which only their backbone interprets."""

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> "Conditioning":
        """A copy on `device` and in `dtype`; None leaves either unchanged."""
        moved = {name: value.to(device=device, dtype=dtype) for name, value in vars(self).items()}
        return type(self)(**moved)

    @property
    def shapes(self) -> tuple[torch.Size, ...]:
        return tuple(value.shape for value in vars(self).values())

    def seeing(self, other: "Conditioning") -> "Conditioning":
        """This text with the image of another conditioning, for models that see one."""
        return self


def shared_or_stacked(conditions: Sequence[Conditioning]) -> Conditioning:
    """The conditioning of several clips: the one that they share, else theirs stacked, with the clips as first dim."""
    first, *others = conditions
    if all(other is first for other in others):
        return first
    stacked = {
        name: torch.stack([getattr(cond, name) for cond in conditions]) for name in vars(first)
    }
    return type(first)(**stacked)


def alike(conditions: Sequence[Conditioning], most: int) -> list[list[int]]:
    """Positions of the conditionings in batches of equal shapes, at most `most` in each."""
    by_shapes: dict[tuple[torch.Size, ...], list[int]] = {}
    for position, cond in enumerate(conditions):
        by_shapes.setdefault(cond.shapes, []).append(position)
    return [
        positions[start : start + most]
        for positions in by_shapes.values()
        for start in range(0, len(positions), most)
    ]


class Encoder(Protocol):
    """The encoders of a model folder, loaded on first use."""

    kind: type[Conditioning]

    def encode(self, request: Request) -> Conditioning:
        """The conditioning of one request, on the encoders' device."""

    def release(self) -> None:
        """Free the memory; the next call loads the encoders again."""

    def identity(self) -> str:
        """Fingerprint of everything that determines an embedding: weights, tokenizers, templates and precision."""


class Embeddings:
    """Conditionings by request, each encoded once and kept in host memory or, with `cache_dir`, on disk.

    On disk they are in `cache_dir/ENCODER`, one safetensors file per request, where ENCODER is the encoder's
    fingerprint. Processes may share it.
    """

    def __init__(
        self, encoder: Encoder, device: torch.device, cache_dir: str | Path | None = None
    ) -> None:
        self.encoder = encoder
        self.device = device
        self.folder = None if cache_dir is None else Path(cache_dir) / encoder.identity()
        self.in_memory: dict[Request, Conditioning] = {}
        self.has_warned = False  # about files that were made for other prompts or encoders

    def __call__(self, requests: Sequence[Request]) -> list[Conditioning]:
        """One conditioning per request, on the device."""
        return [self._cached(request.content).to(self.device) for request in requests]

    def prepare(
        self, requests: Sequence[Request], world_rank: int = 0, world_size: int = 1
    ) -> None:
        """Encode requests that are not cached, so that later calls for them do not need the encoders.

        All `world_size` ranks share the work if they share a folder. Each does its part, then whatever others have not
        done yet, starting from the far end: no rank waits, and a slow or missing rank is covered by the others.
        """
        contents = dict.fromkeys(request.content for request in requests)
        missing = [content for content in contents if content not in self]
        start = 0
        end = len(missing)
        if self.folder:
            start = len(missing) * world_rank // world_size
            end = len(missing) * (world_rank + 1) // world_size

        bar = tqdm(
            missing[start:end],
            "prompt embeddings",
            unit="prompt",
            disable=world_rank > 0 or start == end,
        )
        for content in chain(bar, reversed(missing[end:] + missing[:start])):
            self._cached(content)
        self.encoder.release()

    def _cached(self, request: Request) -> Conditioning:
        """The conditioning of a request, encoded if it is not cached."""
        if request not in self:
            self._keep(request, self.encoder.encode(request).to("cpu"))
        if self.folder:
            return self.encoder.kind(**load_file(self.path(request)))
        return self.in_memory[request]

    def __contains__(self, request: Request) -> bool:
        """Whether the request is cached; a damaged file is rejected here, long before it is needed.

        A file that was made for another prompt or by another encoder, whatever its name says, counts as missing.
        """
        if not self.folder:
            return request in self.in_memory
        path = self.path(request)
        if path.is_symlink() or not path.is_file():
            return False

        try:
            with safe_open(path, "pt") as file:
                names = set(file.keys())
                made_for = (file.metadata() or {}).get("made_for")
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"prompt_cache: {path} is damaged ({printable(error)}); delete it"
            ) from error

        expected_names = {field.name for field in fields(self.encoder.kind)}
        if made_for == self.label(request) and names == expected_names:
            return True
        if not self.has_warned:
            self.has_warned = True
            print(
                f"note: prompt_cache: {path} was not made for its prompt by this encoder; encoding such prompts again",
                file=sys.stderr,
                flush=True,
            )
        return False

    def _keep(self, request: Request, cond: Conditioning) -> None:
        """Cache a conditioning.

        Files are written under a unique temporary name and renamed, so that no reader sees a partial one.
        """
        if not self.folder:
            self.in_memory[request] = cond
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"prompt_cache: {self.folder} cannot be created ({error}); name another folder"
            ) from error
        draft = new_name(self.path(request))
        tensors = {name: value.contiguous() for name, value in vars(cond).items()}
        metadata = {"prompt": request.text, "made_for": self.label(request)}
        save_file(tensors, draft, metadata=metadata)
        os.replace(draft, self.path(request))

    def path(self, request: Request) -> Path:
        return self.folder / f"{request.key}.safetensors"

    def label(self, request: Request) -> str:
        """Fingerprint of encoder and prompt, stored inside the file."""
        return hashlib.sha256(f"{self.folder.name} {request}".encode()).hexdigest()
