"""Backbones by the pipeline that a model folder names. To add one, write a `Backbone` and add a row to BACKBONES."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from sage_grpo import plugins
from sage_grpo.files.json_files import read_object
from sage_grpo.models.versions import ANIMATE

if TYPE_CHECKING:
    from sage_grpo.models.backbone import Backbone

# By `_class_name` in the folder's model_index.json: where the backbone's class is, or a function that opens it.
BACKBONES = {
    "HunyuanVideo15Pipeline": "sage_grpo.models.hunyuan15.backbone:Hunyuan15",
    "HunyuanVideo15ImageToVideoPipeline": "sage_grpo.models.hunyuan15.image:ImageToVideo",
    "WanPipeline": "sage_grpo.models.wan.kinds:open_wan",
    "WanImageToVideoPipeline": "sage_grpo.models.wan.kinds:open_wan",
}

# By the beginning of the version: the pipeline of folders that name none. These are folders in
# Tencent's layout and, for the planner, folders that do not exist. The first row that matches wins.
VERSIONS = {
    "wan": "WanPipeline",  # wan21-1.3b, wan21-14b, wan21-14b-720p, wan22-ti2v-5b, wan22-t2v-a14b, ...
    "480p_i2v": "HunyuanVideo15ImageToVideoPipeline",  # with any suffix, such as _distilled
    "720p_i2v": "HunyuanVideo15ImageToVideoPipeline",
    "": "HunyuanVideo15Pipeline",  # everything else, also no version
}

# By the pipeline that a folder names and the version: the pipeline to open instead.
TASKS = {
    # a text-to-video folder that also has the vision model
    ("HunyuanVideo15Pipeline", ANIMATE): "HunyuanVideo15ImageToVideoPipeline",
}


def open_backbone(
    folder: str | Path, *args: Any, version: str | None = None, complete: bool = True, **kwargs: Any
) -> "Backbone":
    """Open the backbone in a model folder, which must be complete; other arguments go to `Backbone`.

    With `complete` False, a folder that does not exist stands for the published model that `version` names: its sizes
    are known, but there are no weights.
    """
    index = Path(folder) / "model_index.json"
    pipeline = next(VERSIONS[start] for start in VERSIONS if (version or "").startswith(start))
    if index.is_file():
        pipeline = read_object(index).get("_class_name", pipeline)
    pipeline = TASKS.get((str(pipeline), version), pipeline)
    if pipeline not in list(BACKBONES):  # a list: what a file names may not be hashable
        raise ValueError(
            f"{index} names {pipeline!r}, which cannot be trained here; choose one of {', '.join(BACKBONES)}"
        )
    backbone = plugins.load(BACKBONES, pipeline)(folder, *args, version=version, **kwargs)
    if complete:
        backbone.check()
    return backbone


def device_for(wanted: str, folder: str | Path, version: str | None = None) -> str:
    """The type of device for a model folder and the flag `device`; rejects a large model if no GPU can be used."""
    from sage_grpo.parallel.device import choose_device  # imports torch

    def parameters() -> int:
        return open_backbone(folder, version=version).architecture().parameters

    return choose_device(wanted, parameters)
