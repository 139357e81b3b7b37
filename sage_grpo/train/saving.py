"""Writes checkpoints while training goes on: from a copy, in a thread, committed at the next safe point.

A slow save counts as progress; a stalled one trips the hang timeout.
"""

import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from sage_grpo.background import Work
from sage_grpo.config.fields import Config
from sage_grpo.files import manifest
from sage_grpo.files.json_files import printable
from sage_grpo.files.tensor_files import TensorFile
from sage_grpo.parallel.ranks import RankError, Ranks
from sage_grpo.runs.card import CARD
from sage_grpo.train.checkpoint import fits_in_memory, state_files, write_files
from sage_grpo.train.checkpoint_folders import commit, replace_files
from sage_grpo.train.export import Export
from sage_grpo.train.guards import Guards, TrainingError
from sage_grpo.train.state import TrainState

PAUSE = 0.05  # seconds between looks at a save that is waited for


class Saves:
    """A run's checkpoints: what is saved, what is being written, what failed and must be tried again."""

    def __init__(
        self,
        state: TrainState,
        config: Config,
        ranks: Ranks,
        guards: Guards,
        folder: Path,
        export: Export,
        fingerprints: Mapping[str, Any],
    ) -> None:
        self.state = state
        self.config = config
        self.ranks = ranks
        self.guards = guards
        self.folder = folder
        self.export = export
        self.fingerprints = fingerprints

        self.step = -1  # iteration of the last committed checkpoint
        # iteration of the last one that was written while gradients were finite
        self.good_step: int | None = None
        self.failed = False  # whether the last attempt failed
        self.begun = time.monotonic()  # when the last attempt began
        self.current: Iterator[Work] = iter(())  # the checkpoint that is being written
        self.stale_card: int | None = None  # iteration whose card does not show its validation yet

    def note_resume(self, step: int) -> None:
        """Note that the run continues from its own checkpoint of iteration `step`."""
        self.step = step
        self.good_step = step if self.state.is_good else None

    @property
    def is_due(self) -> bool:
        """Whether the last attempt failed, or is `save_minutes` ago."""
        if self.failed:
            return True
        seconds = 60 * self.config.save_minutes
        if not seconds or self.state.step != self.state.settled_step:
            return False
        return self.ranks.any(time.monotonic() - self.begun > seconds)

    def begin(self, must: bool = True) -> None:
        """Save the state, unless it is saved.

        If it `must` be, this waits for it, and a failure ends the run; else a failure is logged and tried again later.
        """
        self.continue_writing(wait=True)
        step = self.state.settled_step
        if self.step == step:
            return

        self.guards.note("save")
        self.begun = time.monotonic()
        nonfinite = [name for name in self.ranks.on_all(self.state.first_nonfinite) if name]
        if nonfinite:
            raise self.diverged(f"step-{step:06d} was not written: {nonfinite[0]} is not finite")

        no_room = self.config.async_save and self.ranks.any(not fits_in_memory(self.state))
        copied = self.config.async_save and not no_room
        self.current = self._writing(copied)
        self.continue_writing(wait=must or not copied, must=must)

    def _writing(self, copied: bool) -> Iterator[Work]:
        step = self.state.settled_step
        is_good = self.state.is_good
        yield from self.write(self.folder, self.export.is_due(step), copied)
        self.step = step
        self.failed = False
        if is_good:
            self.good_step = step
        self._renew_card()

    def renew_card(self) -> None:
        """Show the validation of this iteration on its checkpoint's card, now or once the checkpoint is committed.

        A checkpoint does not wait for the validation, in which a run may end.
        """
        self.stale_card = self.state.settled_step
        self._renew_card()

    def _renew_card(self) -> None:
        if self.stale_card is None or self.stale_card != self.step:
            return
        self.stale_card = None
        if not self.ranks.is_first:
            return
        path = self.folder / f"step-{self.step:06d}"
        try:
            if CARD in manifest.read(path):
                replace_files(path, self.export.card(self.step))
        except Exception as error:  # a card is not worth a run
            self.ranks.log_once(
                f"the model card of {path.name} lacks its validation: {printable(error)}"
            )

    def write(self, folder: Path, export: bool, copied: bool) -> Iterator[Work]:
        """Write a checkpoint of the state after its last optimizer step; yields the work to wait for.

        All ranks go through it together. The ranks of one model replica write their shards, the first rank everything
        unsharded. If any of them fails, all raise TrainingError, no folder appears, and earlier ones are untouched.
        """
        ranks = self.ranks
        target = folder / f"step-{self.state.settled_step:06d}"
        draft = target.with_suffix(".tmp")
        files: dict[str, TensorFile | str | bytes] = {}

        def clear() -> None:
            if ranks.is_first:
                with suppress(OSError):
                    manifest.delete(draft)

        def commit_draft(advance: Callable[[], None]) -> None:
            if ranks.is_first:
                commit(draft, target, hashes, self.config, advance)

        try:
            ranks.on_all(clear)
            ranks.on_all(lambda: (draft / "trainer").mkdir(parents=True, exist_ok=True))
            ranks.on_all(lambda: files.update(self._files(export, copied)))
            rank_hashes = yield from self._in_threads(
                lambda advance: write_files(draft, files, advance)
            )
            files.clear()
            hashes = {name: digest for part in rank_hashes for name, digest in part.items()}
            yield from self._in_threads(commit_draft)
        except RankError as error:
            clear()
            raise TrainingError(f"{target.name} could not be written: {error}") from error

    def _files(self, export: bool, copied: bool) -> dict[str, TensorFile | str | bytes]:
        """This rank's files; all ranks must call."""
        files = self.export.files(self.state) if export else {}
        files |= state_files(
            self.state,
            config=self.config,
            fingerprints=self.fingerprints,
            ranks=self.ranks,
            copied=copied,
        )
        return files

    def _in_threads(
        self, call: Callable[[Callable[[], None]], Any]
    ) -> Generator[Work, None, list[Any]]:
        """Run a call in a thread of each rank; returns the results of all ranks."""
        work = Work(call)
        while self.ranks.any(not work.done()):
            yield work
        return self.ranks.on_all(work.result)

    def continue_writing(self, wait: bool = False, must: bool = False) -> None:
        """Go on with the checkpoint that is being written, until it is committed if told to `wait`."""
        try:
            for work in self.current:
                if not wait:
                    return
                if work.moved():
                    self.guards.beat()
                time.sleep(PAUSE)
        except TrainingError as error:
            if must:
                raise
            self.ranks.log_once(f"{error}; trying again after the next iteration")
            self.failed = True

    def diverged(self, what: str) -> TrainingError:
        """Why training cannot go on, and the way back."""
        c = self.config
        way_back = "there is no good checkpoint to go back to"
        if self.good_step is not None:
            way_back = f"--resume_from_checkpoint last_good goes back to step-{self.good_step:06d}"
        rates = f"learning_rate ({c.learning_rate:g}) or weight_decay ({c.weight_decay:g})"
        return TrainingError(f"{what}: lower {rates}; {way_back}")
