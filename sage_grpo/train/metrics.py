"""What an update measures, by denoising step, and where numbers go: metrics.jsonl, TensorBoard, wandb."""

import json
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sage_grpo.algo.grpo import PolicyStats, policy_stats
from sage_grpo.json_files import finite
from sage_grpo.parallel.ranks import Ranks

SUMS = ("pairs", "loss", "objective", "kl_anchor", "kl_rollout", "grad_v")


@dataclass
class UpdateStats:
    """Sums over (rollout, step) pairs for each denoising step. Micro-batches, updates and ranks add up."""

    policy: PolicyStats
    sums: Tensor  # (len(SUMS), T) fp64

    @classmethod
    def empty(cls, num_steps: int, device: torch.device) -> "UpdateStats":
        none = torch.zeros(0, device=device)
        steps = torch.zeros(0, dtype=torch.long, device=device)
        sums = torch.zeros(len(SUMS), num_steps, dtype=torch.float64, device=device)
        return cls(policy_stats(none, none, steps, num_steps, 1.0), sums)

    def add(self, steps: Tensor, columns: Mapping[str, Tensor]) -> None:
        """Sort the pairs (P,) of `columns` into their denoising `steps` (P,)."""
        rows = torch.stack(
            [torch.ones_like(steps, dtype=torch.float64), *(columns[name].double() for name in SUMS[1:])]
        )
        self.sums.index_add_(1, steps, rows)

    def __add__(self, other: "UpdateStats") -> "UpdateStats":
        return UpdateStats(self.policy + other.policy, self.sums + other.sums)

    def over(self, ranks: Ranks) -> "UpdateStats":
        """The same for all ranks together."""
        policy = PolicyStats(ranks.sum(self.policy.sums), ranks.max(self.policy.max_deviation))
        return UpdateStats(policy, ranks.sum(self.sums))

    def mean(self, name: str) -> float:
        """Of one of SUMS over all pairs; NaN when there was none."""
        totals = self.sums.sum(1)
        return (totals[SUMS.index(name)] / totals[0]).item()

    def record(self) -> dict[str, Any]:
        """Metrics by the names of docs/metrics.md."""
        overall = {f"policy/{name}": value for name, value in self.policy.overall().items()}
        overall |= {"policy/loss": self.mean("loss"), "policy/objective": self.mean("objective")}
        overall |= {"kl/anchor": self.mean("kl_anchor"), "kl/rollout": self.mean("kl_rollout")}
        means = (self.sums / self.sums[0]).tolist()
        steps = self.policy.per_step() | {
            name: means[SUMS.index(name)] for name in ("kl_anchor", "kl_rollout", "grad_v")
        }
        return overall | {"per_step": steps | {"count": self.sums[0].tolist()}}


class Stopwatch:
    """Seconds of each phase of an iteration; `on_phase` hears of each before it begins."""

    def __init__(self, device: torch.device, on_phase: Callable[[str], None] = lambda name: None) -> None:
        self.device, self.on_phase, self.seconds = device, on_phase, {}
        self.started = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.on_phase(name)
        begun = self._now()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + self._now() - begun

    def record(self) -> dict[str, float]:
        return {f"time/{name}": s for name, s in self.seconds.items()} | {"time/total": self._now() - self.started}

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


class Tracker:
    """Writes records to RUN/metrics.jsonl and to the trackers of `report_to`; only the first rank has one."""

    def __init__(self, folder: Path, report_to: Sequence[str], config: Mapping[str, Any], step: int) -> None:
        """step: the iteration after which the run goes on."""
        self.file = folder / "metrics.jsonl"
        if self.file.is_file():  # a killed run may have left half a line
            os.truncate(self.file, self.file.read_bytes().rfind(b"\n") + 1)
        self.waiting: list[str] = []  # lines that did not fit on the disk
        self.board_folder = folder / "tensorboard" if "tensorboard" in report_to else None
        self.board = self.wandb = None
        self._to_board(lambda board: None, purge_step=step + 1)
        if "wandb" in report_to:
            import wandb

            words = {"id": lasting_id(folder / "wandb_id"), "resume": "allow"}
            self.wandb = wandb.init(project="sage-grpo", dir=str(folder), config=dict(config), **words)

    def write(self, kind: str, step: int, record: Mapping[str, Any]) -> None:
        """One line, numbers that are not finite as null; scalars go to the trackers too."""
        line = finite({"kind": kind, "step": step, **record})
        self.waiting.append(json.dumps(line, allow_nan=False) + "\n")
        self._append()
        prefix = "" if kind == "train" else f"{kind}/"
        scalars = {prefix + k: v for k, v in line.items() if "/" in k and isinstance(v, (int, float))}
        if kind != "run":
            self._to_board(lambda board: [board.add_scalar(name, value, step) for name, value in scalars.items()])
        if kind != "run" and self.wandb:
            self.wandb.log(scalars, step=step)

    def _append(self) -> None:
        """Write the lines that wait; on a full disk they go on waiting, and the file stays as it was."""
        size = self.file.stat().st_size if self.file.exists() else 0
        try:
            with self.file.open("a") as file:
                file.write("".join(self.waiting))
        except OSError as error:
            if self.file.exists():
                os.truncate(self.file, size)
            print(f"note: {self.file} could not be written ({error}); its lines wait", file=sys.stderr, flush=True)
            return
        self.waiting = []

    def _to_board(self, send: Callable[[Any], Any], **opening: int) -> None:
        """Tell TensorBoard, once lines fit on the disk. Its writer never recovers from an error: a new one is made."""
        if self.board_folder is None or self.waiting:
            return
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and not everybody's

        for _ in range(2):
            try:
                self.board = self.board or SummaryWriter(str(self.board_folder), **opening)
                send(self.board)
                return
            except OSError as error:
                self.board = None
                print(f"note: {self.board_folder} could not be written ({error})", file=sys.stderr, flush=True)

    def show(self, name: str, sheet: Tensor, step: int) -> None:
        """An image (H, W, 3) uint8 for the trackers."""
        self._to_board(lambda board: board.add_image(name, sheet.numpy(), step, dataformats="HWC"))
        if self.wandb:
            import wandb

            self.wandb.log({name: wandb.Image(sheet.numpy())}, step=step)

    def close(self) -> None:
        if self.board:
            self._to_board(lambda board: board.close())
        if self.wandb:
            self.wandb.finish()


def lasting_id(file: Path) -> str:
    """A name for this run that a resumed one finds again."""
    if not file.is_file():
        file.write_text(secrets.token_hex(8))
    return file.read_text()


def has_line(file: Path, kind: str, step: int) -> bool:
    """Whether `Tracker` wrote such a line."""
    start = f'{{"kind": "{kind}", "step": {step}'
    return file.is_file() and any(
        line.startswith((f"{start},", f"{start}}}")) for line in file.read_text().splitlines()
    )
