r"""Rewards on another machine: the client of `python scripts/reward_server.py`.

Clips are sent as one line of JSON, then their raw bytes. Messages cannot name code.

    {"fps": 8, "prompts": ["a red circle"], "shapes": [[9, 32, 32]]}\n<9 * 32 * 32 * 3 bytes>
"""

import json
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sage_grpo.files.json_files import printable
from sage_grpo.rewards.base import Setup
from sage_grpo.rewards.client import RemoteError, ServerClient
from sage_grpo.rewards.video_frames import check_clips

MAX_HEADER = 1 << 20  # bytes of a message's first line


def pack(clips: Sequence[Tensor], prompts: Sequence[str], fps: float) -> list[bytes | memoryview]:
    """The parts of a message about uint8 clips (F, H, W, 3), one prompt each."""
    check_clips(clips, prompts, fps)
    header = {
        "fps": fps,
        "prompts": list(prompts),
        "shapes": [list(clip.shape[:3]) for clip in clips],
    }
    line = json.dumps(header, allow_nan=False).encode() + b"\n"
    if len(line) > MAX_HEADER:
        raise RemoteError(f"the prompts take {len(line)} bytes; a request holds {MAX_HEADER}")
    pixels = [memoryview(clip.cpu().contiguous().numpy()).cast("B") for clip in clips]
    return [line, *pixels]


class RemoteReward(ServerClient):
    """The rewards of a reward server."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        info = self._ask_in_time("GET", "/info")
        if not isinstance(info.get("names"), list) or not _is_number(info.get("max_bytes")):
            raise RemoteError(
                f"{self.url} is not a reward server: its /info lists no names and limits"
            )
        if not info["names"] or not all(isinstance(name, str) for name in info["names"]):
            raise RemoteError(
                f"{self.url} names its scores {printable(info['names'])}; it must have at least one"
            )
        if not _is_number(info.get("max_clips", 1)):
            raise RemoteError(
                f"{self.url} accepts {printable(info['max_clips'])} clips; a number is expected"
            )
        self.names: tuple[str, ...] = tuple(info["names"])
        self.max_clips = info.get("max_clips", math.inf)  # of a request
        self.max_bytes = info["max_bytes"]
        # a server that does not say what its scores depend on is known by its address alone
        self.served = printable(info.get("fingerprint") or self.url)

    def fingerprint(self) -> dict[str, str]:
        return {"server": self.served}

    def check(self, prompts: Sequence[str]) -> None:
        """Reject prompts that the server's rewards reject."""
        body = json.dumps({"prompts": list(prompts)}).encode()
        self._ask_in_time("POST", "/check", [body])

    def score(
        self, clips: Sequence[Tensor], prompts: Sequence[str], fps: float
    ) -> dict[str, Tensor]:
        """Scores (B,) fp64; NaN for clips that the server could not score, an error if it scored none."""
        parts = pack(clips, prompts, fps)
        size = sum(map(len, parts))
        if len(clips) > self.max_clips or size > self.max_bytes:
            raise RemoteError(
                f"{len(clips)} clips of {size} bytes are more than {self.url} accepts at once "
                f"({self.max_clips} clips, {self.max_bytes} bytes): "
                "lower reward_batch_size or raise the server's limits"
            )
        answer = self._ask("POST", "/score", parts)
        columns = answer.get("scores")
        errors = answer.get("errors")
        if not isinstance(columns, dict) or not isinstance(errors, list):
            raise RemoteError(f"the answer of {self.url} holds no scores and errors")

        scores = {name: self._column(name, columns.get(name), len(clips)) for name in self.names}
        if errors and all(values.isnan().all() for values in scores.values()):
            raise RemoteError(f"{self.url}: {printable(errors[0])}")
        return scores

    def _column(self, name: str, values: Any, count: int) -> Tensor:
        """The values of one score, (count,) fp64, null as NaN."""
        received = len(values) if isinstance(values, list) else "no"
        if received != count:
            raise RemoteError(
                f"{self.url} returned {received} values for {name}; expected {count}, one per clip"
            )
        if not all(value is None or _is_number(value) for value in values):
            raise RemoteError(f"{self.url} returned a value for {name} that is not a number")
        numbers = [math.nan if value is None else value for value in values]
        return torch.tensor(numbers, dtype=torch.float64)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)
