"""Writes checkpoints while training goes on: from a copy, in a thread, committed at the next safe point.

However slow the disk is, a save that moves is progress; one that does not ends the run like any other hang.
"""

import shutil
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sage_grpo.background import Work
from sage_grpo.parallel.ranks import RankError
from sage_grpo.train.checkpoint import (
    finish,
    first_nonfinite,
    fits_in_memory,
    planned_files,
    write_files,
)
from sage_grpo.train.guards import TrainingError

if TYPE_CHECKING:
    from sage_grpo.train.trainer import Trainer

PAUSE = 0.05  # seconds between looks at a save that is waited for


def writing(trainer: "Trainer", folder: Path, export: bool, copied: bool) -> Iterator[Work]:
    """Write a checkpoint of a trainer's state after its last optimizer step; gives what it waits for.

    All ranks go through it together. The ranks of one model replica write their shards, the first rank everything
    unsharded. If any of them fails, all raise TrainingError, no folder appears, and earlier ones are untouched.
    """
    ranks, target, files = trainer.ranks, folder / f"step-{trainer.settled_step:06d}", {}
    draft = target.with_suffix(".tmp")

    def results(call: Callable[[Callable[[], None]], Any]) -> Generator[Work, None, list[Any]]:
        work = Work(call)
        while ranks.any(not work.done()):
            yield work
        return ranks.together(work.result)

    try:
        ranks.together(lambda: shutil.rmtree(draft, ignore_errors=True) if ranks.first else None)
        ranks.together(lambda: (draft / "trainer").mkdir(parents=True, exist_ok=True))
        ranks.together(lambda: files.update(planned_files(trainer, export, copied)))
        parts = yield from results(lambda advance: write_files(draft, files, advance))
        files.clear()
        place = (
            draft,
            target,
            {name: digest for part in parts for name, digest in part.items()},
            trainer.config,
        )
        yield from results(lambda advance: finish(*place, advance) if ranks.first else None)
    except RankError as error:
        if ranks.first:
            shutil.rmtree(draft, ignore_errors=True)
        raise TrainingError(f"{target.name} could not be written: {error}") from error


class Saves:
    """A run's checkpoints: what is saved, what is being written, what failed and must be tried again."""

    def __init__(self, trainer: "Trainer", folder: Path) -> None:
        self.trainer, self.folder, self.failed, self.begun = (
            trainer,
            folder,
            False,
            time.monotonic(),
        )
        self.step, self.good_step = -1, None  # of the last committed one, of the last good one
        self.current: Iterator[Work] = iter(())

    def resumed(self, step: int) -> None:
        """The run continues from its own checkpoint."""
        self.step, self.good_step = (
            step,
            None if self.trainer.optimization.skipped_in_a_row else step,
        )

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
        trainer, config, step = self.trainer, self.trainer.config, self.trainer.settled_step
        self.settle(wait=True)
        if self.step == step:
            return
        trainer.guards.note("save")
        self.begun = time.monotonic()
        due = bool(config.export_interval) and step % config.export_interval == 0
        export = due or config.use_lora or step == config.max_steps
        if bad := [
            name for name in trainer.ranks.together(lambda: first_nonfinite(trainer)) if name
        ]:
            raise self.diverged(f"step-{step:06d} was not written: {bad[0]} is not finite")
        copied = config.async_save and not trainer.ranks.any(not fits_in_memory(trainer))
        self.current = self._writing(export, copied)
        self.settle(wait=must or not copied, must=must)

    def _writing(self, export: bool, copied: bool) -> Iterator[Work]:
        step, good = self.trainer.settled_step, self.trainer.optimization.skipped_in_a_row == 0
        yield from writing(self.trainer, self.folder, export, copied)
        self.step, self.good_step, self.failed = step, step if good else self.good_step, False

    def settle(self, wait: bool = False, must: bool = False) -> None:
        """Go on with the checkpoint that is being written, until it is committed if told to `wait`."""
        try:
            for work in self.current:
                if not wait:
                    return
                if work.moved():
                    self.trainer.guards.beat()
                time.sleep(PAUSE)
        except TrainingError as error:
            if must:
                raise
            self.trainer.ranks.log_once(f"{error}; trying again after the next iteration")
            self.failed = True

    def diverged(self, what: str) -> TrainingError:
        """Why training cannot go on, and the way back."""
        config, way = self.trainer.config, "there is no good checkpoint to go back to"
        if self.good_step is not None:
            way = f"--resume_from_checkpoint last_good goes back to step-{self.good_step:06d}"
        rates = (
            f"learning_rate ({config.learning_rate:g}) or weight_decay ({config.weight_decay:g})"
        )
        return TrainingError(f"{what}: lower {rates}; {way}")
