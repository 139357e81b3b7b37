"""One small JSON file per finished run: its configuration and its measurements.

    study, arm, seed, commit, versions, device     where it comes from
    config       all flags that determine what it computes; `digest` is the hash of the non-default ones
    steps        iterations of the curves
    curves       training metrics at these iterations; a single number if a metric never changed
    validation   at start, middle and end: held-out prompts sampled with the ODE, with standard errors over clips
    per_step     means over the run per denoising step
    seconds      means per phase of an iteration
    path_kl      KL to the base model at the end, where the study asks for it: mean over clips, stderr, clips
    spread       of clips of one prompt, before and after training, where the study asks for it (research/studies/spread.py)
    collapsed    empty, or the reason by the rule of `collapse`

A run that training had to stop also counts as finished: its `collapsed` says so.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from research.studies.questions import ROOT, StudyRun, digest, identity, updated
from sage_grpo.algo.sde import Schedule, build_schedule, flow_sigmas
from sage_grpo.config.fields import ConfigError
from sage_grpo.files.json_files import read_object
from sage_grpo.models.registry import open_backbone
from sage_grpo.runs.history import RunHistory, as_float, column, read_run
from sage_grpo.train.rollout import parse_windows

CURVES = (
    "reward/total", "reward/VQ", "reward/MQ", "reward/TA", "reward/group_std", "gold/match", "gold/distance",
    "kl/anchor", "kl/rollout", "kl/coef", "policy/grad_norm", "policy/clip_low", "policy/clip_high",
    "policy/skipped_updates", "signal/variety",
)  # fmt: skip
VALIDATED = (
    "reward/total",
    "reward/VQ",
    "reward/MQ",
    "reward/TA",
    "gold/match",
    "gold/distance",
    "gold/prompt_distance",
)
PER_STEP = ("grad_v", "kl_anchor")
PHASES = ("rollout", "decode", "reward", "gold", "anchor", "update", "total")
DIGITS = 4
MEASURED = ("path_kl", "spread")  # NAME.json in the folder of a run that measures it
LOST_DISTANCE = 1.5  # times the first validation's distance to the manifold

Record = dict[str, Any]


def distil(run: StudyRun, folder: Path, commit: str, failure: str = "") -> Record:
    """The results of a finished run, or of one that training had to stop with the error `failure`."""
    found = read_run(folder)
    validation = {
        key: rounded(column(found.validations, key))
        for name in VALIDATED
        for key in (name, f"{name}_stderr")
    }
    head, measured = found.head, [name for name in MEASURED if (folder / f"{name}.json").is_file()]
    return {
        "study": run.study, "arm": run.arm, "seed": run.seed, "commit": commit, "versions": head.get("versions"),
        "device": head.get("device"), "digest": digest(identity(run.config)), "config": identity(run.config),
        "steps": [line["step"] for line in found.train],
        "curves": {key: shortened(rounded(column(found.train, key), DIGITS)) for key in CURVES},
        "validation": {"step": [line["step"] for line in found.validations]} | validation,
        "per_step": {key: rounded(step_means(found, key), DIGITS) for key in PER_STEP},
        "seconds": {name: rounded([mean(column(found.train, f"time/{name}"))], DIGITS)[0] for name in PHASES},
        "collapsed": failure or collapse(validation),
    } | {name: read_object(folder / f"{name}.json") for name in measured}  # fmt: skip


def collapse(validation: Mapping[str, Sequence[float | None]]) -> str:
    """Why a run counts as collapsed, if it does.

    The rule compares the last validation with the first: the reward is lower by more than two standard errors of the
    first's clips, or the distance to the manifold is 1.5 times as large. Stopped runs count as collapsed anyway.
    """
    first, last = (
        {key: as_float(values[at]) for key, values in validation.items()} for at in (0, -1)
    )
    if last["reward/total"] < first["reward/total"] - 2 * first["reward/total_stderr"]:
        return "the reward fell below that of the start"
    if last["gold/distance"] > LOST_DISTANCE * first["gold/distance"]:
        return "the clips left the manifold"
    return ""


def step_means(run: RunHistory, key: str) -> np.ndarray:
    """Mean of a metric over the run per denoising step, (T,); NaN where a step was never trained."""
    grid = run.grid(key)
    return np.array([mean(values) for values in grid.T])


def mean(values: np.ndarray) -> float:
    """Mean of the finite values; NaN if there are none."""
    found = values[np.isfinite(values)]
    return float(found.mean()) if len(found) else math.nan


def rounded(values: Sequence[float] | np.ndarray, digits: int = DIGITS + 1) -> list[float | None]:
    """Round to `digits` significant digits; None for values that JSON lacks."""
    return [float(f"{value:.{digits}g}") if math.isfinite(value) else None for value in values]


def shortened(values: list[float | None]) -> list[float | None] | float | None:
    """Collapse a curve that never changes to one number."""
    return values[0] if values and all(value == values[0] for value in values) else values


def curve(record: Record, key: str) -> np.ndarray:
    """A metric at the record's `steps`; NaN where it has no value."""
    values = record["curves"][key]
    return np.array(
        [
            as_float(v)
            for v in (values if isinstance(values, list) else [values] * len(record["steps"]))
        ]
    )


