"""The run folder as training writes it: configuration, command, metrics, status, validation clips.

Only the first rank writes. `runs/history.py` reads the metrics back; checkpoints are in `train/checkpoint.py`.
"""

import dataclasses
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from PIL import Image
from torch import Tensor

from sage_grpo.config.fields import Config, ConfigError
from sage_grpo.files.foreign import Refused, check_regular, replace_text
from sage_grpo.files.json_files import printable, write_json
from sage_grpo.files.manifest import delete
from sage_grpo.parallel.ranks import Ranks
from sage_grpo.runs.clips import Record
from sage_grpo.runs.diagnosis import diagnose
from sage_grpo.runs.gallery import Gallery
from sage_grpo.runs.hacking import divergence
from sage_grpo.runs.history import read_run, yardstick_changes
from sage_grpo.runs.lock import WAIT, Lock
from sage_grpo.runs.page_process import PageProcess
from sage_grpo.runs.tracker import Tracker, check_login

WRITTEN_FIRST = ("config.yaml", "command.txt")
CONTENTS = (
    *WRITTEN_FIRST,
    "status.json",
    "metrics.jsonl",
    "report.html",
    "validation",
    "rollouts",
    "checkpoints",
    "flight",
    "tensorboard",
    "wandb",
    "wandb_id",
)


