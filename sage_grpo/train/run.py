"""The run folder: configuration, command, metrics, validation clips, checkpoints. Only the first rank writes."""

import dataclasses
import platform
import shlex
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import diffusers
import torch

from sage_grpo.config import Config, ConfigError
from sage_grpo.parallel.ranks import Ranks
from sage_grpo.train import checkpoint
from sage_grpo.train.hacking import divergence
from sage_grpo.train.metrics import Tracker, has_line
from sage_grpo.train.validation import sheet_image

if TYPE_CHECKING:
    from sage_grpo.train.trainer import Trainer

CONTENTS = (
    "config.yaml", "command.txt", "status.json", "metrics.jsonl", "report.html", "validation", "checkpoints", "flight",
    "tensorboard",
)  # fmt: skip


class Run:
    """Made before anything is written; `open` makes the folder."""

    def __init__(self, config: Config, ranks: Ranks) -> None:
        self.config, self.ranks, self.folder = config, ranks, Path(config.output_dir)
        self.tracker: Tracker | None = None
        old = [name for name in CONTENTS if (self.folder / name).exists()]
        if old and not (config.overwrite or config.resume_from_checkpoint):
            raise ConfigError(
                f"output_dir {self.folder} already holds a run ({old[0]}); give another one, "
                "--resume_from_checkpoint auto to go on with it, or --overwrite to replace it"
            )

    def open(self, step: int) -> None:
        """Make the folder and write what the run is, before it goes on after iteration `step`."""
        if not self.ranks.first:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in CONTENTS if self.config.overwrite and not self.config.resume_from_checkpoint else ():
            path = self.folder / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        checkpoint.tidy(self.folder / "checkpoints", step)
        (self.folder / "config.yaml").write_text(self.config.to_yaml())
        (self.folder / "command.txt").write_text(shlex.join(sys.orig_argv) + "\n")
        self.tracker = Tracker(self.folder, self.config.report_to, dataclasses.asdict(self.config), step)

    def log(self, kind: str, step: int, record: dict[str, Any]) -> None:
        if self.tracker:
            self.tracker.write(kind, step, record)

    def has(self, kind: str, step: int) -> bool:
        """Whether the metrics have such a line."""
        return has_line(self.folder / "metrics.jsonl", kind, step)

    def introduce(self, step: int, record: dict[str, Any]) -> None:
        """The line that opens a run or its resumption."""
        versions = {"python": platform.python_version(), "torch": torch.__version__, "diffusers": diffusers.__version__}
        where = torch.cuda.get_device_name() if self.ranks.device.type == "cuda" else "CPU"
        about = {"time": time.strftime("%Y-%m-%dT%H:%M:%S"), "versions": versions, "device": where}
        self.log("run", step, about | {"ranks": self.ranks.world} | record)

    def validation_folder(self, step: int) -> Path:
        return self.folder / "validation" / f"step-{step:06d}"

    def validated(self, step: int, record: dict[str, Any], folder: Path) -> None:
        self.log("validation", step, record)
        if self.tracker and (folder / "sheet.png").is_file():
            self.tracker.show("validation/clips", sheet_image(folder / "sheet.png"), step)

    def divergence(self, step: int) -> str:
        """Whether reward and hold-out have parted, in a sentence of the first rank; empty where they have not."""
        return divergence(self.folder, step) if self.ranks.first and self.config.holdout_reward else ""

    def save(self, trainer: "Trainer") -> None:
        """A checkpoint of the state after this iteration."""
        checkpoint.save(trainer, self.folder / "checkpoints")

    def close(self) -> None:
        if self.tracker:
            self.tracker.close()
