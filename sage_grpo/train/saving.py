"""Writes checkpoints while training goes on: from a copy, in a thread, committed at the next safe point.

However slow the disk is, a save that moves is progress; one that does not ends the run like any other hang.
"""

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sage_grpo.background import Work
from sage_grpo.parallel.ranks import RankError
from sage_grpo.train import checkpoint
from sage_grpo.train.checkpoint import finish, planned_files, write_files
from sage_grpo.train.guards import TrainingError

if TYPE_CHECKING:
    from sage_grpo.train.trainer import Trainer

PAUSE = 0.05  # seconds between looks at a save that is waited for


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, in one sentence; earlier checkpoints are untouched."""


class Save:
    """A checkpoint of a trainer's state after its last optimizer step.

    All ranks construct it and call `poll` or `wait`. The ranks of one model replica write their shards, the first rank
    everything unsharded. If any of them fails, all raise CheckpointError, and no folder appears.
    """

    def __init__(self, trainer: "Trainer", folder: Path, export: bool) -> None:
        self.ranks, self.config, self.step = trainer.ranks, trainer.config, trainer.settled_step
        self.good, self.committing = trainer.vote.in_a_row == 0, False
        self.target = folder / f"step-{self.step:06d}"
        self.draft = self.target.with_suffix(".tmp")
        self._together(lambda: shutil.rmtree(self.draft, ignore_errors=True) if self.ranks.first else None)
        self._together(lambda: (self.draft / "trainer").mkdir(parents=True, exist_ok=True))
        self.in_background = self.config.async_save and not self.ranks.any(not checkpoint.fits_in_memory(trainer))
        files: dict[str, Any] = {}
        self._together(lambda: files.update(planned_files(trainer, export, copied=self.in_background)))
        self.work = Work(lambda advance: write_files(self.draft, files, advance))

    def poll(self) -> bool:
        """Whether the checkpoint is committed; the answer is the same on all ranks."""
        if self.ranks.any(not self.work.done()):
            return False
        results = self._together(self.work.result)
        if self.committing:
            return True
        hashes = {name: digest for part in results for name, digest in part.items()}
        self.committing = True
        place = (self.draft, self.target, hashes, self.config)
        self.work = Work(lambda advance: finish(*place, advance) if self.ranks.first else None)
        return False

    def wait(self, beat: Callable[[], None]) -> None:
        """Wait until it is committed. `beat` is called as long as this rank's files grow."""
        while not self.poll():
            if self.work.moved():
                beat()
            time.sleep(PAUSE)

    def _together(self, call: Callable[[], Any]) -> list[Any]:
        try:
            return self.ranks.together(call)
        except RankError as error:
            if self.ranks.first:
                shutil.rmtree(self.draft, ignore_errors=True)
            raise CheckpointError(f"{self.target.name} could not be written: {error}") from error


class Saves:
    """A run's checkpoints: what is saved, what is being written, what failed and must be tried again."""

    def __init__(self, trainer: "Trainer", folder: Path) -> None:
        self.trainer, self.folder, self.failed, self.begun = trainer, folder, False, time.monotonic()
        self.step, self.good_step = -1, None  # of the last committed one, of the last good one
        self.current: Save | None = None

    def resumed(self, step: int) -> None:
        """The run continues from its own checkpoint."""
        self.step, self.good_step = step, step if self.trainer.vote.in_a_row == 0 else None

    @property
    def is_due(self) -> bool:
        """Whether the last attempt failed, or is `save_minutes` ago."""
        limit, since = 60 * self.trainer.config.save_minutes, time.monotonic() - self.begun
        if self.failed or not limit or self.trainer.step != self.trainer.settled_step:
            return self.failed
        return self.trainer.ranks.any(since > limit)

    def begin(self, must: bool = True) -> None:
        """Save the state, unless it is saved. If it `must` be, this waits for it, and a failure ends the run; else a
        failure is logged and tried again later."""
        trainer, config = self.trainer, self.trainer.config
        self.settle(wait=True)
        if self.step == trainer.settled_step:
            return
        trainer.guards.note("save")
        self.begun = time.monotonic()
        every, last = config.export_interval, trainer.settled_step == config.max_steps
        export = config.use_lora or last or bool(every and trainer.settled_step % every == 0)
        if bad := [name for name in trainer.ranks.together(lambda: checkpoint.first_nonfinite(trainer)) if name]:
            raise self.diverged(f"step-{trainer.settled_step:06d} was not written: {bad[0]} is not finite")
        try:
            self.current = Save(trainer, self.folder, export)
        except CheckpointError as error:
            return self._fail(error, must)
        if must or not self.current.in_background:
            self.settle(wait=True, must=must)

    def settle(self, wait: bool = False, must: bool = False) -> None:
        """Commit the checkpoint that is being written once its files are on disk."""
        if self.current is None:
            return
        try:
            if wait:
                self.current.wait(self.trainer.guards.beat)
            elif not self.current.poll():
                return
        except CheckpointError as error:
            self.current = None
            return self._fail(error, must)
        self.step, self.failed = self.current.step, False
        self.good_step = self.current.step if self.current.good else self.good_step
        self.current = None

    def _fail(self, error: CheckpointError, must: bool) -> None:
        if must:
            raise TrainingError(str(error)) from error
        self.trainer.ranks.log_once(f"{error}; trying again after the next iteration")
        self.failed = True

    def diverged(self, what: str) -> TrainingError:
        """Why training cannot go on, and the way back."""
        config, way = self.trainer.config, "there is no good checkpoint to go back to"
        if self.good_step is not None:
            way = f"--resume_from_checkpoint last_good goes back to step-{self.good_step:06d}"
        rates = f"learning_rate ({config.learning_rate:g}) or weight_decay ({config.weight_decay:g})"
        return TrainingError(f"{what}: lower {rates}; {way}")
