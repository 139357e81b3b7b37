"""Metric sinks of a run: metrics.jsonl, TensorBoard, wandb."""

import json
import os
import re
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sage_grpo.json_files import finite


class Tracker:
    """Writes records to RUN/metrics.jsonl and to the trackers of `report_to`; only the first rank has one."""

    def __init__(self, folder: Path, report_to: Sequence[str], config: Mapping[str, Any], step: int) -> None:
        """step: the iteration after which the run starts or resumes."""
        self.file = folder / "metrics.jsonl"
        if self.file.is_file():  # a killed run may have left a partial line
            os.truncate(self.file, self.file.read_bytes().rfind(b"\n") + 1)
        self.buffer: list[str] = []  # lines not yet written because the disk was full
        self.board_folder = folder / "tensorboard" if "tensorboard" in report_to else None
        self.board = self.wandb = None
        self._to_board(lambda board: None, purge_step=step + 1)
        if "wandb" in report_to:
            import wandb

            file = folder / "wandb_id"  # the same run after a resume
            if not file.is_file():
                file.write_text(secrets.token_hex(8))
            about = {"project": "sage-grpo", "dir": str(folder), "config": dict(config)}
            self.wandb = wandb.init(**about, id=file.read_text(), resume="allow")

    def write(self, kind: str, step: int, record: Mapping[str, Any]) -> None:
        """Write one line, with non-finite numbers as null; scalars also go to the trackers."""
        line = finite({"kind": kind, "step": step, **record})
        self.buffer.append(json.dumps(line, allow_nan=False) + "\n")
        self._append()
        prefix = "" if kind == "train" else f"{kind}/"
        scalars = {prefix + k: v for k, v in line.items() if "/" in k and isinstance(v, (int, float))}
        if kind != "run":
            self._to_board(lambda board: [board.add_scalar(name, value, step) for name, value in scalars.items()])
        if kind != "run" and self.wandb:
            self.wandb.log(scalars, step=step)

    def _append(self) -> None:
        """Write the buffered lines; on a full disk they stay in the buffer, and the file stays as it was."""
        size = self.file.stat().st_size if self.file.exists() else 0
        try:
            with self.file.open("a") as file:
                file.write("".join(self.buffer))
        except OSError as error:
            if self.file.exists():
                os.truncate(self.file, size)
            text = f"note: {self.file} could not be written ({error}); buffering metrics in memory"
            print(text, file=sys.stderr, flush=True)
            return
        self.buffer = []

    def _to_board(self, send: Callable[[Any], Any], **opening: int) -> None:
        """Write to TensorBoard unless lines are buffered. Its writer never recovers from an error, so reopen it."""
        if self.board_folder is None or self.buffer:
            return
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and optional

        for _ in range(2):
            try:
                self.board = self.board or SummaryWriter(str(self.board_folder), **opening)
                send(self.board)
                return
            except OSError as error:
                self.board = None
                print(f"note: {self.board_folder} could not be written ({error})", file=sys.stderr, flush=True)

    def show(self, name: str, sheet: np.ndarray, step: int) -> None:
        """Send an image (H, W, 3) uint8 to the trackers."""
        self._to_board(lambda board: board.add_image(name, sheet, step, dataformats="HWC"))
        if self.wandb:
            import wandb

            self.wandb.log({name: wandb.Image(sheet)}, step=step)

    def close(self) -> None:
        if self.board:
            self._to_board(lambda board: board.close())
        if self.wandb:
            self.wandb.finish()


def has_line(file: Path, kind: str, step: int) -> bool:
    """Whether `Tracker` wrote a line of this kind and step."""
    start = re.compile(rf'^{{"kind": "{kind}", "step": {step}[,}}]', re.MULTILINE)
    return file.is_file() and start.search(file.read_text()) is not None
