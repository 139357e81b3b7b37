"""Results of the studies: one file per edition, `records/EDITION.jsonl`, with one finished run per line.

A line is a JSON object:

    study, arm, seed, commit, versions, device     where the run comes from
    config       all flags that determine what it computes; `digest` is the hash of the non-default ones
    steps        iterations of the curves
    curves       training metrics at these iterations; a single number if a metric never changed
    validation   at start, middle and end: held-out prompts sampled with the ODE, with standard errors over clips
    per_step     means over the run per denoising step
    seconds      means per phase of an iteration
    path_kl      where the study asks for it, the KL to the base model at the end: mean over clips, stderr, clips
    spread       where the study asks for it, the spread of the clips of one prompt before and after training
                 (research/studies/spread.py)
    collapsed    empty, or the reason by the rule of `collapse`

A run that training had to stop also counts as finished: its `collapsed` says so.

Several processes may add runs to one file: `append` holds an exclusive lock (flock) while it writes its line and
flushes it to disk. If a process dies in the middle of a line, that line has no newline at its end: readers skip it, and
the next append removes it. The order of the lines has no meaning; `read_all` sorts runs by name.
"""

import fcntl
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from research.studies.questions import ROOT, StudyRun, digest, identity, run_name, updated
from sage_grpo.algo.sde import Schedule, build_schedule, flow_sigmas
from sage_grpo.config.fields import ConfigError
from sage_grpo.config.windows import parse_window
from sage_grpo.files.foreign import new_name
from sage_grpo.files.json_files import read_object
from sage_grpo.models.registry import open_backbone
from sage_grpo.runs.history import RunHistory, as_float, column, read_run
from sage_grpo.train.windows import build_windows

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
    history = read_run(folder)
    config = identity(run.config)
    validation = {
        key: rounded(column(history.validations, key))
        for name in VALIDATED
        for key in (name, f"{name}_stderr")
    }
    seconds = [mean(column(history.full_lines, f"time/{name}")) for name in PHASES]

    record = {
        "study": run.study,
        "arm": run.arm,
        "seed": run.seed,
        "commit": commit,
        "versions": history.head.get("versions"),
        "device": history.head.get("device"),
        "digest": digest(config),
        "config": config,
        "steps": [line["step"] for line in history.full_lines],
        "curves": {
            key: shortened(rounded(column(history.full_lines, key), DIGITS)) for key in CURVES
        },
        "validation": {"step": [line["step"] for line in history.validations]} | validation,
        "per_step": {key: rounded(step_means(history, key), DIGITS) for key in PER_STEP},
        "seconds": dict(zip(PHASES, rounded(seconds, DIGITS), strict=True)),
        "collapsed": failure or collapse(validation),
    }
    for name in MEASURED:
        path = folder / f"{name}.json"
        if path.is_file():
            record[name] = read_object(path)
    return record


def collapse(validation: Mapping[str, Sequence[float | None]]) -> str:
    """Why a run counts as collapsed, if it does.

    The rule compares the last validation with the first: the reward is lower by more than two standard errors of the
    first's clips, or the distance to the manifold is 1.5 times as large. Stopped runs count as collapsed anyway.
    """
    first = {key: as_float(values[0]) for key, values in validation.items()}
    last = {key: as_float(values[-1]) for key, values in validation.items()}
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
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else math.nan


def rounded(values: Sequence[float] | np.ndarray, digits: int = DIGITS + 1) -> list[float | None]:
    """Round to `digits` significant digits; None for NaN and infinities, which JSON lacks."""
    return [float(f"{value:.{digits}g}") if math.isfinite(value) else None for value in values]


def shortened(values: list[float | None]) -> list[float | None] | float | None:
    """Collapse a curve that never changes to one number."""
    return values[0] if values and all(value == values[0] for value in values) else values


def curve(record: Record, key: str) -> np.ndarray:
    """A metric at the record's `steps`; NaN where it has no value."""
    values = record["curves"][key]
    if not isinstance(values, list):
        values = [values] * len(record["steps"])
    return np.array([as_float(value) for value in values])


def validated(record: Record, key: str, at: int = -1) -> float:
    """A metric of the first (0), middle or last (-1) validation; NaN if training was stopped before it."""
    steps = record["validation"]["step"]
    values = record["validation"][key]
    if at == -1:
        last = record["config"]["max_steps"]
        return as_float(values[steps.index(last)]) if last in steps else math.nan
    return as_float(values[at]) if at < len(steps) else math.nan


def path_kl(record: Record) -> float:
    """KL to the base model at the end of a run; NaN if it was not measured, or training was stopped."""
    return as_float(record.get("path_kl", {}).get("mean"))


def schedule_of(config: Mapping[str, Any]) -> Schedule:
    """The sampler of a run's first iteration, computed from its configuration."""
    shift = config["timestep_shift"]
    if not shift:
        shift = open_backbone(ROOT / config["pretrained_model_root"]).sampling.shift
    sigmas = flow_sigmas(config["num_sampling_steps"], shift)
    full = build_schedule(config["sde_type"], sigmas, config["eta"])

    kind, *size = config["sde_window"].split(":")
    if size and not kind.endswith("_iteration"):
        kind += "_iteration"  # the meaning of these windows when the studies ran
    windows = build_windows(parse_window(":".join([kind, *size])), full.stochastic, config["seed"])
    start = windows.start(0, 0, 0)
    return full.window(range(start, start + windows.size))


def append(path: Path, record: Record) -> None:
    """Add a run to the file of its edition; safe beside other processes that do so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
    with path.open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released when the file is closed
        file.seek(0)
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)  # drop a line that a dying process left unfinished
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


def write_lines(path: Path, records: Iterable[Record]) -> None:
    """Replace a file of records atomically; not for a file to which other processes append."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = new_name(path)
    lines = [json.dumps(record, separators=(",", ":")) + "\n" for record in records]
    draft.write_text("".join(lines), encoding="utf-8")
    os.replace(draft, path)


def read_lines(path: Path) -> list[Record]:
    """The JSON objects of a file, one per line; empty if there is no file. An unfinished last line is left out."""
    if not path.is_file():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]
    try:
        return [json.loads(line) for line in lines]
    except ValueError as error:
        raise ConfigError(f"{path} has a line that is not JSON ({error}); restore it") from error


def read_all(path: Path) -> dict[str, Record]:
    """All runs of an edition by digest, sorted by name."""
    runs = {name_of(record): record for record in read_lines(path)}
    for name, record in runs.items():
        if digest(record.get("config") or {}) != record.get("digest"):
            raise ConfigError(
                f"{path}: {name} was edited, or a default has changed since: its configuration is not that of its "
                "digest; restore or delete its line"
            )
    return {runs[name]["digest"]: runs[name] for name in sorted(runs)}


def name_of(record: Record) -> str:
    """The name of the run that a record holds, as in StudyRun."""
    return run_name(record["study"], record["arm"], record["seed"])


def check_same(run: StudyRun, place: str, config: Mapping[str, Any]) -> None:
    """Reject a record or folder with this run's name that holds another configuration.

    place: what the error names.
    """
    expected = updated(identity(run.config))
    stored = updated(config)
    changed = sorted(
        key for key in expected.keys() | stored.keys() if expected.get(key) != stored.get(key)
    )
    if changed:
        flag = changed[0]
        raise ConfigError(
            f"{place} was made with {flag} {stored.get(flag)!r}, but the study now says {expected.get(flag)!r}: "
            "delete or move it to run it again, or change the study back"
        )
