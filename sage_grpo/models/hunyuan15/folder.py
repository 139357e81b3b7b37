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

from sage_grpo.files.json_files import MAX_VALUE, naming, read_object
from sage_grpo.models.backbone import Sampling
from sage_grpo.models.folder import MODEL, TOKENIZER, DiffusersFolder
from sage_grpo.models.hunyuan15 import tencent
from sage_grpo.models.versions import ANIMATE, DEFAULT_VERSION
from sage_grpo.models.weights import Weights

GLYPH_WEIGHTS = "checkpoints/byt5_model.safetensors"
FONTS = "assets/multilingual_10-lang_idx.json"
COLORS = "assets/color_idx.json"

# Files required to load each part.
DIFFUSERS_FILES = {
    "transformer": MODEL,
    "vae": MODEL,
    "text_encoder": MODEL,
    "text_encoder_2": MODEL,
    "tokenizer": TOKENIZER,
    "tokenizer_2": TOKENIZER,
}
TENCENT_FILES = DIFFUSERS_FILES | {
    "text_encoder_2": (COLORS, FONTS, GLYPH_WEIGHTS),
    "tokenizer_2": ("config.json", "tokenizer_config.json"),
}

# Where Tencent's layout keeps each part.
TENCENT_FOLDERS = {
    "transformer": "transformer/{version}",
    "vae": "vae",
    "text_encoder": "text_encoder/llm",
    "tokenizer": "text_encoder/llm",
    "text_encoder_2": "text_encoder/Glyph-SDXL-v2",
    "tokenizer_2": "text_encoder/byt5-small",
    "image_encoder": "vision_encoder/siglip/image_encoder",
    "feature_extractor": "vision_encoder/siglip/feature_extractor",
}

# How the published models are sampled, by the transformer's target size and task. Distilled versions share these and
# differ in guidance.
AT_480P = Sampling(frames=121, height=480, width=848, fps=24, shift=5.0, guidance=6.0, num_steps=50)
AT_720P = replace(AT_480P, height=720, width=1280, shift=9.0)
SAMPLING = {
    (640, "t2v"): AT_480P,
    (640, "i2v"): AT_480P,
    (960, "t2v"): AT_720P,
    (960, "i2v"): replace(AT_720P, shift=7.0),
}

# Frames, height and width of a rollout, by those of the model: what the published training used.
ROLLOUT = {
    (121, 480, 848): (81, 352, 624),
    (121, 720, 1280): (81, 720, 1280),
}


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
            raise FileNotFoundError(
                f"'{self.root}/transformer' has no {self.version}; choose pretrained_transformer_version from "
                f"{', '.join(self.versions)}, or get it: bash download_weights.sh --version {self.version}."
            )
        if not self.is_tencent and self.version not in (DEFAULT_VERSION, ANIMATE):
            raise ValueError(
                f"pretrained_transformer_version {self.version} chooses a folder in Tencent's layout, but "
                f"'{self.root}' has the layout of diffusers, which holds one transformer; leave it out."
            )

    def place(self, part: str) -> Path:
        if not self.is_tencent:
            return self.root / part
        return self.root / TENCENT_FOLDERS[part].format(version=self.version)

    def remedy(self, missing: list[str]) -> str:
        if not any(file.endswith(GLYPH_WEIGHTS) for file in missing):
            return ""
        name = Path(GLYPH_WEIGHTS).name
        return (
            f", and 'python scripts/convert_weights.py {self.root}' makes {name} from byt5_model.pt"
        )

    def config(self, part: str) -> dict[str, Any]:
        config = super().config(part)
        path = self.place(part) / "config.json"
        if config.get("use_meanflow"):
            raise ValueError(
                f"{path} has use_meanflow {config['use_meanflow']!r}: this step-distilled transformer takes a second "
                "timestep, which is not supported; use one that is not step-distilled, such as 480p_t2v"
            )
        if not self.is_tencent:
            return config
        tencent.read_version(self.version)  # outside `naming`: its error is not about the file
        with naming(path):
            return tencent.diffusers_config(part, config, self.version)

    def check_sizes(self, path: Path, config: Mapping[str, Any]) -> None:
        axes = config.get("rope_axes_dim", ())
        width = config.get("attention_head_dim", 0)
        if sum(axes) != width:
            raise ValueError(
                f"{path} has rope_axes_dim {list(axes)}, whose sum must be attention_head_dim, {width}"
            )
        time = config.get("temporal_compression_ratio", 1)
        space = config.get("spatial_compression_ratio", 1)
        if time > space or not _is_power_of_2(time) or not _is_power_of_2(space):
            raise ValueError(
                f"{path} compresses time by {time} and space by {space}, which must be powers of 2, time at most as "
                "much as space; download it again"
            )

    def weights(self, part: str) -> Weights:
        stored = super().weights(part)
        if not self.is_tencent:
            return stored
        return stored.renamed(tencent.to_diffusers(part, stored.names))

    def published_sampling(self) -> Sampling:
        """The built-in table, with the guidance that the model was trained for."""
        config = self.config("transformer")
        if self.is_tencent or not self.root.is_dir():  # the published model that the version names
            target_size, task, is_distilled = tencent.read_version(self.version)
            sampling = SAMPLING[target_size, task]
            return replace(sampling, guidance=1.0) if is_distilled else sampling

        target_size = config.get("target_size")
        if target_size not in list(tencent.TARGET_SIZES.values()):
            raise ValueError(
                f"'{self.root}/transformer' has target_size {target_size!r}, which is neither 640 nor 960; put a "
                "sampling.json into the folder to say how it is sampled."
            )
        sampling = SAMPLING[target_size, self.task]

        guider = self.root / "guider" / "guider_config.json"
        if not guider.is_file():
            return sampling
        guidance = read_object(guider).get("guidance_scale")
        if type(guidance) not in (int, float) or not 0 <= guidance < MAX_VALUE:
            raise ValueError(
                f"{guider} has guidance_scale {guidance!r}; it must be a number from 0 to {MAX_VALUE}."
            )
        return replace(sampling, guidance=guidance)


def _is_power_of_2(number: int) -> bool:
    return number & (number - 1) == 0
