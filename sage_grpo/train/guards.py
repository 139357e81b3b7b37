"""What keeps a run from going wrong in silence: signals, hangs, steps that are not finite, rewards that fail.

    RUN/status.json               running, done, preempted or failed, with the iteration and a sentence
    RUN/flight/rank-00000.json    of a run that failed or hung: what each rank did last, and where it is

A signal ends a run between two pieces of work, at the same one on all ranks, with a checkpoint of the last iteration.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from sage_grpo.json_files import write_json
from sage_grpo.parallel.ranks import Ranks
from sage_grpo.rewards.composite import Scores

DONE, FAILED, WRONG_INPUT, PREEMPTED = 0, 1, 2, 75  # exit codes; a scheduler reads the last as: start me again
SIGNALS = (signal.SIGTERM, signal.SIGINT)
ECHO = 1.0  # seconds in which a second signal is the first one, sent on by a launcher
MAX_SKIPPED = 5  # optimizer steps in a row that may be skipped because they are not finite
EVENTS = 200  # kept in the flight record


class TrainingError(RuntimeError):
    """Training cannot go on, in one sentence."""


class Preempted(Exception):
    """A signal asked the run to stop; it can be resumed."""


@dataclass
class StepVote:
    """Which optimizer steps are taken. The norm is that of all ranks' gradients, so that all decide alike."""

    skipped: int = 0
    in_a_row: int = 0  # skipped because they were not finite

    def takes(self, norm: float, taught: bool) -> bool:
        """taught: some rollout has an advantage; without one the gradient says nothing."""
        if taught and math.isfinite(norm):
            self.in_a_row = 0
            return True
        self.skipped += 1
        self.in_a_row += not math.isfinite(norm)
        return False

    @property
    def hopeless(self) -> bool:
        return self.in_a_row > MAX_SKIPPED


def check_rewards(scores: Scores, limit: float, iteration: int) -> None:
    """Stop a run in which more than the share `limit` of the rewards failed."""
    failed = (~scores.total.isfinite()).double().mean().item()
    if failed > limit:
        raise TrainingError(
            f"iteration {iteration}: {failed:.0%} of the rewards failed, more than max_reward_failures ({limit:.0%}); "
            f"the first error was: {scores.errors[0]}"
        )


class Guards:
    """Watches one rank of a run. `enter` and `stop_if_told` are for all ranks together."""

    def __init__(self, ranks: Ranks, folder: Path, timeout: float) -> None:
        """timeout: seconds without any progress after which this process ends itself."""
        self.ranks, self.folder, self.timeout = ranks, folder, timeout
        self.step, self.phase, self.last_beat = 0, "start", time.monotonic()
        self.events: deque[tuple[float, int, str]] = deque(maxlen=EVENTS)
        self.listening, self.signalled = False, math.inf  # when a signal came

    def enter(self, phase: str) -> None:
        """The next phase begins, unless the run was told to stop."""
        self.note(phase)
        self.stop_if_told()

    def note(self, phase: str) -> None:
        self.phase = phase
        self.events.append((time.time(), self.step, phase))
        self.beat()

    def beat(self) -> None:
        """There is progress."""
        self.last_beat = time.monotonic()

    def stop_if_told(self) -> None:
        """Raise Preempted on all ranks if any of them got a signal."""
        if self.listening and self.ranks.any(self.signalled < math.inf):
            raise Preempted(
                f"stopped by a signal in iteration {self.step + 1}, {self.phase}; --resume_from_checkpoint auto goes on"
            )

    def report(self, state: str, message: str = "") -> None:
        """Write status.json; a disk that is full is no reason to stop."""
        if not self.ranks.first:
            return
        values = {"state": state, "step": self.step, "message": message, "time": time.strftime("%Y-%m-%dT%H:%M:%S")}
        try:
            write_json(self.folder / "status.json", values)
        except OSError as error:
            self.ranks.say(f"status.json could not be written: {error}")

    @contextmanager
    def watching(self, step: int, save: Callable[[], None]) -> Iterator[None]:
        """Context of training after iteration `step`: signals are heard and obeyed after `save`, and hangs end."""
        self.step = step
        self.report("running")
        stop, self.listening = threading.Event(), True
        self.beat()
        with heard(self._hear):
            threading.Thread(target=self._watch, args=(stop,), daemon=True).start()
            try:
                try:
                    yield
                except Preempted:
                    save()
                    raise
                self.report("done")
            except Preempted as told:
                self.report("preempted", str(told))
                raise
            except Exception as error:  # of `save` too
                explained = self._explained(error)
                if explained is error:
                    raise
                raise explained from error
            finally:
                stop.set()
                self.listening = False

    def _hear(self, number: int, _: Any) -> None:
        """The first signal is obeyed at the next `stop_if_told`, another one at once."""
        now = time.monotonic()
        if now - self.signalled > ECHO:
            os._exit(PREEMPTED)
        self.signalled = min(self.signalled, now)

    def _watch(self, stop: threading.Event) -> None:
        """In a thread of its own: end a process in which nothing moves, whatever its main thread waits for."""
        while not stop.wait(min(0.5, self.timeout / 10)):
            idle = time.monotonic() - self.last_beat
            if idle > self.timeout:
                text = f"iteration {self.step + 1}, {self.phase}: nothing moved for {idle:.0f} s (collective_timeout)"
                self._record(text)
                self.report("failed", text)
                print(f"post_train.py: rank {self.ranks.world_rank}: {text}", file=sys.stderr, flush=True)
                os._exit(FAILED)

    def _explained(self, error: Exception) -> Exception:
        """The same error, or what it means where ranks lost each other; kept in the flight record and the status."""
        trace = traceback.format_exception(error)
        if isinstance(error, dist.DistError) or "gloo" in str(error).lower():
            first = str(error).partition("\n")[0]
            error = TrainingError(f"iteration {self.step + 1}, {self.phase}: the ranks lost each other ({first})")
        self._record(str(error), trace)
        self.report("failed", str(error))
        return error

    def _record(self, message: str, trace: Sequence[str] = ()) -> None:
        """The flight record of this rank."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        frames = sys._current_frames().items()
        record = {
            "rank": self.ranks.world_rank,
            "iteration": self.step + 1,
            "phase": self.phase,
            "idle_seconds": round(time.monotonic() - self.last_beat, 3),
            "message": message,
            "error": list(trace),
            "events": list(self.events),
            "stacks": {names.get(ident, str(ident)): traceback.format_stack(frame) for ident, frame in frames},
        }
        file = self.folder / "flight" / f"rank-{self.ranks.world_rank:05d}.json"
        try:
            file.parent.mkdir(exist_ok=True)
            write_json(file, record)
        except OSError as error:
            print(f"{file} could not be written ({error}): {json.dumps(record)}", file=sys.stderr, flush=True)


@contextmanager
def heard(handler: Callable[[int, Any], None], signals: Sequence[signal.Signals] = SIGNALS) -> Iterator[None]:
    """Context in which signals go to `handler`; only the main thread can hear them."""
    mine = signals if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.signal(number, handler) for number in mine}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
