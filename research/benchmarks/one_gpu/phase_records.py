"""Records the phases of a program that runs unchanged: `sitecustomize.py` starts it.

    FOLDER/rank-00000-PID.jsonl    a line when a phase begins, and one with seconds and peak GB when it ends

Functions of the package are wrapped when their module is imported. Peaks are those of torch's allocator, reset for
each phase, so `memory/peak_gb` in the metrics of such a run is the peak of its last phase only. Host GB are the most so
far, without mapped files (RssAnon).
KILL=RANK:COUNT:PHASE kills that rank half a second after the phase has begun for that many times, if nothing was
restarted before.
"""

import functools
import importlib.abc
import importlib.machinery
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

PHASES = {  # what is wrapped in each module, and the name of its phase
    "sage_grpo.models.hunyuan15.text": {"load_encoders": "load encoders"},
    "sage_grpo.models.embeddings": {"Embeddings.prepare": "encode prompts"},
    "sage_grpo.train.inputs": {"build_rewards_of": "load reward"},
    "sage_grpo.train.build": {"prepare_transformer": "load transformer"},
    "sage_grpo.train.checkpoint": {"load": "load checkpoint"},
    "sage_grpo.train.saving": {"Saves.begin": "save"},
    "sage_grpo.train.metrics": {"Stopwatch.phase": ""},  # a context that is given its name
    "sage_grpo.models.hunyuan15.backbone": {"Hunyuan15.decode": "decode clips"},
    "sage_grpo.models.backbone": {"Backbone.load_weights": "load weights"},
    "sage_grpo.models.sample": {"denoise": "sample"},
}
DELAY = 0.5  # seconds between the beginning of the phase and the kill
SAMPLING = 0.2  # seconds between two looks at the host memory


class Recorder:
    """Writes the records of this process. Phases may contain others; only the main thread's are seen."""

    def __init__(self, folder: Path) -> None:
        self.rank = int(os.environ.get("RANK", 0))
        self.path = folder / f"rank-{self.rank:05d}-{os.getpid()}.jsonl"
        self.started = time.time()
        self.peaks: list[float] = []  # of the open phases
        self.counts: dict[str, int] = {}
        self.host_gb = 0.0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record what happens inside as a phase."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._take_peak()
        self.peaks.append(0.0)
        begin = time.time()
        self.write("begin", name)
        self._count(name)
        try:
            yield
        finally:
            self._take_peak()
            peak = self.peaks.pop()
            if self.peaks:
                self.peaks[-1] = max(self.peaks[-1], peak)
            self._look_at_host()
            seconds = time.time() - begin
            self.write("end", name, seconds=seconds, peak_gb=peak, host_gb=self.host_gb)

    def write(self, event: str, name: str, **values: float) -> None:
        """Write a line; before the first one, that the process has started."""
        attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
        record = {
            "event": event,
            "phase": name,
            "time": time.time(),
            "rank": self.rank,
            "attempt": attempt,
        }
        lines = [record | values]
        # Many processes inherit the environment; only those with phases leave a file.
        if not self.path.exists():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            lines.insert(0, record | {"event": "start", "phase": "", "time": self.started})
            threading.Thread(target=self._watch_host, daemon=True).start()
        with self.path.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)

    def _watch_host(self) -> None:
        while True:
            self._look_at_host()
            time.sleep(SAMPLING)

    def _look_at_host(self) -> None:
        status = Path("/proc/self/status")
        if not status.is_file():
            return
        for line in status.read_text().splitlines():
            if line.startswith("RssAnon:"):
                kibibytes = int(line.split()[1])
                self.host_gb = max(self.host_gb, kibibytes * 1024 / 1e9)

    def _take_peak(self) -> None:
        """Add the memory since the last call to the innermost open phase."""
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            return
        torch.cuda.synchronize()
        if self.peaks:
            self.peaks[-1] = max(self.peaks[-1], torch.cuda.max_memory_allocated() / 1e9)
        torch.cuda.reset_peak_memory_stats()

    def _count(self, name: str) -> None:
        """Count the phase, and kill this process soon if KILL asks for it."""
        self.counts[name] = self.counts.get(name, 0) + 1
        first_attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        due = os.environ.get("KILL") == f"{self.rank}:{self.counts[name]}:{name}"
        if first_attempt and due:
            timer = threading.Timer(DELAY, self._kill)
            timer.daemon = True
            timer.start()

    def _kill(self) -> None:
        self.write("kill", "")
        os.kill(os.getpid(), signal.SIGKILL)

    def wrapped(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        """A function that is recorded as a phase; without a name, a context that is given its name."""
        if name:

            @functools.wraps(call)
            def timed(*args: Any, **kwargs: Any) -> Any:
                with self.phase(name):
                    return call(*args, **kwargs)

            return timed

        @contextmanager
        def context(watch: Any, inner: str) -> Iterator[None]:
            with self.phase(inner), call(watch, inner):
                yield

        return context

    def wrap(self, module: ModuleType) -> None:
        """Wrap the functions of a module that PHASES names."""
        for path, name in PHASES[module.__name__].items():
            *owners, last = path.split(".")
            owner: Any = module
            for part in owners:
                owner = getattr(owner, part, None)
            if getattr(owner, last, None) is None:
                print(f"phase_records.py: {module.__name__} has no {path}", file=sys.stderr)
                continue
            setattr(owner, last, self.wrapped(getattr(owner, last), name))


class Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of PHASES as Python does, and has them wrapped once they are loaded."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in PHASES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_and_wrap(module: ModuleType) -> None:
            load(module)
            self.recorder.wrap(module)

        spec.loader.exec_module = load_and_wrap  # type: ignore[method-assign]
        return spec


def start(folder: str) -> None:
    """Record the phases of this process."""
    sys.meta_path.insert(0, Finder(Recorder(Path(folder))))
