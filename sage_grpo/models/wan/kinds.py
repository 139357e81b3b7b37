"""Which Wan a folder holds: the pipelines of diffusers are the same for several."""

from pathlib import Path
from typing import Any, NamedTuple

from sage_grpo.files.json_files import read_object
from sage_grpo.models.wan.backbone import Wan
from sage_grpo.models.wan.ti2v import Ti2v


class Kind(NamedTuple):
    """A kind of Wan, and how it is recognized."""

    setting: str  # true in model_index.json
    version: str  # beginning of the version, for a folder that does not exist
    backbone: type[Wan]


KINDS = (Kind("expand_timesteps", "wan22-ti2v", Ti2v),)


def open_wan(folder: str | Path, *args: Any, version: str | None = None, **kwargs: Any) -> Wan:
    """The backbone of a folder, or of the published model that `version` names if there is no folder."""
    index = Path(folder) / "model_index.json"
    settings = read_object(index) if index.is_file() else {}
    for kind in KINDS:
        named = not Path(folder).is_dir() and (version or "").startswith(kind.version)
        if named or settings.get(kind.setting):
            return kind.backbone(folder, *args, version=version, **kwargs)
    return Wan(folder, *args, version=version, **kwargs)
