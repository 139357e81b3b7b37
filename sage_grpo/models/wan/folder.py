"""The parts of a Wan folder in the layout of diffusers, and how the published models are sampled."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from sage_grpo.files.json_files import read_object
from sage_grpo.models.backbone import Sampling
from sage_grpo.models.folder import MODEL, TOKENIZER, DiffusersFolder
from sage_grpo.models.versions import DEFAULT_VERSION

# Transformer settings of 1.3 B; 14 B has the defaults of diffusers.
SMALL = {"num_attention_heads": 12, "num_layers": 30, "ffn_dim": 8960}

AT_480P = Sampling(frames=81, height=480, width=832, fps=16, shift=3.0, guidance=5.0, num_steps=50)
AT_720P = replace(AT_480P, height=720, width=1280, shift=5.0)

# Wan 2.2 TI2V 5B
TI2V_SAMPLING = Sampling(
    frames=121, height=704, width=1280, fps=24, shift=5.0, guidance=5.0, num_steps=50
)
TI2V_TRANSFORMER = {
    "num_attention_heads": 24,
    "num_layers": 30,
    "ffn_dim": 14336,
    "in_channels": 48,
    "out_channels": 48,
}
TI2V_VAE = {
    "base_dim": 160,
    "decoder_base_dim": 256,
    "z_dim": 48,
    "in_channels": 12,
    "out_channels": 12,
    "patch_size": 2,
    "is_residual": True,
    "scale_factor_spatial": 16,
    # Stand-ins: only the files of a folder have its statistics.
    "latents_mean": [0.0] * 48,
    "latents_std": [1.0] * 48,
}


# Wan 2.2 A14B; its transformers have the defaults of diffusers, and in image to video more input channels.
A14B_T2V = replace(AT_480P, shift=12.0, guidance=4.0, guidance_2=3.0, num_steps=40)
A14B_I2V = replace(A14B_T2V, shift=5.0, guidance=3.5, guidance_2=3.5)
A14B_I2V_TRANSFORMER = {"in_channels": 36}


class Published(NamedTuple):
    """A published model: how it is sampled, and its parts, which stand for a folder that does not exist."""

    sampling: Sampling
    transformer: dict[str, Any]
    vae: dict[str, Any] = {}  # noqa: RUF012 - never changed
    boundary: float = 0.0  # noise level from which on the first of two transformers works


VERSIONS = {
    "480p_t2v": Published(AT_480P, {}),
    "720p_t2v": Published(AT_720P, {}),
    "wan21-1.3b": Published(AT_480P, SMALL),
    "wan21-14b": Published(AT_480P, {}),
    "wan21-14b-720p": Published(AT_720P, {}),
}
TI2V = Published(TI2V_SAMPLING, TI2V_TRANSFORMER, TI2V_VAE)
TI2V_VERSIONS = {DEFAULT_VERSION: TI2V, "wan22-ti2v-5b": TI2V}


def _at_both_sizes(name: str, published: Published) -> dict[str, Published]:
    """A model's versions: 480p, which is the default, and 720p."""
    large = published._replace(sampling=replace(published.sampling, height=720, width=1280))
    return {
        DEFAULT_VERSION: published,
        "720p_t2v": large,
        name: published,
        f"{name}-720p": large,
    }


A14B_VERSIONS = _at_both_sizes("wan22-t2v-a14b", Published(A14B_T2V, {}, boundary=0.875))
A14B_I2V_VERSIONS = _at_both_sizes(
    "wan22-i2v-a14b", Published(A14B_I2V, A14B_I2V_TRANSFORMER, boundary=0.9)
)
EVERY_VERSION = VERSIONS | TI2V_VERSIONS | A14B_VERSIONS | A14B_I2V_VERSIONS


