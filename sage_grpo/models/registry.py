"""Backbones by the pipeline that a model folder names. To add one, write a `Backbone` and add a row here."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from sage_grpo import plugins
from sage_grpo.files.json_files import read_object
from sage_grpo.models.versions import ANIMATE

if TYPE_CHECKING:
    from sage_grpo.models.backbone import Backbone

BACKBONES = {
    "HunyuanVideo15Pipeline": "sage_grpo.models.hunyuan15.backbone:Hunyuan15",
    "HunyuanVideo15ImageToVideoPipeline": "sage_grpo.models.hunyuan15.image:ImageToVideo",
    "WanPipeline": "sage_grpo.models.wan21.backbone:Wan21",
}
# for Tencent's layout and missing folders, which name no pipeline: by what the version begins with
VERSIONS = {
    "wan": "WanPipeline",
    **dict.fromkeys(("480p_i2v", "720p_i2v"), "HunyuanVideo15ImageToVideoPipeline"),
}
VERSIONS |= {"": "HunyuanVideo15Pipeline"}
TASKS = {("HunyuanVideo15Pipeline", ANIMATE): "HunyuanVideo15ImageToVideoPipeline"}


def open_backbone(
    folder: str | Path, *args: Any, version: str | None = None, complete: bool = True, **kwargs: Any
) -> "Backbone":
    """Open the backbone in a model folder, which must be complete; other arguments go to `Backbone`.

    Without `complete`, a folder that does not exist stands for the model that `version` names, with sizes but no
    weights.
    """
    index = Path(folder) / "model_index.json"
    unnamed = next(name for start, name in VERSIONS.items() if (version or "").startswith(start))
    name = read_object(index).get("_class_name", unnamed) if index.is_file() else unnamed
    name = TASKS.get((str(name), version), name)  # a file may name anything, such as a list
    if name not in list(BACKBONES):
        raise ValueError(
            f"{index} names {name!r}, which cannot be trained here; choose one of {', '.join(BACKBONES)}"
        )
    backbone = plugins.load(BACKBONES, name)(folder, *args, version=version, **kwargs)
    if complete:
        backbone.check()
    return backbone


def device_for(wanted: str, folder: str | Path, version: str | None = None) -> str:
    """The type of device for a model folder and the flag `device`; refuses a large model if no GPU can be used."""
    from sage_grpo.parallel.device import choose_device  # imports torch

    return choose_device(
        wanted, lambda: open_backbone(folder, version=version).architecture().parameters
    )
