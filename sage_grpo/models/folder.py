"""Model folders in the layout of diffusers: a folder for each part, with its config.json and weights or tokenizer."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from diffusers import ModelMixin
from diffusers.models.modeling_utils import no_init_weights

from sage_grpo.files.json_files import KINDS, check_kinds, naming, read_config
from sage_grpo.models.backbone import Sampling
from sage_grpo.models.versions import DEFAULT_VERSION
from sage_grpo.models.weights import Weights, open_folder, read_index

# Files, or patterns of files, that a part needs.
MODEL = ("config.json", "*.safetensors")
TOKENIZER = ("tokenizer_config.json",)


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
            place = self.place(part)
            needed = list(self.files[part])
            for index in place.glob("*.safetensors.index.json"):
                needed += sorted(set(read_index(index).values()))
            missing += [place / file for file in needed if not any(place.glob(file))]
        return list(dict.fromkeys(path.relative_to(self.root).as_posix() for path in missing))

    def place(self, part: str) -> Path:
        """Where the subfolder of one part belongs, complete or not."""
        return self.root / part

    def part(self, name: str) -> Path:
        """The subfolder of one part; if it is incomplete, the error lists everything missing from the model folder."""
        self.check_version()
        if not self.missing_files(name):
            return self.place(name)
        missing = self.missing_files()
        raise FileNotFoundError(
            f"Model folder '{self.root}' lacks {', '.join(missing)}; download_weights.sh gets what is missing"
            f"{self.remedy(missing)}."
        )

    def remedy(self, missing: list[str]) -> str:
        """What else to do about missing files: the end of a sentence, or nothing."""
        return ""

    def config(self, part: str) -> dict[str, Any]:
        """Settings of the `transformer` or `vae` under diffusers' names; those of the version if there is no folder."""
        return read_config(self.part(part) / "config.json") if self.root.is_dir() else {}

    def check_sizes(self, path: Path, config: Mapping[str, Any]) -> None:
        """Reject settings of a transformer or a VAE that contradict each other where the weights would not tell."""

    def empty(self, part: str, model: type[ModelMixin]) -> ModelMixin:
        """The `transformer` or `vae` on the meta device, in evaluation mode."""
        config = self.config(part)
        path = self.place(part) / "config.json"
        parameters = inspect.signature(model.__init__).parameters
        defaults = {name: parameter.default for name, parameter in parameters.items()}

        # A setting must have the type of its default. The default itself passes, whatever its value.
        kinds = {
            name: type(default)
            for name, default in defaults.items()
            if type(default) in KINDS and config.get(name, default) != default
        }
        check_kinds(path, config, kinds)
        self.check_sizes(path, defaults | config)
        with naming(path), torch.device("meta"), no_init_weights():
            return model.from_config(config).eval()

    def weights(self, part: str) -> Weights:
        """Weights of the `transformer` or `vae`, with diffusers' tensor names."""
        return open_folder(self.part(part))

    def sampling(self) -> Sampling:
        """The folder's `sampling.json`, else how the model was published."""
        path = self.root / "sampling.json"
        return Sampling.from_json(path) if path.is_file() else self.published_sampling()
