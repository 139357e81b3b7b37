"""Writes metrics to RUN/metrics.jsonl, TensorBoard and wandb.

Neither a full disk nor a tracker stops a run: one that fails is left out from then on.
"""

import json
import os
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from sage_grpo.config.fields import ConfigError
from sage_grpo.files.foreign import read_bytes
from sage_grpo.files.json_files import finite, printable

MAX_ID = 100  # bytes of wandb_id


class Tracker:
    """Writes records to RUN/metrics.jsonl and to the trackers of `report_to`; only the first rank has one."""

    def __init__(
        self, folder: Path, report_to: Sequence[str], config: Mapping[str, Any], step: int
    ) -> None:
        """step: the iteration after which the run starts or resumes."""
        self.file = folder / "metrics.jsonl"
        if self.file.is_file():  # a killed run may have left a partial line
            os.truncate(self.file, self.file.read_bytes().rfind(b"\n") + 1)
        self.buffer: list[str] = []  # lines not yet written because the disk was full

        self.board_folder = folder / "tensorboard" if "tensorboard" in report_to else None
        self.board: Any = None
        self._to_board(lambda board: None, purge_step=step + 1)

        self.wandb: Any = None
        if "wandb" in report_to:
            self.wandb = _open_wandb(folder, config, is_resumed=step > 0)

    def write(self, kind: str, step: int, record: Mapping[str, Any]) -> None:
        """Write one line, with non-finite numbers as null; scalars also go to the trackers."""
        line = finite({"kind": kind, "step": step, **record})
        self.buffer.append(json.dumps(line, allow_nan=False) + "\n")
        self._append()
        if kind in ("run", "limits"):
            return

        prefix = "" if kind in ("train", "reward") else f"{kind}/"
        scalars = {
            prefix + key: value
            for key, value in line.items()
            if key != "step" and isinstance(value, (int, float))
        }

        def add_scalars(board: Any) -> None:
            for name, value in scalars.items():
                board.add_scalar(name, value, step)

        self._to_board(add_scalars)
        self._to_wandb(lambda run: run.log(scalars, step=step))

    def show(self, name: str, image: np.ndarray, step: int) -> None:
        """Send an image (H, W, 3) uint8 to the trackers."""
        self._to_board(lambda board: board.add_image(name, image, step, dataformats="HWC"))

        def add_image(run: Any) -> None:
            import wandb

            run.log({name: wandb.Image(image)}, step=step)

        self._to_wandb(add_image)

    def close(self) -> None:
        if self.board:
            self._to_board(lambda board: board.close())
        self._to_wandb(lambda run: run.finish())

    def _append(self) -> None:
        """Write the buffered lines; on a full disk they stay in the buffer, and the file stays as it was."""
        size = self.file.stat().st_size if self.file.exists() else 0
        try:
            with self.file.open("a") as file:
                file.write("".join(self.buffer))
        except OSError as error:
            if self.file.exists():
                os.truncate(self.file, size)
            _note(f"{self.file} could not be written ({error}); buffering metrics in memory")
            return
        self.buffer = []

    def _to_board(self, send: Callable[[Any], Any], **options: int) -> None:
        """Write to TensorBoard unless lines are buffered; `options` are those of a new writer."""
        if self.board_folder is None or self.buffer:
            return
        for _ in range(2):  # a writer never recovers from an error, so a new one gets a second try
            try:
                if self.board is None:
                    # slow to import, and optional
                    from torch.utils.tensorboard import SummaryWriter

                    self.board = SummaryWriter(str(self.board_folder), **options)
                send(self.board)
                return
            except OSError as error:
                self.board = None
                _note(f"{self.board_folder} could not be written ({error})")
            except Exception as error:
                self.board = self.board_folder = None
                _note(f"TensorBoard failed, and the run goes on without it ({_reason(error)})")
                return

    def _to_wandb(self, send: Callable[[Any], Any]) -> None:
        """Send to wandb until something fails there."""
        if self.wandb is None:
            return
        try:
            send(self.wandb)
        except Exception as error:
            self.wandb = None
            _note(f"wandb failed, and the run goes on without it ({_reason(error)})")


def check_login(report_to: Sequence[str]) -> None:
    """Refuse wandb without its key, before a run loads anything; this needs no network."""
    if "wandb" not in report_to:
        return
    try:
        import wandb

        wandb.login()
    except Exception as error:
        raise ConfigError(_cannot_start(error)) from error


def _open_wandb(folder: Path, config: Mapping[str, Any], is_resumed: bool) -> Any:
    """A run at wandb; after a resume it is the same one, or None if wandb cannot be reached then."""
    id_file = folder / "wandb_id"
    with suppress(FileExistsError), id_file.open("x") as file:  # does not write through a link
        file.write(secrets.token_hex(8))
    run_id = read_bytes(id_file, MAX_ID).decode()
    try:
        import wandb

        return wandb.init(
            project="sage-grpo", dir=str(folder), config=dict(config), id=run_id, resume="allow"
        )
    except Exception as error:
        if not is_resumed:
            raise ConfigError(_cannot_start(error)) from error
        _note(f"wandb failed, and the run goes on without it ({_reason(error)})")
        return None


def _cannot_start(error: Exception) -> str:
    return (
        f"report_to names wandb, which cannot be used ({_reason(error)}): "
        "run `wandb login`, or set --report_to tensorboard"
    )


def _reason(error: Exception) -> str:
    return printable(error) or type(error).__name__


def _note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr, flush=True)