def validated(record: Record, key: str, at: int = -1) -> float:
    """A metric of the first (0), middle or last (-1) validation; NaN if training was stopped before the last."""
    steps = record["validation"]["step"]
    wanted = record["config"]["max_steps"] if at == -1 else steps[at] if at < len(steps) else None
    return as_float(record["validation"][key][steps.index(wanted)]) if wanted in steps else math.nan


def path_kl(record: Record) -> float:
    """KL to the base model at the end of a run; NaN if it was not measured, or training was stopped."""
    return as_float(record.get("path_kl", {}).get("mean"))


def schedule_of(config: Mapping[str, Any]) -> Schedule:
    """The sampler of a run's first iteration, computed from its configuration."""
    shift = (
        config["timestep_shift"]
        or open_backbone(ROOT / config["pretrained_model_root"]).sampling.shift
    )
    whole = build_schedule(
        config["sde_type"], flow_sigmas(config["num_sampling_steps"], shift), config["eta"]
    )
    kind, *size = config["sde_window"].split(":")
    kind += (
        "_iteration" if size and not kind.endswith("_iteration") else ""
    )  # as the runs of these studies had them
    windows = parse_windows(":".join([kind, *size]), whole.stochastic, config["seed"])
    start = windows.start(0, 0, 0)
    return whole.window(range(start, start + windows.size))


def write(path: Path, record: Record) -> None:
    """Write a file atomically, one line per entry."""
    parts = ",\n".join(
        f'"{key}": {json.dumps(value, separators=(",", ":"))}' for key, value in record.items()
    )
    draft = path.with_suffix(".tmp")
    draft.write_text("{\n" + parts + "\n}\n", encoding="utf-8")
    os.replace(draft, path)


def read(path: Path) -> Record:
    record = read_object(path)
    if digest(record.get("config") or {}) != record.get("digest"):
        raise ConfigError(
            f"{path} was edited, or a default has changed since: its configuration is not that of its digest; "
            "restore or delete it"
        )
    return record


def read_all(folder: Path) -> dict[str, Record]:
    """All results in a folder, by digest."""
    return {record["digest"]: record for record in map(read, sorted(folder.glob("*.json")))}


def check_same(run: StudyRun, path: Path, there: Mapping[str, Any]) -> None:
    """Reject a file or folder with this run's name that holds another configuration."""
    now, there = updated(identity(run.config)), updated(there)
    other = sorted(key for key in now.keys() | there.keys() if now.get(key) != there.get(key))
    if other:
        raise ConfigError(
            f"{path} was made with {other[0]} {there.get(other[0])!r}, but the study now says {now.get(other[0])!r}: "
            "delete or move it to run it again, or change the study back"
        )
