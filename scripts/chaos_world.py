"""What `chaos.py` breaks: a run under torchrun on a miniature model, its disk, and the reward server that it asks.

All of it is reached from outside: processes by /proc, progress by the files of the run folder.
"""

import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from sage_grpo.models.policy import Sampling
from sage_grpo.rewards.composite import Composite
from sage_grpo.rewards.shapes import ShapesReward
from sage_grpo.rewards.wire import TOKEN_VARIABLE
from sage_grpo.tools.reward_server import Limits, build_server, in_background
from sage_grpo.train.checkpoint import found
from sage_grpo.worlds.tiny import TinyConfig, build_tiny

ROOT = Path(__file__).resolve().parents[1]
PATIENCE = 180.0  # seconds after which a run is stuck; torchrun alone waits 30 for a rank that does not end
MARK = "SAGE_CHAOS_RUN"  # tells the processes of a run from all others
DISK = "640m"  # of the tmpfs: four checkpoints, and some room
PROMPTS = ("a red circle moving left", "a green square moving right", "a red square moving right")
ENVIRONMENT = {  # without the first, most restarts of ranks fail
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE",
}  # fmt: skip

T = TypeVar("T")


class Stuck(RuntimeError):
    """What never happened."""


class Training:
    """A run folder, and the torchrun that works on it."""

    def __init__(self, folder: Path, flags: Sequence[str], ranks: int) -> None:
        self.folder, self.ranks, self.mark, self.said = folder, ranks, secrets.token_hex(8), ""
        launcher = ["torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks), "--max_restarts", "3"]
        self.command = [sys.executable, "-m", *launcher, "post_train.py", *flags, "--output_dir", str(folder)]

    def launch(self) -> None:
        self.launcher = subprocess.Popen(
            self.command,
            cwd=ROOT,
            env=os.environ | ENVIRONMENT | {MARK: self.mark},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        threading.Thread(target=self._listen, args=(self.launcher.stdout,), daemon=True).start()

    def _listen(self, pipe: Any) -> None:
        """A pipe, for a limit on the size of files would hold for a log too."""
        with self.folder.with_suffix(".log").open("a") as log, pipe:
            for line in pipe:
                self.said += line
                log.write(line)
                log.flush()

    @property
    def ended(self) -> bool:
        return self.launcher.poll() is not None

    def pids(self) -> dict[int, int]:
        """The living processes by rank."""
        living = {}
        for process in Path("/proc").glob("[0-9]*"):
            try:
                values = (process / "environ").read_bytes().split(b"\0")
                ours = b"post_train.py" in (process / "cmdline").read_bytes()
            except OSError:  # it has ended, or is another user's
                continue
            if ours and f"{MARK}={self.mark}".encode() in values:
                living |= {int(value[5:]): int(process.name) for value in values if value.startswith(b"RANK=")}
        return living

    def send(self, number: signal.Signals, *pids: int) -> None:
        for pid in set(pids) & {self.launcher.pid, *self.pids().values()}:
            os.kill(pid, number)

    def kill_all(self) -> None:
        """The launcher first, which would start ranks anew."""
        self.launcher.kill()
        self.launcher.wait()
        while alive := self.pids():
            self.send(signal.SIGKILL, *alive.values())
            time.sleep(0.02)

    def wait(self, what: str, condition: Callable[[], T], tended: bool = False, pause: float = 0.03) -> T:
        """What the condition gives once it holds. tended: a launcher that has ended is started again."""
        end = time.monotonic() + PATIENCE
        while not (value := condition()):
            if time.monotonic() > end:
                raise Stuck(f"{self.folder.name}: {what} did not come within {PATIENCE:g} s")
            if tended and self.ended:
                self.launch()
            time.sleep(pause)
        return value

    def lines(self) -> list[tuple[str, int]]:
        """Kind and iteration of each line of the metrics."""
        file = self.folder / "metrics.jsonl"
        text = file.read_text() if file.is_file() else ""
        return [(kind, int(step)) for kind, step in re.findall(r'^\{"kind": "(\w+)", "step": (\d+)', text, re.M)]

    @property
    def step(self) -> int:
        """The last iteration that is done."""
        return self.lines()[-1][1] if self.lines() else 0

    def trains_after(self, step: int) -> bool:
        """Whether that iteration is done, and one since the last start."""
        return self.step >= step and self.lines()[-1][0] != "run"

    @property
    def starts(self) -> list[int]:
        """After which iteration each start went on."""
        return [step for kind, step in self.lines() if kind == "run"]

    def status(self) -> dict[str, Any]:
        file = self.folder / "status.json"
        return json.loads(file.read_text()) if file.is_file() else {"state": "no status", "message": ""}

    def checkpoints(self) -> list[Path]:
        return found(self.folder / "checkpoints")

    def draft_files(self) -> int:
        """Of a save that goes on: 1 and the number of its files so far. 0 where none does."""
        try:
            drafts = list((self.folder / "checkpoints").glob("step-??????.tmp"))
            return sum(1 + sum(path.is_file() for path in draft.rglob("*")) for draft in drafts)
        except OSError:  # it has just got its name
            return 0


def write_model(folder: Path) -> list[str]:
    """A miniature model and its prompts; the flags that name them."""
    words = sorted({word for prompt in PROMPTS for word in prompt.split()})
    sizes = TinyConfig(heads=2, rope=(4, 6, 6), layers=2, refiner_layers=1, text_dim=32, latent_channels=4)
    build_tiny(0, words, sizes).save_pretrained(folder)
    sampling = Sampling(frames=5, height=32, width=32, fps=8, shift=5.0, guidance=1.0, num_steps=2)
    sampling.to_json(folder / "sampling.json")
    for name in ("prompts_train.txt", "prompts_valid.txt"):
        (folder / name).write_text("\n".join(PROMPTS) + "\n")
    return ["--pretrained_model_root", str(folder)]


class MoodyReward(ShapesReward):
    """Raises or hangs while it is told to."""

    def __init__(self) -> None:
        self.mood, self.released = "good", threading.Event()

    def score(self, *batch: Any) -> Any:
        if self.mood == "raises":
            raise OSError("the reward was told to fail")
        if self.mood == "hangs":
            self.released.wait(PATIENCE)
        return super().score(*batch)

    def turn(self, mood: str) -> None:
        self.mood = mood
        if mood == "good":
            self.released.set()
        else:
            self.released.clear()


@contextmanager
def serving(reward: ShapesReward) -> Iterator[str]:
    """The address of a server of the reward; the token is in the environment. Company changes no bit of a score."""
    os.environ[TOKEN_VARIABLE] = secrets.token_hex(32)
    served = Composite({"shapes": reward}, dict.fromkeys(reward.names, 1.0), batch_size=1, timeout=PATIENCE)
    server = build_server(served, Limits(seconds=PATIENCE), os.environ[TOKEN_VARIABLE], "127.0.0.1", 0)
    with in_background(server) as address:
        yield address


@contextmanager
def own_disk(folder: Path, wanted: bool) -> Iterator[bool]:
    """The folder, on a small tmpfs where that is wanted and allowed, which is told; its files are kept afterwards."""
    folder.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(folder)]
    mounted = wanted and shutil.which("mount") and not subprocess.run(command, capture_output=True).returncode
    try:
        yield bool(mounted)
    finally:
        if mounted:
            kept = folder.with_suffix(".kept")
            shutil.copytree(folder, kept)
            subprocess.run(["umount", str(folder)], check=True)
            folder.rmdir()
            kept.rename(folder)
