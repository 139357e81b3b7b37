"""The parts of a Wan 2.1 folder in the layout of diffusers, and how the published models are sampled."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from sage_grpo.files.json_files import read_object
from sage_grpo.models.backbone import Sampling
from sage_grpo.models.folder import MODEL, TOKENIZER, DiffusersFolder

SMALL = {
    "num_attention_heads": 12,
    "num_layers": 30,
    "ffn_dim": 8960,
}  # 1.3 B; 14 B has the defaults of diffusers
AT_480P = Sampling(frames=81, height=480, width=832, fps=16, shift=3.0, guidance=5.0, num_steps=50)
AT_720P = replace(AT_480P, height=720, width=1280, shift=5.0)
# by version: how a model is sampled, and the transformer that it stands for if there is no folder
VERSIONS = {"480p_t2v": (AT_480P, {}), "720p_t2v": (AT_720P, {})}
VERSIONS |= {
    "wan21-1.3b": (AT_480P, SMALL),
    "wan21-14b": (AT_480P, {}),
    "wan21-14b-720p": (AT_720P, {}),
}
OTHERS = ("boundary_ratio", "expand_timesteps")  # what the pipelines of Wan 2.2 have


class WanFolder(DiffusersFolder):
    files = dict.fromkeys(("transformer", "vae", "text_encoder"), MODEL) | {"tokenizer": TOKENIZER}

    def check_version(self) -> None:
        super().check_version()
        index = self.root / "model_index.json"
        if wrong := [
            name for name, value in read_object(index).items() if name in OTHERS and value
        ]:
            raise ValueError(
                f"{index} has {wrong[0]}, as Wan 2.2 does; only Wan 2.1 can be trained"
            )

    def config(self, part: str) -> dict[str, Any]:
        if not self.root.is_dir():
            return self.published[1] if part == "transformer" else {}
        return super().config(part)

    def check_sizes(self, path: Path, config: Mapping[str, Any]) -> None:
        if config.get("image_dim") is not None or config.get("added_kv_proj_dim") is not None:
            raise ValueError(
                f"{path} is of an image-to-video transformer; only text-to-video can be trained"
            )
        if (patch := config.get("patch_size")) not in (
            None,
            (1, 2, 2),
            [1, 2, 2],
        ):  # the VAE of 2.1 has none
            raise ValueError(
                f"{path} has patch_size {patch!r:.60}, unlike Wan 2.1; only Wan 2.1 can be trained"
            )
        for name in ("latents_mean", "latents_std"):
            values, channels = config.get(name), config.get("z_dim", 0)
            numbers = (
                [value for value in values if type(value) in (int, float)]
                if isinstance(values, list)
                else []
            )
            if len(numbers) != channels or (name == "latents_std" and 0 in numbers):
                raise ValueError(
                    f"{path} has {name} {values!r:.60}; it must be a list of {channels} numbers, not 0"
                )

    @property
    def published(self) -> tuple[Sampling, dict[str, int]]:
        if self.version not in VERSIONS:
            choice = ", ".join(VERSIONS)
            raise ValueError(
                f"pretrained_transformer_version is {self.version!r}; for Wan choose from {choice}"
            )
        return VERSIONS[self.version]

    def published_sampling(self) -> Sampling:
        return self.published[0]