class RunFolder:
    """Constructing it writes nothing; `take` locks the folder, `open` begins a run in it, `close` unlocks it."""

    def __init__(self, config: Config, ranks: Ranks) -> None:
        self.config = config
        self.ranks = ranks
        self.path = Path(config.output_dir)
        self.checkpoints = self.path / "checkpoints"

        self.lock: Lock | None = None
        self.tracker: Tracker | None = None
        self.page = PageProcess(self.path)
        self.gallery = Gallery(self.path, config.rollout_videos)
        # program that writes report.html; the caller names it
        self.report_module: str | None = None
        self.last_finding = ""  # name of the first finding, as last printed

        self._replaces = config.overwrite and not config.resume_from_checkpoint
        self._check()

    # taking the folder

    def take(self) -> None:
        """Keep other runs out of the folder until `close`; all ranks call this, and get the same error."""
        problem = self.ranks.on_all(lambda: self._take() if self.ranks.is_first else "")[0]
        if problem:
            self.close()
            raise ConfigError(problem)

    def _take(self) -> str:
        """Lock the folder; returns why it cannot be used."""
        patient = self.config.resume_from_checkpoint in ("auto", "last_good")
        wait = min(WAIT, self.config.start_timeout / 2)
        try:
            check_login(self.config.report_to)
            names = self._check()
            # the launcher writes logs before the run begins
            others = {name for name in names if not name.startswith(("lock", "logs"))}
            if self._replaces and others and not others.issuperset(WRITTEN_FIRST):
                return (
                    f"overwrite is True, but output_dir {self.path} holds {min(others)} and never was a run,"
                    f" which has {' and '.join(WRITTEN_FIRST)}; give another one, or empty it yourself"
                )
            self.lock = Lock(self.path, patient, wait)
            self._check()  # a run may have ended since
        except ConfigError as error:
            return str(error)
        except OSError as error:
            return f"output_dir {self.path} cannot be written: {error.strerror}"
        return ""

    def _check(self) -> set[str]:
        """Reject a folder that holds an older run, unless told what to do with it; returns the names in it."""
        try:
            names = {path.name for path in self.path.iterdir()}
        except FileNotFoundError:
            return set()
        except OSError as error:
            raise ConfigError(f"output_dir {self.path} cannot be used: {error.strerror}") from error

        contents = [name for name in CONTENTS if name in names]
        if contents and not (self.config.overwrite or self.config.resume_from_checkpoint):
            raise ConfigError(
                f"output_dir {self.path} already holds a run ({contents[0]}); give another one,"
                " --resume_from_checkpoint auto to continue it, or --overwrite to replace it"
            )
        if not self._replaces:
            self._check_links()
        return names

    def _check_links(self) -> None:
        """Reject a folder with links where a run writes: a foreign folder's may lead to files of the user."""
        # checkpoints are checked by their manifests; wandb itself keeps links to its newest files
        try:
            check_regular(self.path, CONTENTS, unless_below=("checkpoints", "wandb"))
        except Refused as error:
            raise ConfigError(f"{error}, or give another output_dir") from error

    def open(self, step: int) -> None:
        """Create the folder and write the run's description before it continues after iteration `step`."""
        if not self.ranks.is_first:
            return
        self.path.mkdir(parents=True, exist_ok=True)
        if self._replaces:
            for name in CONTENTS:
                delete(self.path / name)
        replace_text(self.path / "config.yaml", self.config.to_yaml())
        replace_text(self.path / "command.txt", shlex.join(sys.orig_argv) + "\n")
        config = dataclasses.asdict(self.config)
        self.tracker = Tracker(self.path, self.config.report_to, config, step)

    def close(self) -> None:
        self.page.finish()
        self.gallery.finish()
        if self.tracker:
            self.tracker.close()
        if self.lock:
            self.lock.release()

    # metrics and status

    def log(self, kind: str, step: int, record: dict[str, Any]) -> None:
        if self.tracker:
            self.tracker.write(kind, step, record)

    def log_start(self, step: int, record: dict[str, Any]) -> None:
        """Write the line that marks a start or a resume; before it, one that ends a series if its yardstick changed.

        A run that is killed in between then knows the old yardstick, and of the break.
        """
        broken = self._yardstick_changes(step, record.get("yardstick") or {})
        on_gpu = self.ranks.device.type == "cuda"
        about = {
            "time": _now(),
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "diffusers": diffusers.__version__,
            },
            "device": torch.cuda.get_device_name() if on_gpu else "CPU",
            "ranks": self.ranks.world_size,
        }
        if broken:
            self.log("break", step, broken)
        self.log("run", step, about | record)
        if broken:
            with self._optional("not told which results are not comparable"):
                for sentence in read_run(self.path).break_sentences[-1:]:
                    self.ranks.log_once(sentence)

    def log_limits(self, step: int, measure: Callable[[], dict[str, Any]]) -> None:
        """Write the line of what samples can reach at best, which only reports show."""
        with self._optional("reports cannot show what perfect clips score"):
            self.log("limits", step, measure())

    def _yardstick_changes(self, step: int, yardstick: dict[str, Any]) -> dict[str, Any] | None:
        """What ends a series of results here; None if nothing does, or earlier metrics cannot be read."""
        file = self.path / "metrics.jsonl"
        if not file.is_file() or not file.stat().st_size:
            return None
        with self._optional("not checked whether earlier results are comparable"):
            return yardstick_changes(read_run(self.path), step, yardstick)
        return None

    def log_validation(self, step: int, record: dict[str, Any]) -> None:
        """Write a metrics line, and send the contact sheet to the trackers."""
        self.log("validation", step, record)
        sheet = self.validation_folder(step) / "sheet.png"
        if self.tracker and sheet.is_file():
            with self._optional("the contact sheet is not sent to the trackers"):
                image = np.array(Image.open(sheet).convert("RGB"))
                self.tracker.show("validation/clips", image, step)

    def show_rollouts(
        self, step: int, clips: Sequence[Tensor], records: Sequence[Record], fps: int
    ) -> None:
        """Keep the best and the worst clip of a group to look at, in the background."""
        with self._optional("the best and the worst clip of an iteration are not kept"):
            self.gallery.keep(step, clips, records, fps)

    def validation_folder(self, step: int) -> Path:
        return self.path / "validation" / f"step-{step:06d}"

    def validated_steps(self) -> list[int]:
        """The iterations that were validated by the present yardstick."""
        if not (self.path / "metrics.jsonl").is_file():
            return []
        with self._optional("it is not known which iterations were validated"):
            return [line["step"] for line in read_run(self.path).validations]
        return []

    def write_status(self, state: str, step: int, message: str) -> None:
        """Replace status.json; a full disk does not stop the run."""
        if not self.ranks.is_first:
            return
        status = {"state": state, "step": step, "message": message, "time": _now()}
        try:
            write_json(self.path / "status.json", status)
        except OSError as error:
            self.ranks.log_once(f"status.json could not be written: {error}")

    # health of the run

    def divergence(self, step: int) -> str | None:
        """On the first rank, a warning if reward and held-out reward have diverged, else empty; None if unknown."""
        if self.ranks.is_first and self.config.holdout_reward:
            with self._optional("not checked for reward hacking"):
                return divergence(self.path, step, self.validated_steps())
        return None

    def diagnose(self, step: int) -> None:
        """On the first rank, print the first finding about the run so far if it is a new one; refresh report.html."""
        if not self.ranks.is_first:
            return
        if self.report_module:
            with self._optional("report.html cannot be refreshed"):
                self.page.refresh(self.report_module)
        with self._optional("no diagnosis"):
            self._print_finding(step)

    def _print_finding(self, step: int) -> None:
        findings = diagnose(read_run(self.path))
        finding = findings[0].name if findings else ""
        if finding != self.last_finding:
            text = findings[0] if findings else "no finding any more"
            self.ranks.log_once(f"iteration {step}: {text}")
        self.last_finding = finding

    @contextmanager
    def _optional(self, consequence: str) -> Iterator[None]:
        """Context of optional work: any error in it is printed as a note, and training goes on.

        The work reads files that may be damaged or foreign, and may run out of disk space or memory.
        """
        try:
            yield
        except Exception as error:
            self.ranks.log_once(f"{consequence}: {printable(error) or type(error).__name__}")


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S")
