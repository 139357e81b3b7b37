"""The parts of a Wan 2.1 folder in the layout of diffusers, and how the published models are sampled."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from sage_grpo.files.json_files import read_object
from sage_grpo.models.backbone import Sampling
from sage_grpo.models.folder import MODEL, TOKENIZER, DiffusersFolder

# Transformer settings of 1.3 B; 14 B has the defaults of diffusers.
SMALL = {"num_attention_heads": 12, "num_layers": 30, "ffn_dim": 8960}

AT_480P = Sampling(frames=81, height=480, width=832, fps=16, shift=3.0, guidance=5.0, num_steps=50)
AT_720P = replace(AT_480P, height=720, width=1280, shift=5.0)


class Published(NamedTuple):
    """A published model: how it is sampled, and its transformer, which stands for a folder that does not exist."""

    sampling: Sampling
    transformer: dict[str, int]


VERSIONS = {
    "480p_t2v": Published(AT_480P, {}),
    "720p_t2v": Published(AT_720P, {}),
    "wan21-1.3b": Published(AT_480P, SMALL),
    "wan21-14b": Published(AT_480P, {}),
    "wan21-14b-720p": Published(AT_720P, {}),
}

WAN_22_SETTINGS = ("boundary_ratio", "expand_timesteps")  # of pipelines


class WanFolder(DiffusersFolder):
    files: ClassVar = {
        "transformer": MODEL,
        "vae": MODEL,
        "text_encoder": MODEL,
        "tokenizer": TOKENIZER,
    }

    def check_version(self) -> None:
        super().check_version()
        index = self.root / "model_index.json"
        settings = read_object(index)
        for name in WAN_22_SETTINGS:
            if settings.get(name):
                raise ValueError(
                    f"{index} has {name}, as Wan 2.2 does; only Wan 2.1 can be trained"
                )

    def config(self, part: str) -> dict[str, Any]:
        if self.root.is_dir():
            return super().config(part)
        return self.published.transformer if part == "transformer" else {}

    def check_sizes(self, path: Path, config: Mapping[str, Any]) -> None:
        if config.get("image_dim") is not None or config.get("added_kv_proj_dim") is not None:
            raise ValueError(
                f"{path} is of an image-to-video transformer; only text-to-video can be trained"
            )
        patch = config.get("patch_size")
        if patch not in (None, (1, 2, 2), [1, 2, 2]):  # None: the VAE of 2.1 has no patches
            raise ValueError(
                f"{path} has patch_size {patch!r:.60}, unlike Wan 2.1; only Wan 2.1 can be trained"
            )
        for name in ("latents_mean", "latents_std"):
            values = config.get(name)
            num_channels = config.get("z_dim", 0)
            if not _is_scaling(values, num_channels, allow_zero=name == "latents_mean"):
                raise ValueError(
                    f"{path} has {name} {values!r:.60}; it must be a list of {num_channels} numbers, not 0"
                )

    @property
    def published(self) -> Published:
        """The published model that the version names."""
        if self.version not in VERSIONS:
            raise ValueError(
                f"pretrained_transformer_version is {self.version!r}; for Wan choose from {', '.join(VERSIONS)}"
            )
        return VERSIONS[self.version]

    def published_sampling(self) -> Sampling:
        return self.published.sampling


def _is_scaling(values: Any, num_channels: int, allow_zero: bool) -> bool:
    """Whether `values` are numbers, one per latent channel; a transformer has none, and no channels."""
    if not isinstance(values, list):
        return num_channels == 0
    numbers = [value for value in values if type(value) in (int, float)]
    return len(numbers) == num_channels and (allow_zero or 0 not in numbers)
