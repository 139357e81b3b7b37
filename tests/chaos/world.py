"""What `chaos.py` breaks: a run under torchrun on a miniature model, its disk, and its reward server.

Everything is observed from outside: processes through /proc, progress through the files of the run folder.
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
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import torch

from research.tiny.tiny import TinyConfig, build_tiny
from sage_grpo.environment import TOKEN_VARIABLE
from sage_grpo.models.backbone import Sampling
from sage_grpo.rewards.base import Composite
from sage_grpo.train.checkpoint_folders import list_checkpoints
from sage_grpo.worlds.shapes.reward import ShapesReward
from scripts.reward_server import Limits
from tests.rewards import serving as servers

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 180.0  # seconds after which a run counts as stuck; torchrun alone waits 30 for a rank that does not exit
MARK = "SAGE_CHAOS_RUN"  # identifies the processes of a run
DISK = "640m"  # size of the tmpfs: four checkpoints and some headroom
PROMPTS = ("a red circle moving left", "a green square moving right", "a red square moving right")
ENVIRONMENT = {  # without the first, most restarts of ranks fail
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE",
    "PYTHONPATH": f"{Path(__file__).parent / 'faulty_machine'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
}  # fmt: skip

T = TypeVar("T")


class Stuck(RuntimeError):
    """What the run never did."""


class Training:
    """A run folder, and the torchrun processes working on it; only the last one should."""

    def __init__(self, folder: Path, flags: Sequence[str], ranks: int) -> None:
        self.folder, self.ranks = folder, ranks
        # while these files exist, the machine is faulty: see faulty_machine/sitecustomize.py
        self.slow = folder.with_suffix(".slow")
        self.clock = folder.with_suffix(".clock")
        self.denied = folder.with_suffix(".denied")
        self.canary = folder.with_suffix(".canary")  # a folder of the user that links may lead to
        self.launchers: dict[str, subprocess.Popen] = {}  # by mark
        self.output: list[str] = []
        launcher = [
            "torch.distributed.run",
            "--standalone",
            "--nproc_per_node",
            str(ranks),
            "--max_restarts",
            "3",
        ]
        self.command = [
            sys.executable,
            "-m",
            *launcher,
            "post_train.py",
            *flags,
            "--output_dir",
            str(folder),
        ]

    def launch(self) -> None:
        self.mark = secrets.token_hex(8)
        self.launchers[self.mark] = subprocess.Popen(
            self.command,
            cwd=ROOT,
            env=os.environ | ENVIRONMENT | {MARK: self.mark, "SAGE_CHAOS": str(self.folder)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        threading.Thread(target=self._listen, args=(self.launcher.stdout,), daemon=True).start()

    def _listen(self, pipe: Any) -> None:
        """Read the output from a pipe, because a file size limit would also apply to a log file."""
        with self.folder.with_suffix(".log").open("a") as log, pipe:
            for line in pipe:
                self.output.append(line)
                log.write(line)
                log.flush()

    @property
    def said(self) -> str:
        return "".join(self.output)

    @property
    def launcher(self) -> subprocess.Popen:
        return self.launchers[self.mark]

    @property
    def ended(self) -> bool:
        return self.launcher.poll() is not None

    def pids(self) -> dict[int, int]:
        """The live processes of the last launcher by rank."""
        return {rank: pid for _, rank, pid in self.living(self.mark)}

    def living(self, *marks: str) -> set[tuple[str, int, int]]:
        """Mark, rank and process of each live rank of these launchers."""
        living = set()
        for process in Path("/proc").glob("[0-9]*"):
            try:
                values = (process / "environ").read_bytes().split(b"\0")
                ours = b"post_train.py" in (process / "cmdline").read_bytes()
            except OSError:  # it has exited, or belongs to another user
                continue
            for mark in marks if ours else ():
                if f"{MARK}={mark}".encode() in values:
                    living |= {
                        (mark, int(value[5:]), int(process.name))
                        for value in values
                        if value[:5] == b"RANK="
                    }
        return living

    def send(self, number: signal.Signals, *pids: int) -> None:
        ranks = {pid for *_, pid in self.living(*self.launchers)}
        for pid in set(pids) & {self.launcher.pid, *ranks}:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill_all(self, *marks: str) -> None:
        """Kill launchers, by default all, and their ranks; launchers first, because they would restart ranks."""
        for mark in marks or self.launchers:
            self.launchers[mark].kill()
            self.launchers[mark].wait()
        while alive := self.living(*marks or self.launchers):
            self.send(signal.SIGKILL, *(pid for *_, pid in alive))
            time.sleep(0.02)

    def keep_one(self) -> None:
        """Keep the launcher whose ranks hold the run folder, and kill the others."""
        owner = int((self.folder / "lock").read_text().split()[1])  # "process 123 on ..."
        (self.mark,) = (mark for mark, _, pid in self.living(*self.launchers) if pid == owner)
        if others := self.launchers.keys() - {self.mark}:
            self.kill_all(*others)

    def wait(
        self, what: str, condition: Callable[[], T], tended: bool = False, pause: float = 0.03
    ) -> T:
        """Wait for the condition and return its value. tended: restart the launcher if it has exited."""
        end = time.monotonic() + PATIENCE
        while not (value := condition()):
            if time.monotonic() > end:
                raise Stuck(f"{self.folder.name}: {what} did not come within {PATIENCE:g} s")
            if tended and self.ended:
                self.launch()
            time.sleep(pause)
        return value

    def lines(self) -> list[tuple[str, int]]:
        """Kind and iteration of each metrics line."""
        file = self.folder / "metrics.jsonl"
        text = file.read_text() if file.is_file() else ""
        return [
            (kind, int(step))
            for kind, step in re.findall(r'^\{"kind": "(\w+)", "step": (\d+)', text, re.M)
        ]

    @property
    def step(self) -> int:
        """The last completed iteration."""
        return self.lines()[-1][1] if self.lines() else 0

    def trains_after(self, step: int) -> bool:
        """Whether that iteration is done, and at least one since the last start."""
        return self.step >= step and self.lines()[-1][0] != "run"

    @property
    def starts(self) -> list[int]:
        """The iteration after which each start resumed."""
        return [step for kind, step in self.lines() if kind == "run"]

    def status(self) -> dict[str, Any]:
        file = self.folder / "status.json"
        return (
            json.loads(file.read_text())
            if file.is_file()
            else {"state": "no status", "message": ""}
        )

    def checkpoints(self) -> list[Path]:
        return list_checkpoints(self.folder / "checkpoints")

    def draft_files(self) -> int:
        """During a save: 1 plus the number of its files so far. 0 if there is no save."""
        try:
            drafts = list((self.folder / "checkpoints").glob("step-??????.tmp"))
            return sum(1 + sum(path.is_file() for path in draft.rglob("*")) for draft in drafts)
        except OSError:  # it was just renamed
            return 0


def write_model(folder: Path) -> list[str]:
    """Write a miniature model and its prompts; returns the flags that name them."""
    words = sorted({word for prompt in PROMPTS for word in prompt.split()})
    sizes = TinyConfig(
        heads=2, rope=(4, 6, 6), layers=2, refiner_layers=1, text_dim=32, latent_channels=4
    )
    build_tiny(0, words, sizes).save_pretrained(folder)
    sampling = Sampling(frames=5, height=32, width=32, fps=8, shift=5.0, guidance=1.0, num_steps=2)
    sampling.to_json(folder / "sampling.json")
    for name in ("prompts_train.txt", "prompts_valid.txt"):
        (folder / name).write_text("\n".join(PROMPTS) + "\n")
    return ["--pretrained_model_root", str(folder)]


class MoodyReward(ShapesReward):
    """A reward that raises, hangs or gives no numbers on demand."""

    def __init__(self) -> None:
        self.mood, self.released = "good", threading.Event()

    def score(self, *batch: Any) -> Any:
        if self.mood == "raises":
            raise OSError("the reward was told to fail")
        if self.mood == "hangs":
            self.released.wait(PATIENCE)
        scores = super().score(*batch)
        if self.mood == "nan":
            return {name: torch.full_like(values, torch.nan) for name, values in scores.items()}
        return scores

    def turn(self, mood: str) -> None:
        self.mood = mood
        if mood == "good":
            self.released.set()
        else:
            self.released.clear()


@contextmanager
def serving(reward: ShapesReward) -> Iterator[str]:
    """Serve the reward; yields its address. The token is in the environment. Scores are independent of the batch."""
    os.environ[TOKEN_VARIABLE] = secrets.token_hex(32)
    served = Composite(
        {"shapes": reward}, dict.fromkeys(reward.names, 1.0), batch_size=1, timeout=PATIENCE
    )
    with servers.serving(served, Limits(seconds=PATIENCE), os.environ[TOKEN_VARIABLE]) as address:
        yield address


@contextmanager
def own_disk(folder: Path, wanted: bool) -> Iterator[bool]:
    """Put the folder on a small tmpfs if wanted and permitted; yields whether it is. Its files are kept afterwards."""
    folder.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(folder)]
    mounted = (
        wanted
        and shutil.which("mount")
        and not subprocess.run(command, capture_output=True).returncode
    )
    try:
        yield bool(mounted)
    finally:
        if mounted:
            kept = folder.with_suffix(".kept")
            shutil.copytree(folder, kept)
            subprocess.run(["umount", str(folder)], check=True)
            folder.rmdir()
            kept.rename(folder)
