"""Clips of what is compared: a run, a checkpoint, a model folder, or a folder of clips.

Models are sampled by the machinery of `tools/evaluate.py`: same prompts, seeds and settings for all, each clip stored
at once, so that a second call continues. Their clips and scores stay in `sampled/` of the study's folder of clips.
Clips of an earlier attempt with other prompts or seeds may lie there as well; they are not part of the study.
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
from sage_grpo.tools.evaluate import Evaluation, read_folder, stem, system_names
from sage_grpo.tools.prefer.study import StudyClip
from sage_grpo.train.checkpoint_folders import weights_of
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


def collect(
    paths: Sequence[Path],
    config: Config,
    *,
    seeds: Sequence[int] | None,
    reward: str | None,
    folder: Path,
) -> tuple[tuple[str, ...], list[Sourced], tuple[str, ...]]:
    """Names of the systems, all of their clips, and the names of the reward's scores.

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

    evaluated: dict[str, list[Path]] = {}
    score_names: tuple[str, ...] = ()
    needs_model = bool(base or checkpoints)
    if needs_model or reward:
        config = replace(config, reward_model=(reward,)) if reward else config
        evaluated, score_names, config = _evaluated(
            systems, config, seeds, checkpoints, folders, folder, reward is not None
        )

    sampled_size = {}
    if needs_model:
        size = validation_sampling(config)
        sampled_size = {"height": size.height, "width": size.width}
    sourced = []
    for number, (name, path) in enumerate(systems.items()):
        known = {} if path in folders else sampled_size
        if name in evaluated:
            records = _own_records(evaluated[name])
        else:
            assert path is not None  # the base model is always evaluated
            records = _records_beside(path)
        existing = [(record, file) for record, file in records if file.is_file()]
        if not existing:
            raise ConfigError(f"{path or name} holds no mp4 file with a record of its prompt")
        for record, file in existing:
            sourced.append((file, _clip(known | record, number)))
    return tuple(systems), sourced, score_names


def _evaluated(
    systems: Mapping[str, Path | None],
    config: Config,
    seeds: Sequence[int] | None,
    checkpoints: Sequence[Path],
    folders: Sequence[Path],
    output: Path,
    scores_folders: bool,
) -> tuple[dict[str, list[Path]], tuple[str, ...], Config]:
    """Sample and score what is missing.

    Returns the files that record the clips of each system, the names of the scores, and the model's settings.
    """
    root = config.pretrained_model_root
    device = device_for(config.device, root, config.pretrained_transformer_version)
    options = argparse.Namespace(
        output=output, seeds=seeds, checkpoints=list(checkpoints), clips=list(folders)
    )
    records: dict[str, list[Path]] = {}
    with join_ranks(config.start_timeout, device_type=device) as ranks:
        evaluation = Evaluation(options, config, ranks)
        # people judge; the exact judge of the embedded world takes longer than sampling
        evaluation.world = None
        evaluation.check_settings(systems)
        for name, path in systems.items():  # the base model comes first: weights are loaded over it
            is_folder = path in folders
            if is_folder and not scores_folders:
                continue
            place = output / name
            place.mkdir(parents=True, exist_ok=True)
            if is_folder:
                evaluation.score_files(path, place)
                stems = [Path(entry["file"]).stem for entry in read_folder(path)]
            else:
                evaluation.generate(path, place)
                stems = list(dict.fromkeys(map(stem, evaluation.requests)))
            records[name] = [place / f"{name_of_clip}.json" for name_of_clip in stems]
        return records, evaluation.reward.names, evaluation.config


def _own_records(files: Sequence[Path]) -> list[tuple[Record, Path]]:
    """Records that `_evaluated` wrote, and the files of their clips: full paths, if a folder of clips was scored."""
    records = [checked(read_object(file), str(file)) for file in files]
    return [
        (record, file.parent / record["file"]) for record, file in zip(records, files, strict=True)
    ]


def _records_beside(folder: Path) -> list[tuple[Record, Path]]:
    """Records of a folder's clips and their files, as generate.py or a validation wrote them.

    The folder may come from others: only files in it are clips.
    """
    listing = folder / LISTING
    if listing.is_file():
        records = read_listing(listing)
    else:
        records = []
        for file in sorted(folder.glob("*.json")):
            values = read_object(file)
            if "prompt" in values:
                defaults = {"file": file.with_suffix(".mp4").name}
                records.append(checked(defaults | values, str(file)))
    return [(record, beside(listing, record["file"])) for record in records]


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
