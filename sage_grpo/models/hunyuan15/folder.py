"""Locates the parts of a model folder, in diffusers or Tencent layout, and reads how the model is sampled.

diffusers   transformer/  vae/  text_encoder/  tokenizer/  text_encoder_2/  tokenizer_2/
Tencent     transformer/VERSION/  vae/  text_encoder/{llm, byt5-small, Glyph-SDXL-v2}/

Image to video has in addition image_encoder/ and feature_extractor/, in Tencent's layout in vision_encoder/siglip/.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from sage_grpo.files.json_files import LARGEST, naming, read_object
from sage_grpo.models.backbone import Sampling
from sage_grpo.models.folder import MODEL, TOKENIZER, DiffusersFolder
from sage_grpo.models.hunyuan15 import tencent
from sage_grpo.models.versions import ANIMATE, DEFAULT_VERSION
from sage_grpo.models.weights import Weights

GLYPH_WEIGHTS = "checkpoints/byt5_model.safetensors"
FONTS, COLOURS = "assets/multilingual_10-lang_idx.json", "assets/color_idx.json"

# Files required to load each part.
DIFFUSERS_FILES = dict.fromkeys(("transformer", "vae", "text_encoder", "text_encoder_2"), MODEL)
DIFFUSERS_FILES |= dict.fromkeys(("tokenizer", "tokenizer_2"), TOKENIZER)
TENCENT_FILES = DIFFUSERS_FILES | {
    "text_encoder_2": (COLOURS, FONTS, GLYPH_WEIGHTS),
    "tokenizer_2": ("config.json", "tokenizer_config.json"),
}
TENCENT_FOLDERS = {rule.diffusers: rule.tencent for rule in tencent.RULES["folders"]}

# Target size and task of the transformer. Distilled versions share these and differ in guidance.
SAMPLING = {
    (640, "t2v"): Sampling(
        frames=121, height=480, width=848, fps=24, shift=5.0, guidance=6.0, num_steps=50
    ),
    (960, "t2v"): Sampling(
        frames=121, height=720, width=1280, fps=24, shift=9.0, guidance=6.0, num_steps=50
    ),
}
SAMPLING |= {
    (640, "i2v"): SAMPLING[640, "t2v"],
    (960, "i2v"): replace(SAMPLING[960, "t2v"], shift=7.0),
}
# Frames, height and width of a rollout, by those of the model: what the published training used.
ROLLOUT = {(121, 480, 848): (81, 352, 624), (121, 720, 1280): (81, 720, 1280)}


class ModelFolder(DiffusersFolder):
    """A model folder in either layout; in Tencent's, the version selects a transformer."""

    task = "t2v"  # by the pipeline's class: the transformer's `task_type` is wrong in some published folders

    @property
    def files(self) -> Mapping[str, tuple[str, ...]]:
        return TENCENT_FILES if self.is_tencent else DIFFUSERS_FILES

    @cached_property
    def is_tencent(self) -> bool:
        """Whether the layout is Tencent's: several transformer versions instead of one, or Tencent's encoders."""
        if (self.root / "transformer" / "config.json").is_file():
            return False
        return (self.root / "text_encoder" / "llm").is_dir() or bool(self.versions)

    @cached_property
    def versions(self) -> list[str]:
        """The transformer versions in a Tencent-layout folder."""
        return sorted(
            path.parent.name for path in (self.root / "transformer").glob("*/config.json")
        )

    def check_version(self) -> None:
        """Require that the folder exists, and that a version is selected if there are several."""
        super().check_version()
        if self.is_tencent and self.versions and self.version not in self.versions:
            choice = f"choose pretrained_transformer_version from {', '.join(self.versions)}"
            remedy = f"{choice}, or get it: bash download_weights.sh --version {self.version}"
            raise FileNotFoundError(f"'{self.root}/transformer' has no {self.version}; {remedy}.")
        if not self.is_tencent and self.version not in (DEFAULT_VERSION, ANIMATE):
            problem = f"pretrained_transformer_version {self.version} chooses a folder in Tencent's layout"
            reason = f"'{self.root}' has the layout of diffusers, which holds one transformer"
            raise ValueError(f"{problem}, but {reason}; leave it out.")

    def place(self, part: str) -> Path:
        return self.root / (
            TENCENT_FOLDERS[part].format(version=self.version) if self.is_tencent else part
        )

    def remedy(self, missing: list[str]) -> str:
        how = f", and 'python scripts/convert_weights.py {self.root}' makes {Path(GLYPH_WEIGHTS).name} of byt5_model.pt"
        return how if any(file.endswith(GLYPH_WEIGHTS) for file in missing) else ""

    def config(self, part: str) -> dict[str, Any]:
        config, path = super().config(part), self.place(part) / "config.json"
        if config.get("use_meanflow"):
            what = f"use_meanflow {config['use_meanflow']!r}: this step-distilled transformer takes a second timestep"
            remedy = "use one that is not step-distilled, such as 480p_t2v"
            raise ValueError(f"{path} has {what}, which is not supported; {remedy}")
        if not self.is_tencent:
            return config
        tencent.read_version(self.version)  # its error is not about the file
        with naming(path):
            return tencent.diffusers_config(part, config, self.version)

    def check_sizes(self, path: Path, config: Mapping[str, Any]) -> None:
        axes, width = config.get("rope_axes_dim", ()), config.get("attention_head_dim", 0)
        if sum(axes) != width:
            raise ValueError(
                f"{path} has rope_axes_dim {list(axes)}, whose sum must be attention_head_dim, {width}"
            )
        time, space = (
            config.get(f"{axis}_compression_ratio", 1) for axis in ("temporal", "spatial")
        )
        if time & (time - 1) or space & (space - 1) or time > space:
            raise ValueError(
                f"{path} compresses time by {time} and space by {space}; download it again"
            )

    def weights(self, part: str) -> Weights:
        stored = super().weights(part)
        return (
            stored.renamed(tencent.to_diffusers(part, stored.names)) if self.is_tencent else stored
        )

    def published_sampling(self) -> Sampling:
        """The built-in table, with the guidance the model was trained for."""
        config = self.config("transformer")
        if self.is_tencent or not self.root.is_dir():  # the published model that the version names
            *kind, distilled = tencent.read_version(self.version)
            return (
                replace(SAMPLING[tuple(kind)], guidance=1.0) if distilled else SAMPLING[tuple(kind)]
            )
        kind = (config.get("target_size"), self.task)
        if kind not in list(SAMPLING):
            remedy = "put a sampling.json into the folder to say how it is sampled"
            size = f"target_size {kind[0]!r}, which is neither 640 nor 960"
            raise ValueError(f"'{self.root}/transformer' has {size}; {remedy}.")
        guider, sampling = self.root / "guider" / "guider_config.json", SAMPLING[kind]
        if not guider.is_file():
            return sampling
        guidance = read_object(guider).get("guidance_scale")
        if type(guidance) not in (int, float) or not 0 <= guidance < LARGEST:
            raise ValueError(
                f"{guider} has guidance_scale {guidance!r}; it must be a number from 0 to {LARGEST}."
            )
        return replace(sampling, guidance=guidance)
