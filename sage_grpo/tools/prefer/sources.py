"""Clips of what is compared: a run, a checkpoint, a model folder, or a folder of clips.

Models are sampled by the machinery of `tools/evaluate.py`: same prompts, seeds and settings for all, each clip stored
at once, so that a second call continues. Their clips and scores stay in `sampled/` of the study's folder of clips.
"""

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from sage_grpo.config.fields import Config, ConfigError
from sage_grpo.files.json_files import read_object
from sage_grpo.models.registry import device_for
from sage_grpo.parallel.ranks import join_ranks
from sage_grpo.runs.clips import LISTING, RECORD_KEYS, Record, beside, checked, read_listing
from sage_grpo.tools.evaluate import Evaluation, system_names
from sage_grpo.tools.prefer.study import StudyClip
from sage_grpo.train.checkpoint_folders import list_checkpoints
from sage_grpo.train.validation import validation_sampling

Sourced = tuple[Path, StudyClip]  # file and clip


def is_root(path: Path, config: Config) -> bool:
    """Whether a path is the model folder of the configuration, which stands for the base model."""
    return path.resolve() == Path(config.pretrained_model_root).resolve()


def with_root(config: Config, models: Sequence[Path], alone: bool) -> Config:
    """The configuration for the named model folders, at most one; `alone`: nothing else is compared with it."""
    others = [path for path in models if not is_root(path, config)]
    if not others:
        return config
    if len(models) > 1 or not alone:
        raise ConfigError(
            f"{others[0]} is another model than pretrained_model_root {config.pretrained_model_root}; "
            "sample clips of each with generate.py, and compare their folders"
        )
    return replace(config, pretrained_model_root=str(others[0]))


def is_clips(path: Path) -> bool:
    return (path / LISTING).is_file() or any(path.glob("*.mp4"))


def weights_of(path: Path) -> Path:
    """The weights that a path stands for: a run folder stands for its newest checkpoint."""
    if not path.exists():
        raise ConfigError(f"{path} does not exist; give runs, checkpoints or folders of clips")
    if not (path / "checkpoints").is_dir():
        return path
    checkpoints = list_checkpoints(path / "checkpoints")
    if not checkpoints:
        raise ConfigError(f"{path} is a run that holds no checkpoint yet")
    return checkpoints[-1]


def collect(
    paths: Sequence[Path],
    config: Config,
    *,
    seeds: Sequence[int] | None,
    reward: str | None,
    folder: Path,
) -> tuple[tuple[str, ...], list[Sourced]]:
    """Names of the systems, and all of their clips.

    reward: name of a reward that scores the clips of folders as well. folder: where sampled clips are kept.
    """
    base = [
        path for path in paths if (path / "model_index.json").is_file() or is_root(path, config)
    ]
    config = with_root(config, base, alone=len(paths) == len(base))
    folders = [path for path in paths if path not in base and is_clips(path)]
    checkpoints = [weights_of(path) for path in paths if path not in (*base, *folders)]
    systems = system_names(checkpoints, folders)
    if not base:
        systems.pop("base", None)
    elif "base" not in systems:
        systems = {"base": None, **systems}

    places: dict[str, Path] = {}
    needs_model = bool(base or checkpoints)
    if needs_model or reward:
        config = replace(config, reward_model=(reward,)) if reward else config
        places, config = _evaluated(
            systems, config, seeds, checkpoints, folders, folder, reward is not None
        )
    for name, path in systems.items():
        if path in folders and path is not None and name not in places:
            places[name] = path

    sampled_size = {}
    if needs_model:
        size = validation_sampling(config)
        sampled_size = {"height": size.height, "width": size.width}
    sourced = []
    for number, (name, path) in enumerate(systems.items()):
        known = {} if path in folders else sampled_size
        for record, file in _records(places[name]):
            sourced.append((file, _clip(known | record, number)))
    return tuple(systems), sourced


def _evaluated(
    systems: Mapping[str, Path | None],
    config: Config,
    seeds: Sequence[int] | None,
    checkpoints: Sequence[Path],
    folders: Sequence[Path],
    output: Path,
    scores_folders: bool,
) -> tuple[dict[str, Path], Config]:
    """Sample and score what is missing; returns where the clips of each system are, and the model's settings."""
    root = config.pretrained_model_root
    device = device_for(config.device, root, config.pretrained_transformer_version)
    options = argparse.Namespace(
        output=output, seeds=seeds, checkpoints=list(checkpoints), clips=list(folders)
    )
    places = {}
    with join_ranks(config.start_timeout, device_type=device) as ranks:
        evaluation = Evaluation(options, config, ranks)
        # people judge; the exact judge of the embedded world takes longer than sampling
        evaluation.world = None
        evaluation.check_settings(systems)
        for name, path in systems.items():  # the base model comes first: weights are loaded over it
            place = output / name
            if path in folders and path is not None:
                if scores_folders:
                    place.mkdir(parents=True, exist_ok=True)
                    evaluation.score_files(path, place)
                    places[name] = place
                continue
            place.mkdir(parents=True, exist_ok=True)
            evaluation.generate(path, place)
            places[name] = place
        return places, evaluation.config


def _records(folder: Path) -> list[tuple[Record, Path]]:
    """Records of a folder's clips and their files, as generate.py, a validation or `evaluate` wrote them."""
    listing = folder / LISTING
    pairs = []
    if listing.is_file():
        for record in read_listing(listing):
            pairs.append((record, beside(listing, record["file"])))
    else:
        for file in sorted(folder.glob("*.json")):
            values = read_object(file)
            name = values.get("file", file.with_suffix(".mp4").name)
            if "prompt" in values:
                record = checked(values | {"file": name}, str(file))
                # `evaluate` scores clips where they are, and records their paths
                video = Path(name) if Path(name).is_absolute() else beside(listing, name)
                pairs.append((record, video))
    found = [(record, video) for record, video in pairs if video.is_file()]
    if not found:
        raise ConfigError(f"{folder} holds no mp4 file with a record of its prompt")
    return found


def _clip(record: Record, system: int) -> StudyClip:
    """A clip of a record, with the scores of all rewards, held-out ones included."""
    scores: dict[str, float] = {}
    for kind in ("reward", "holdout"):
        for name, value in record[RECORD_KEYS[kind]].items():
            if name != "total" and math.isfinite(value):
                label = name if kind == "reward" else f"held-out {name}"
                scores[label] = value
    numbers = {}
    for name in ("number", "height", "width"):
        value = record.get(name)
        numbers[name] = value if isinstance(value, int) else 0
    return StudyClip(
        file="",
        system=system,
        prompt=record["prompt"],
        seed=record["seed"],
        scores=scores,
        **numbers,
    )
