"""The run folder as training writes it: configuration, command, metrics and their trackers, status, validation clips.

Only the first rank writes. `runs/history.py` reads it back; checkpoints are in `train/checkpoint.py`.
"""

import dataclasses
import json
import os
import platform
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from PIL import Image

from sage_grpo.config.fields import Config, ConfigError
from sage_grpo.files.json_files import finite, write_json
from sage_grpo.parallel.ranks import Ranks
from sage_grpo.runs.clips import divergence
from sage_grpo.runs.diagnosis import diagnose
from sage_grpo.runs.history import read_run
from sage_grpo.runs.lock import WAIT, Lock

CONTENTS = ("config.yaml", "command.txt", "status.json", "metrics.jsonl", "report.html")
CONTENTS += ("validation", "checkpoints", "flight", "tensorboard")
WRITTEN_FIRST = CONTENTS[:2]
PAGE_SECONDS = 600  # report.html is at least so old before it is written again


class RunFolder:
    """Constructing it writes nothing; `take` locks the folder, `open` begins a run in it, `close` unlocks it."""

    def __init__(self, config: Config, ranks: Ranks) -> None:
        self.config, self.ranks, self.path = config, ranks, Path(config.output_dir)
        self.checkpoints = self.path / "checkpoints"
        self._replaces = config.overwrite and not config.resume_from_checkpoint
        self.tracker: Tracker | None = None
        self.lock: Lock | None = None
        self.finding = ""  # printed last
        self.report_module: str | None = (
            None  # program that writes report.html; the caller names it
        )
        self.page: subprocess.Popen | None = None  # that program, while it runs
        self.page_time = time.monotonic()  # when it was last started
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
            choices = "give another one, --resume_from_checkpoint auto to continue it, or --overwrite to replace it"
            raise ConfigError(f"output_dir {self.path} already holds a run ({old[0]}); {choices}")
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
            others = {
                name for name in self._check() if not name.startswith(("lock", "logs"))
            }  # logs: the launcher's
            if self._replaces and others and not others.issuperset(WRITTEN_FIRST):
                problem = f"output_dir {self.path} holds {min(others)} and never was a run"
                files = " and ".join(WRITTEN_FIRST)
                return f"overwrite is True, but {problem}, which has {files}; give another one, or empty it yourself"
            self.lock = Lock(self.path, patient, min(WAIT, self.config.start_timeout / 2))
            self._check()  # a run may have ended since
        except ConfigError as error:
            return str(error)
        except OSError as error:
            return f"output_dir {self.path} cannot be written: {error.strerror}"
        return ""

    def open(self, step: int) -> None:
        """Create the folder and write the run's description before it continues after iteration `step`."""
        if not self.ranks.first:
            return
        self.path.mkdir(parents=True, exist_ok=True)
        for path in (self.path / name for name in CONTENTS if self._replaces):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(
                missing_ok=True
            )
        (self.path / "config.yaml").write_text(self.config.to_yaml())
        (self.path / "command.txt").write_text(shlex.join(sys.orig_argv) + "\n")
        self.tracker = Tracker(
            self.path, self.config.report_to, dataclasses.asdict(self.config), step
        )

    def log(self, kind: str, step: int, record: dict[str, Any]) -> None:
        if self.tracker:
            self.tracker.write(kind, step, record)

    def has(self, kind: str, step: int) -> bool:
        """Whether the metrics have a line of this kind and step, as `Tracker` writes it."""
        file, line = self.path / "metrics.jsonl", rf'^{{"kind": "{kind}", "step": {step}[,}}]'
        return file.is_file() and re.search(line, file.read_text(), re.MULTILINE) is not None

    def log_start(self, step: int, record: dict[str, Any]) -> None:
        """Write the line that marks a start or a resume."""
        versions = {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "diffusers": diffusers.__version__,
        }
        where = torch.cuda.get_device_name() if self.ranks.device.type == "cuda" else "CPU"
        about = {"time": time.strftime("%Y-%m-%dT%H:%M:%S"), "versions": versions, "device": where}
        self.log("run", step, about | {"ranks": self.ranks.world} | record)

    def write_status(self, state: str, step: int, message: str) -> None:
        """Replace status.json; a full disk does not stop the run."""
        if not self.ranks.first:
            return
        values = {
            "state": state,
            "step": step,
            "message": message,
            "time": time.strftime("%Y-%m-%dT%H:%M:%S"),
        }
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
        return (
            divergence(self.path, step) if self.ranks.first and self.config.holdout_reward else ""
        )

    def diagnose(self, step: int) -> None:
        """On the first rank, print the first finding about the run so far if it is a new one; refresh report.html."""
        try:
            if self.ranks.first and time.monotonic() - self.page_time > PAGE_SECONDS:
                self.begin_page()
            found = diagnose(read_run(self.path)) if self.ranks.first else []
        except (
            OSError,
            ConfigError,
        ) as error:  # a damaged file or a machine without room must not stop the training
            return self.ranks.log_once(f"no diagnosis: {error}")
        before, self.finding = self.finding, found[0].name if found else ""
        if self.finding != before:
            self.ranks.log_once(f"iteration {step}: {found[0] if found else 'no finding any more'}")

    def begin_page(self) -> None:
        """Write report.html in a process of its own, which a Ctrl-C does not reach; training goes on."""
        self.finish_page()
        self.page_time = time.monotonic()
        if self.report_module is None:
            return
        command = [sys.executable, "-m", self.report_module, str(self.path)]
        self.page = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)

    def finish_page(self) -> None:
        """Wait for the page that is being written, but not for ever."""
        try:
            if self.page:
                self.page.wait(PAGE_SECONDS / 10)
        except subprocess.TimeoutExpired:
            self.page.kill()

    def close(self) -> None:
        self.finish_page()
        if self.tracker:
            self.tracker.close()
        if self.lock:
            self.lock.release()


