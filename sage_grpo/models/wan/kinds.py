"""Which Wan a folder holds: the pipelines of diffusers are the same for several."""

from pathlib import Path
from typing import Any, NamedTuple

from sage_grpo.files.json_files import read_object
from sage_grpo.models.wan.a14b import A14b
from sage_grpo.models.wan.animate import AnimatingA14b
from sage_grpo.models.wan.backbone import Wan
from sage_grpo.models.wan.ti2v import Ti2v


class Kind(NamedTuple):
    """A kind of Wan, and how it is recognized."""

    pipelines: tuple[str, ...]  # its class in model_index.json
    setting: str  # true in model_index.json
    version: str  # beginning of the version, for a folder that does not exist
    backbone: type[Wan]


TEXT = "WanPipeline"
IMAGE = "WanImageToVideoPipeline"
KINDS = (
    Kind((TEXT, IMAGE), "expand_timesteps", "wan22-ti2v", Ti2v),
    Kind((TEXT,), "boundary_ratio", "wan22-t2v", A14b),
    Kind((IMAGE,), "boundary_ratio", "wan22-i2v", AnimatingA14b),
)


def open_wan(folder: str | Path, *args: Any, version: str | None = None, **kwargs: Any) -> Wan:
    """The backbone of a folder, or of the published model that `version` names if there is no folder."""
    index = Path(folder) / "model_index.json"
    settings = read_object(index) if index.is_file() else {}
    for kind in KINDS:
        named = not Path(folder).is_dir() and (version or "").startswith(kind.version)
        fits = settings.get("_class_name") in kind.pipelines and settings.get(kind.setting)
        if named or fits:
            return kind.backbone(folder, *args, version=version, **kwargs)
    if settings.get("_class_name") == IMAGE:
        raise ValueError(
            f"{index} is of image to video of Wan 2.1, whose image encoder is not supported; use Wan 2.2 instead"
        )
    return Wan(folder, *args, version=version, **kwargs)
