"""The run folder as training writes it: configuration, command, metrics, status, validation clips.

Only the first rank writes. `runs/history.py` reads it back; checkpoints are in `train/checkpoint.py`.
"""

import dataclasses
import platform
import shlex
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from PIL import Image

from sage_grpo.config import Config, ConfigError
from sage_grpo.json_files import write_json
from sage_grpo.parallel.ranks import Ranks
from sage_grpo.runs.clips import divergence
from sage_grpo.runs.lock import WAIT, Lock
from sage_grpo.runs.tracker import Tracker, has_line

CONTENTS = (
    "config.yaml", "command.txt", "status.json", "metrics.jsonl", "report.html", "validation", "checkpoints", "flight",
    "tensorboard",
)  # fmt: skip
WRITTEN_FIRST = CONTENTS[:2]


class RunFolder:
    """Constructing it writes nothing; `take` locks the folder, `open` begins a run in it, `close` unlocks it."""

    def __init__(self, config: Config, ranks: Ranks) -> None:
        self.config, self.ranks, self.path = config, ranks, Path(config.output_dir)
        self.tracker: Tracker | None = None
        self.lock: Lock | None = None
        self._check()

    def _check(self) -> set[str]:
        """Refuse a folder that holds an older run, unless told what to do with it; returns the names in the folder."""
        try:
            names = {path.name for path in self.path.iterdir()}
        except FileNotFoundError:
            return set()
        except OSError as error:
            raise ConfigError(f"output_dir {self.path} cannot be used: {error.strerror}") from error
        old = [name for name in CONTENTS if name in names]
        if old and not (self.config.overwrite or self.config.resume_from_checkpoint):
            raise ConfigError(
                f"output_dir {self.path} already holds a run ({old[0]}); give another one, "
                "--resume_from_checkpoint auto to continue it, or --overwrite to replace it"
            )
        return names

    def take(self) -> None:
        """Keep other runs out of the folder until `close`; all ranks call this, and get the same error."""
        if problem := self.ranks.together(lambda: self._take() if self.ranks.first else "")[0]:
            self.close()
            raise ConfigError(problem)

    def _take(self) -> str:
        """Lock the folder; returns why it cannot be used."""
        patient = self.config.resume_from_checkpoint in ("auto", "last_good")
        try:
            others = {name for name in self._check() if not name.startswith(("lock", "logs"))}  # logs: the launcher's
            if self._replaces and others and not others.issuperset(WRITTEN_FIRST):
                return (
                    f"overwrite is True, but output_dir {self.path} holds {min(others)} and never was a run, which has "
                    f"{' and '.join(WRITTEN_FIRST)}; give another one, or empty it yourself"
                )
            self.lock = Lock(self.path, patient, min(WAIT, self.config.start_timeout / 2))
            self._check()  # a run may have ended since
        except ConfigError as error:
            return str(error)
        except OSError as error:
            return f"output_dir {self.path} cannot be written: {error.strerror}"
        return ""

    @property
    def _replaces(self) -> bool:
        return self.config.overwrite and not self.config.resume_from_checkpoint

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def open(self, step: int) -> None:
        """Create the folder and write the run's description before it continues after iteration `step`."""
        if not self.ranks.first:
            return
        self.path.mkdir(parents=True, exist_ok=True)
        for path in (self.path / name for name in CONTENTS if self._replaces):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
        (self.path / "config.yaml").write_text(self.config.to_yaml())
        (self.path / "command.txt").write_text(shlex.join(sys.orig_argv) + "\n")
        self.tracker = Tracker(self.path, self.config.report_to, dataclasses.asdict(self.config), step)

    def log(self, kind: str, step: int, record: dict[str, Any]) -> None:
        if self.tracker:
            self.tracker.write(kind, step, record)

    def has(self, kind: str, step: int) -> bool:
        """Whether the metrics have a line of this kind and step."""
        return has_line(self.path / "metrics.jsonl", kind, step)

    def log_start(self, step: int, record: dict[str, Any]) -> None:
        """Write the line that marks a start or a resume."""
        versions = {"python": platform.python_version(), "torch": torch.__version__, "diffusers": diffusers.__version__}
        where = torch.cuda.get_device_name() if self.ranks.device.type == "cuda" else "CPU"
        about = {"time": time.strftime("%Y-%m-%dT%H:%M:%S"), "versions": versions, "device": where}
        self.log("run", step, about | {"ranks": self.ranks.world} | record)

    def write_status(self, state: str, step: int, message: str) -> None:
        """Replace status.json; a full disk does not stop the run."""
        if not self.ranks.first:
            return
        values = {"state": state, "step": step, "message": message, "time": time.strftime("%Y-%m-%dT%H:%M:%S")}
        try:
            write_json(self.path / "status.json", values)
        except OSError as error:
            self.ranks.log_once(f"status.json could not be written: {error}")

    def validation_folder(self, step: int) -> Path:
        return self.path / "validation" / f"step-{step:06d}"

    def log_validation(self, step: int, record: dict[str, Any]) -> None:
        """Write a metrics line, and send the contact sheet to the trackers."""
        self.log("validation", step, record)
        sheet = self.validation_folder(step) / "sheet.png"
        if self.tracker and sheet.is_file():
            self.tracker.show("validation/clips", np.array(Image.open(sheet).convert("RGB")), step)

    def divergence(self, step: int) -> str:
        """On the first rank, a warning if reward and held-out reward have diverged; else empty."""
        return divergence(self.path, step) if self.ranks.first and self.config.holdout_reward else ""

    def close(self) -> None:
        if self.tracker:
            self.tracker.close()
        if self.lock:
            self.lock.release()