class Tracker:
    """Writes records to RUN/metrics.jsonl and to the trackers of `report_to`; only the first rank has one."""

    def __init__(
        self, folder: Path, report_to: Sequence[str], config: Mapping[str, Any], step: int
    ) -> None:
        """step: the iteration after which the run starts or resumes."""
        self.file = folder / "metrics.jsonl"
        if self.file.is_file():  # a killed run may have left a partial line
            os.truncate(self.file, self.file.read_bytes().rfind(b"\n") + 1)
        self.buffer: list[str] = []  # lines not yet written because the disk was full
        self.board_folder = folder / "tensorboard" if "tensorboard" in report_to else None
        self.board = self.wandb = None
        self._to_board(lambda board: None, purge_step=step + 1)
        if "wandb" in report_to:
            import wandb

            file = folder / "wandb_id"  # the same run after a resume
            if not file.is_file():
                file.write_text(secrets.token_hex(8))
            about = {"project": "sage-grpo", "dir": str(folder), "config": dict(config)}
            self.wandb = wandb.init(**about, id=file.read_text(), resume="allow")

    def write(self, kind: str, step: int, record: Mapping[str, Any]) -> None:
        """Write one line, with non-finite numbers as null; scalars also go to the trackers."""
        line = finite({"kind": kind, "step": step, **record})
        self.buffer.append(json.dumps(line, allow_nan=False) + "\n")
        self._append()
        prefix = "" if kind == "train" else f"{kind}/"
        scalars = {
            prefix + k: v for k, v in line.items() if "/" in k and isinstance(v, (int, float))
        }
        if kind != "run":
            self._to_board(
                lambda board: [
                    board.add_scalar(name, value, step) for name, value in scalars.items()
                ]
            )
        if kind != "run" and self.wandb:
            self.wandb.log(scalars, step=step)

    def _append(self) -> None:
        """Write the buffered lines; on a full disk they stay in the buffer, and the file stays as it was."""
        size = self.file.stat().st_size if self.file.exists() else 0
        try:
            with self.file.open("a") as file:
                file.write("".join(self.buffer))
        except OSError as error:
            if self.file.exists():
                os.truncate(self.file, size)
            text = f"note: {self.file} could not be written ({error}); buffering metrics in memory"
            print(text, file=sys.stderr, flush=True)
            return
        self.buffer = []

    def _to_board(self, send: Callable[[Any], Any], **opening: int) -> None:
        """Write to TensorBoard unless lines are buffered. Its writer never recovers from an error, so reopen it."""
        if self.board_folder is None or self.buffer:
            return
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and optional

        for _ in range(2):
            try:
                self.board = self.board or SummaryWriter(str(self.board_folder), **opening)
                send(self.board)
                return
            except OSError as error:
                self.board = None
                print(
                    f"note: {self.board_folder} could not be written ({error})",
                    file=sys.stderr,
                    flush=True,
                )

    def show(self, name: str, sheet: np.ndarray, step: int) -> None:
        """Send an image (H, W, 3) uint8 to the trackers."""
        self._to_board(lambda board: board.add_image(name, sheet, step, dataformats="HWC"))
        if self.wandb:
            import wandb

            self.wandb.log({name: wandb.Image(sheet)}, step=step)

    def close(self) -> None:
        if self.board:
            self._to_board(lambda board: board.close())
        if self.wandb:
            self.wandb.finish()
