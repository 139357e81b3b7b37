"""Model folders in the layout of diffusers: a folder for each part, with its config.json and weights or tokenizer."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from diffusers import ModelMixin

from sage_grpo.files.json_files import KINDS, check_kinds, naming, read_config
from sage_grpo.models.backbone import Sampling
from sage_grpo.models.versions import DEFAULT_VERSION
from sage_grpo.models.weights import Weights, open_folder, read_index

MODEL, TOKENIZER = ("config.json", "*.safetensors"), ("tokenizer_config.json",)


@dataclass(frozen=True)
class DiffusersFolder:
    """A model folder. One that does not exist stands for the published model that the version names."""

    root: Path
    version: str = DEFAULT_VERSION

    files: ClassVar[Mapping[str, tuple[str, ...]]]  # files required to load each part

    def check(self) -> None:
        """Reject an incomplete folder."""
        for part in self.files:
            self.part(part)
        self.config("transformer")

    def check_version(self) -> None:
        """Require that the folder exists and has what the version names."""
        if not self.root.is_dir():
            raise FileNotFoundError(
                f"Model folder '{self.root}' does not exist; download_weights.sh makes one."
            )

    def missing_files(self, *parts: str) -> list[str]:
        """Missing files of some parts, or of all, relative to this folder; a pattern where any name will do."""
        missing = []
        for part in parts or self.files:
            place, needed = self.place(part), self.files[part]
            for index in place.glob("*.safetensors.index.json"):
                needed += tuple(sorted(set(read_index(index).values())))
            missing += [place / file for file in needed if not any(place.glob(file))]
        return list(dict.fromkeys(path.relative_to(self.root).as_posix() for path in missing))

    def place(self, part: str) -> Path:
        return self.root / part

    def part(self, name: str) -> Path:
        """The subfolder of one part; if it is incomplete, the error lists everything missing from the model folder."""
        self.check_version()
        if not self.missing_files(name):
            return self.place(name)
        missing = self.missing_files()
        text = f"Model folder '{self.root}' lacks {', '.join(missing)}; download_weights.sh gets what is missing"
        raise FileNotFoundError(f"{text}{self.remedy(missing)}.")

    def remedy(self, missing: list[str]) -> str:
        """What else to do about missing files."""
        return ""

    def config(self, part: str) -> dict[str, Any]:
        """Settings of the `transformer` or `vae` under diffusers' names; those of the version if there is no folder."""
        return read_config(self.part(part) / "config.json") if self.root.is_dir() else {}

    def check_sizes(self, path: Path, config: Mapping[str, Any]) -> None:
        """Reject settings of a transformer or a VAE that contradict each other where the weights would not tell."""

    def empty(self, part: str, model: type[ModelMixin]) -> ModelMixin:
        """The `transformer` or `vae` on the meta device, in evaluation mode."""
        config, path = self.config(part), self.place(part) / "config.json"
        defaults = {
            name: one.default for name, one in inspect.signature(model.__init__).parameters.items()
        }
        kinds = {
            name: type(defaults[name])
            for name in config
            if name in defaults and config[name] != defaults[name]
        }
        check_kinds(path, config, {name: kind for name, kind in kinds.items() if kind in KINDS})
        self.check_sizes(path, defaults | config)
        with naming(path), torch.device("meta"):
            return model.from_config(config).eval()

    def weights(self, part: str) -> Weights:
        """Weights of the `transformer` or `vae`, with diffusers' tensor names."""
        return open_folder(self.part(part))

    def sampling(self) -> Sampling:
        """The folder's `sampling.json`, else how the model was published."""
        path = self.root / "sampling.json"
        return Sampling.from_json(path) if path.is_file() else self.published_sampling()