class WanFolder(DiffusersFolder):
    """A folder of Wan 2.1 text to video."""

    name: ClassVar[str] = "Wan 2.1"
    versions: ClassVar[Mapping[str, Published]] = VERSIONS
    vae_patch: ClassVar[int | None] = None  # pixels that the VAE's first layer joins, per side
    refused: ClassVar[tuple[str, ...]] = ("boundary_ratio", "expand_timesteps")  # of pipelines

    files: ClassVar = {
        "transformer": MODEL,
        "vae": MODEL,
        "text_encoder": MODEL,
        "tokenizer": TOKENIZER,
    }

    def check_version(self) -> None:
        super().check_version()
        index = self.root / "model_index.json"
        for setting in self.refused:
            if read_object(index).get(setting):
                raise ValueError(
                    f"{index} has {setting}, unlike {self.name}; download that folder again"
                )

    def config(self, part: str) -> dict[str, Any]:
        if self.root.is_dir():
            return super().config(part)
        return self.published.vae if part == "vae" else self.published.transformer

    def check_sizes(self, path: Path, config: Mapping[str, Any]) -> None:
        if config.get("image_dim") is not None or config.get("added_kv_proj_dim") is not None:
            raise ValueError(
                f"{path} is of an image-to-video transformer of Wan 2.1, which cannot be trained; Wan 2.2 can"
            )
        is_vae = "z_dim" in config
        patch = config.get("patch_size")
        if patch not in ([self.vae_patch] if is_vae else [(1, 2, 2), [1, 2, 2]]):
            raise ValueError(
                f"{path} has patch_size {patch!r:.60}, unlike {self.name}; only {self.name} can be trained"
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
        if self.version not in self.versions:
            known = self.versions if self.root.is_dir() else EVERY_VERSION
            raise ValueError(
                f"pretrained_transformer_version is {self.version!r}; for Wan choose from {', '.join(known)}"
            )
        return self.versions[self.version]

    def published_sampling(self) -> Sampling:
        return self.published.sampling


class Ti2vFolder(WanFolder):
    """A folder of Wan 2.2 TI2V."""

    name = "Wan 2.2 TI2V"
    versions = TI2V_VERSIONS
    vae_patch = 2
    refused = ("boundary_ratio",)


class ExpertsFolder(WanFolder):
    """A folder of Wan 2.2 A14B text to video."""

    name = "Wan 2.2 A14B"
    versions = A14B_VERSIONS
    refused = ("expand_timesteps",)
    files: ClassVar = {**WanFolder.files, "transformer_2": MODEL}

    @property
    def boundary(self) -> float:
        """The noise level from which on the first transformer works."""
        if not self.root.is_dir():
            return self.published.boundary
        index = self.root / "model_index.json"
        ratio = read_object(index).get("boundary_ratio")
        if type(ratio) is not float or not 0 < ratio < 1:
            raise ValueError(
                f"{index} has boundary_ratio {ratio!r:.60}; it must be a number between 0 and 1"
            )
        return ratio

    def check(self) -> None:
        super().check()
        self.boundary  # noqa: B018 - it checks itself
        if self.sizes("transformer") != self.sizes("transformer_2"):
            raise ValueError(
                f"{self.root} has a transformer and a transformer_2 of different sizes; download that folder again"
            )

    def sizes(self, part: str) -> dict[str, Any]:
        """The settings of a transformer, without notes of the program that wrote them."""
        return {name: value for name, value in self.config(part).items() if name[0] != "_"}


class AnimatingFolder(ExpertsFolder):
    """A folder of Wan 2.2 A14B image to video."""

    versions = A14B_I2V_VERSIONS


def _is_scaling(values: Any, num_channels: int, allow_zero: bool) -> bool:
    """Whether `values` are numbers, one per latent channel; a transformer has none, and no channels."""
    if not isinstance(values, list):
        return num_channels == 0
    numbers = [value for value in values if type(value) in (int, float)]
    return len(numbers) == num_channels and (allow_zero or 0 not in numbers)
