"""Keeps a run from failing silently: signals, hangs, failures.

    RUN/status.json               running, done, preempted or failed, with the iteration and a sentence
    RUN/flight/rank-00000.json    of a run that failed or hung: each rank's last events and its stack

A signal stops a run at the next safe point, the same on all ranks, with a checkpoint of the last iteration.
"""

import json
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from sage_grpo.exit_codes import FAILED, PREEMPTED
from sage_grpo.files.json_files import write_json
from sage_grpo.parallel.ranks import Ranks
from sage_grpo.runs.folder import RunFolder

SIGNALS = (signal.SIGTERM, signal.SIGINT)
ECHO = 1.0  # seconds within which a second signal is the first one, forwarded by a launcher
MAX_SKIPPED = 5  # consecutive optimizer steps that may be skipped as non-finite
EVENTS = 200  # kept in the flight record


class TrainingError(RuntimeError):
    """Why training cannot continue, in one sentence."""


class Preempted(Exception):
    """A signal asked the run to stop; it can be resumed."""


class Guards:
    """Watches one rank of a run. `stop_if_told` is collective: all ranks must call it."""

    def __init__(self, ranks: Ranks, run: RunFolder, timeout: float) -> None:
        """timeout: seconds without progress after which this process exits."""
        self.ranks = ranks
        self.run = run
        self.timeout = timeout

        self.step = 0
        self.phase = "start"
        self.last_beat = time.monotonic()
        self.events: deque[tuple[float, int, str]] = deque(maxlen=EVENTS)

        self.listening = False
        self.signalled = math.inf  # when a signal arrived

        self.failing = threading.Lock()  # a hang and the error it causes may come at once
        self.failed = False

    def note(self, phase: str) -> None:
        self.phase = phase
        self.events.append((time.time(), self.step, phase))
        self.beat()

    def beat(self) -> None:
        """Record progress: resets the hang timer."""
        self.last_beat = time.monotonic()

    def stop_if_told(self) -> None:
        """Raise Preempted on all ranks if any of them received a signal."""
        if self.listening and self.ranks.any(self.signalled < math.inf):
            where = f"iteration {self.step + 1}, {self.phase}"
            raise Preempted(
                f"stopped by a signal in {where}; resume with --resume_from_checkpoint auto"
            )

    def report(self, state: str, message: str = "") -> None:
        self.run.write_status(state, self.step, message)

    @contextmanager
    def watching(
        self,
        step: int,
        save: Callable[[], None],
        finish_writing: Callable[[bool], None] = lambda wait: None,
    ) -> Iterator[None]:
        """Context for training after iteration `step`: a signal stops the run after `save`; a hang ends the process.

        If training has to stop, a checkpoint that is being written is waited for: `finish_writing(True)`.
        """
        self.step = step
        self.failed = False
        self.listening = True
        self.report("running")
        self.beat()
        stop = threading.Event()
        with heard(self._hear):
            watcher = threading.Thread(target=self._watch, args=(stop,), daemon=True)
            watcher.start()
            try:
                try:
                    yield
                except Preempted:
                    save()
                    raise
                except TrainingError:  # raised by all ranks
                    finish_writing(True)
                    raise
                self.report("done")
            except Preempted as preempted:
                self.report("preempted", str(preempted))
                raise
            except Exception as error:  # including one from `save`
                death = self._death_of_rank(error)
                self._fail(death or str(error), traceback.format_exception(error))
                if death:
                    raise TrainingError(death) from error
                raise
            finally:
                stop.set()
                # if it held the last reference to the process group, it would destroy it while Python exits: an abort
                watcher.join()
                self.listening = False

    def _hear(self, number: int, _: Any) -> None:
        """The first signal takes effect at the next `stop_if_told`, a second one immediately."""
        now = time.monotonic()
        if now - self.signalled > ECHO:
            os._exit(PREEMPTED)
        self.signalled = min(self.signalled, now)

    def _watch(self, stop: threading.Event) -> None:
        """Runs in a thread: end a process without progress, whatever its main thread waits for."""
        while not stop.wait(min(0.5, self.timeout / 10)):
            idle = time.monotonic() - self.last_beat
            if idle > self.timeout:
                where = f"iteration {self.step + 1}, {self.phase}"
                text = f"{where}: no progress for {idle:.0f} s (collective_timeout)"
                if not self._fail(text):
                    return  # the main thread ends this process, with an error
                line = f"post_train.py: rank {self.ranks.world_rank}: {text}"
                print(line, file=sys.stderr, flush=True)
                os._exit(FAILED)

    def _death_of_rank(self, error: Exception) -> str:
        """The likely cause of an error that shows when a rank has died; empty for other errors."""
        if not isinstance(error, dist.DistError) and "gloo" not in str(error).lower():
            return ""
        first = str(error).partition("\n")[0]
        return f"iteration {self.step + 1}, {self.phase}: a rank died or the process group failed ({first})"

    def _fail(self, message: str, trace: Sequence[str] = ()) -> bool:
        """Write this rank's flight record and the status; False if an earlier failure has written them."""
        with self.failing:
            if self.failed:
                return False
            self._write_failure(message, trace)
            self.failed = True
            return True

    def _write_failure(self, message: str, trace: Sequence[str]) -> None:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        stacks = {
            names.get(ident, str(ident)): traceback.format_stack(frame)
            for ident, frame in sys._current_frames().items()
        }
        record = {
            "rank": self.ranks.world_rank,
            "iteration": self.step + 1,
            "phase": self.phase,
            "message": message,
            "idle_seconds": round(time.monotonic() - self.last_beat, 3),
            "error": list(trace),
            "events": list(self.events),
            "stacks": stacks,
        }
        file = self.run.path / "flight" / f"rank-{self.ranks.world_rank:05d}.json"
        try:
            file.parent.mkdir(exist_ok=True)
            write_json(file, record)
        except OSError as error:
            text = f"{file} could not be written ({error}): {json.dumps(record)}"
            print(text, file=sys.stderr, flush=True)
        self.report("failed", message)


@contextmanager
def heard(
    handler: Callable[[int, Any], None], signals: Sequence[signal.Signals] = SIGNALS
) -> Iterator[None]:
    """Context in which signals go to `handler`; only the main thread can receive them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, handler) for number in signals}
    try:
        yield
    finally:
        for number, old_handler in previous.items():
            signal.signal(number, old_handler)
