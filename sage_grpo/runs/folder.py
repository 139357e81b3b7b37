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
from sage_grpo.runs.hacking import divergence
from sage_grpo.runs.tracker import Tracker, has_line

CONTENTS = (
    "config.yaml", "command.txt", "status.json", "metrics.jsonl", "report.html", "validation", "checkpoints", "flight",
    "tensorboard",
)  # fmt: skip


class RunFolder:
    """Constructing it writes nothing; `open` creates the folder."""

    def __init__(self, config: Config, ranks: Ranks) -> None:
        self.config, self.ranks, self.path = config, ranks, Path(config.output_dir)
        self.tracker: Tracker | None = None
        old = [name for name in CONTENTS if (self.path / name).exists()]
        if old and not (config.overwrite or config.resume_from_checkpoint):
            raise ConfigError(
                f"output_dir {self.path} already holds a run ({old[0]}); give another one, "
                "--resume_from_checkpoint auto to continue it, or --overwrite to replace it"
            )

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def open(self, step: int) -> None:
        """Create the folder and write the run's description before it continues after iteration `step`."""
        if not self.ranks.first:
            return
        self.path.mkdir(parents=True, exist_ok=True)
        for name in CONTENTS if self.config.overwrite and not self.config.resume_from_checkpoint else ():
            path = self.path / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
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
            image = torch.from_numpy(np.array(Image.open(sheet).convert("RGB")))
            self.tracker.show("validation/clips", image, step)

    def divergence(self, step: int) -> str:
        """On the first rank, a warning if reward and held-out reward have diverged; else empty."""
        return divergence(self.path, step) if self.ranks.first and self.config.holdout_reward else ""

    def close(self) -> None:
        if self.tracker:
            self.tracker.close()
