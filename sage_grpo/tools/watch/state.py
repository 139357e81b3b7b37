"""What the page that follows runs shows, read from their folders alone.

A run folder grows while it is read, may be damaged, and may vanish: what can be read is shown, with a note about the
rest.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sage_grpo.files import foreign
from sage_grpo.files.json_files import printable, read_object
from sage_grpo.intervals import interval
from sage_grpo.runs.case import Case
from sage_grpo.runs.clips import LISTING, Clip, pair_clips, read_clips
from sage_grpo.runs.diagnosis import diagnose
from sage_grpo.runs.gallery import read_gallery, step_folders
from sage_grpo.runs.history import RunHistory, as_float, column, read_run
from sage_grpo.tools.diagnose import DIRECTIONS
from sage_grpo.tools.report.page import READ

MAX_METRICS_BYTES = 1_000_000_000
MAX_POINTS = 400  # of a curve
MAX_PAIRS = 12  # of rollouts, and of validation clips
WINDOW = 10  # logged iterations of a running mean

# title -> metric of training lines, whose running mean has an interval
TRAINING = {
    "reward of rollouts": "reward/total",
    "KL to the anchor": "kl/anchor",
    "gradient norm": "policy/grad_norm",
    "gold match of rollouts": "gold/match",
}
# title -> metric of validation lines, with a standard error beside it
VALIDATION = {
    "reward of held-out prompts": "reward/total",
    "gold match of held-out prompts": "gold/match",
}
# a change of these is news
FILES = ("metrics.jsonl", "status.json")
FOLDERS = ("rollouts", "validation")  # or of a listing in them


class Watched:
    """The runs of a page. `clips` maps the numbers that the page knows to files."""

    def __init__(self, runs: Sequence[Path]) -> None:
        self.runs = list(runs)
        self.clips: dict[str, Path] = {}
        self.last: dict[Path, dict[str, Any]] = {}  # what was last read
        self.stamps: dict[Path, tuple[Any, ...]] = {}

    def state(self) -> dict[str, Any]:
        return {"runs": [self.run_state(run) for run in self.runs]}

    def run_state(self, run: Path) -> dict[str, Any]:
        """The state of a run: read again if its files changed; otherwise, or if reading fails, the last one."""
        stamp = _stamp(run)
        if self.stamps.get(run) == stamp and run in self.last:
            return self.last[run]
        problem = ""
        known = self.last.get(run, {})
        try:
            known = self.read(run)
        except Exception as error:  # a damaged or foreign run folder can raise anything
            problem = printable(error) or type(error).__name__
            if not run.is_dir():
                problem = "the run folder is gone"
        self.stamps[run] = stamp
        self.last[run] = known | {"name": run.resolve().name, "problem": _without(problem, run)}
        return self.last[run]

    def read(self, run: Path) -> dict[str, Any]:
        foreign.check_regular(run, READ)
        with foreign.open_regular(run / "metrics.jsonl", MAX_METRICS_BYTES):
            pass
        history = read_run(run)
        case = Case(history)
        return {
            "status": self.status(run),
            "iterations": history.iterations,
            "planned": case.config.max_steps,
            "verdict": DIRECTIONS[case.direction],
            "findings": [
                {
                    "name": finding.name,
                    "evidence": finding.evidence,
                    "cause": finding.rule.cause,
                    "remedy": finding.remedy,
                }
                for finding in diagnose(history)
            ],
            "curves": [*training_curves(history), *validation_curves(history)],
            "phases": phases(history),
            "rollouts": self.rollouts(run, history),
            "validation": self.validation(run, history),
            "breaks": history.break_sentences,
        }

    def status(self, run: Path) -> str:
        path = run / "status.json"
        if not path.is_file():
            return "no status"
        status = read_object(path)
        text = f"{status.get('state')} since {status.get('time')}"
        if status.get("state") == "running":
            text = f"running, iteration {status.get('step')}, {status.get('time')}"
        message = status.get("message")
        return f"{text}: {message}" if message else text

    def rollouts(self, run: Path, history: RunHistory) -> list[dict[str, Any]]:
        """The newest pairs of best and worst clips, newest first."""
        pairs = sorted(read_gallery(run, history.iterations).items(), reverse=True)[:MAX_PAIRS]
        return [
            {
                "step": step,
                "prompt": best.prompt,
                "clips": [self.clip(run, best, "best"), self.clip(run, worst, "worst")],
            }
            for step, (best, worst) in pairs
        ]

    def validation(self, run: Path, history: RunHistory) -> dict[str, Any]:
        """Clips of the newest validation beside those of the first that can be compared with it.

        In most runs that is the base model's.
        """
        comparable = {line["step"] for line in history.validations}
        folders = {
            step: folder
            for step, folder in step_folders(run / "validation").items()
            if step in comparable and (folder / LISTING).is_file()
        }
        if not folders:
            return {"steps": [], "rows": []}
        steps = sorted({min(folders), max(folders)})
        systems = [
            [clip for clip in read_clips(folders[step]) if clip.path.is_file()] for step in steps
        ]
        if len(steps) == 1:
            rows = [[clip] for clip in systems[0]]
        else:
            rows = [list(pair) for pair in pair_clips(*systems)]
        return {
            "steps": steps,
            "rows": [
                {
                    "prompt": row[0].prompt,
                    "clips": [
                        self.clip(run, clip, f"iteration {step}")
                        for step, clip in zip(steps, row, strict=True)
                    ],
                }
                for row in rows[:MAX_PAIRS]
            ],
        }

    def clip(self, run: Path, clip: Clip, title: str) -> dict[str, Any]:
        """A clip as the page knows it: by a number instead of its path; the number changes if the file does."""
        path = foreign.inside(run, clip.path)
        status = path.stat()
        text = f"{path}\0{status.st_mtime_ns}\0{status.st_size}"
        number = hashlib.sha256(text.encode(errors="replace")).hexdigest()[:32]
        self.clips[number] = path
        values = {
            name.removeprefix("reward/"): value
            for name, value in clip.values.items()
            if math.isfinite(value)
        }
        return {"number": number, "title": title, "values": values}


def _stamp(run: Path) -> tuple[Any, ...]:
    """Changes when something that the page shows does."""
    paths = [run / name for name in (*FILES, *FOLDERS)]
    for name in FOLDERS:
        for folder in step_folders(run / name).values():
            paths += [folder, folder / LISTING]  # a folder may be seen before its listing
    stamps: list[tuple[Any, ...]] = []
    for path in paths:
        try:
            status = path.lstat()
            stamps.append((path, status.st_mtime_ns, status.st_size))
        except OSError:
            stamps.append((path,))
    return tuple(stamps)


def _without(text: str, run: Path) -> str:
    """The text without the folder in which the run is."""
    return text.replace(f"{run.resolve().parent}/", "").replace(f"{run.parent}/", "")


# numbers


def training_curves(history: RunHistory) -> list[dict[str, Any]]:
    """Metrics by iteration, with a running mean and its 95 % interval."""
    steps = column(history.iteration_lines, "step")  # of all iterations; some have the reward alone
    curves = []
    for title, metric in TRAINING.items():
        values = column(history.iteration_lines, metric)
        known = np.isfinite(values)
        if known.sum() > 1:
            curves.append(running_curve(title, steps[known], values[known]))
    return curves


def running_curve(title: str, steps: np.ndarray, values: np.ndarray) -> dict[str, Any]:
    """Points, and the mean over the last WINDOW of them with its interval."""
    positions = np.unique(np.linspace(0, len(values) - 1, MAX_POINTS).round().astype(int))
    means = []
    lows = []
    highs = []
    for position in positions:
        window = interval(values[max(0, position + 1 - WINDOW) : position + 1])
        means.append(window.mean)
        lows.append(_finite(window.mean - window.half))
        highs.append(_finite(window.mean + window.half))
    return {
        "title": title,
        "steps": steps[positions].tolist(),
        "points": values[positions].tolist(),
        "means": means,
        "lows": lows,
        "highs": highs,
    }


def validation_curves(history: RunHistory) -> list[dict[str, Any]]:
    """Means over held-out prompts, with the 95 % interval that the standard error gives."""
    curves = []
    for title, metric in VALIDATION.items():
        lines = [line for line in history.validations if math.isfinite(as_float(line.get(metric)))]
        if not lines:
            continue
        means = column(lines, metric)
        errors = np.nan_to_num(column(lines, f"{metric}_stderr"))
        curves.append(
            {
                "title": title,
                "steps": column(lines, "step").tolist(),
                "points": means.tolist(),
                "means": means.tolist(),
                "lows": (means - 1.96 * errors).tolist(),
                "highs": (means + 1.96 * errors).tolist(),
            }
        )
    return curves


def phases(history: RunHistory) -> list[dict[str, Any]]:
    """Seconds of each phase of an iteration, means over the last WINDOW logged ones."""
    recent = history.full_lines[-WINDOW:]
    seconds: dict[str, float] = {}
    for name in _time_names(recent):
        values = column(recent, name)
        values = values[np.isfinite(values)]
        if len(values) and name != "time/total":
            seconds[name.removeprefix("time/")] = float(values.mean())
    return [{"name": name, "seconds": value} for name, value in seconds.items()]


def _time_names(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for line in lines for name in line if name.startswith("time/")))


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
