"""The format between a reward server and its clients: one line of JSON, then the raw bytes of the clips.

    {"fps": 8, "prompts": ["a red circle"], "shapes": [[9, 32, 32]]}\n<9 * 32 * 32 * 3 bytes>

Messages cannot name code, and every length is checked before use.
"""

import json
import math
import os
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sage_grpo.rewards import TOKEN_VARIABLE
from sage_grpo.rewards.video_frames import check_clips

MAX_HEADER = 1 << 20  # bytes
MAX_FPS = 1_000_000  # frames per second of a clip
KEYS = {"fps", "prompts", "shapes"}


class WireError(ValueError):
    """Why a message cannot be read, in one sentence."""


class TooMuch(WireError):
    """A message over a limit."""


def read_token() -> str:
    """Read the shared secret from the environment; errors never show it."""
    token = os.environ.get(TOKEN_VARIABLE, "")
    if not re.fullmatch(r"[\w.~+/=-]{16,}", token, re.ASCII):
        what = "does not look like a token" if token else "is not set"
        raise WireError(
            f"the environment variable {TOKEN_VARIABLE} {what}; server and clients need the same random one of at "
            "least 16 letters and digits, such as openssl rand -hex 32 prints"
        )
    return token


def pack(clips: Sequence[Tensor], prompts: Sequence[str], fps: float) -> list[bytes | memoryview]:
    """The parts of a message about uint8 clips (F, H, W, 3), one prompt each."""
    check_clips(clips, prompts, fps)
    header = {"fps": fps, "prompts": list(prompts), "shapes": [list(clip.shape[:3]) for clip in clips]}
    line = json.dumps(header, allow_nan=False).encode() + b"\n"
    if len(line) > MAX_HEADER:
        raise WireError(f"the prompts take {len(line)} bytes; a request holds {MAX_HEADER}")
    return [line, *(memoryview(clip.cpu().contiguous().numpy()).cast("B") for clip in clips)]


def unpack(body: bytearray, max_clips: int) -> tuple[list[Tensor], list[str], float]:
    """Clips (sharing the memory of `body`), prompts and fps; WireError if anything is invalid."""
    end = body.find(b"\n", 0, MAX_HEADER)
    if end < 0:
        raise WireError(f"the first {MAX_HEADER} bytes hold no line of JSON")
    header = read_json(body[:end])
    if not isinstance(header, dict) or set(header) != KEYS:
        raise WireError(f"the header must be an object with the keys {', '.join(sorted(KEYS))}")
    fps, prompts, shapes = header["fps"], header["prompts"], header["shapes"]
    if type(fps) not in (int, float) or not 0 < fps <= MAX_FPS:
        raise WireError(f"fps is {fps!r}; it must be a positive number of at most {MAX_FPS}")
    if not (isinstance(prompts, list) and isinstance(shapes, list)) or not 0 < len(prompts) == len(shapes):
        raise WireError("prompts and shapes must be lists with one entry for each clip, at least one")
    if len(shapes) > max_clips:
        raise TooMuch(f"{len(shapes)} clips in one request; at most {max_clips} are allowed")
    good = (isinstance(s, list) and len(s) == 3 and all(type(n) is int and n > 0 for n in s) for s in shapes)
    if not all(isinstance(prompt, str) for prompt in prompts) or not all(good):
        raise WireError("a prompt must be text, and a shape three whole numbers: frames, height, width")
    sizes = [math.prod(shape) * 3 for shape in shapes]
    if sum(sizes) != len(body) - end - 1:
        raise WireError(f"the shapes need {sum(sizes)} bytes, but {len(body) - end - 1} came")
    pixels = torch.frombuffer(body, dtype=torch.uint8, offset=end + 1)
    return [p.view(*shape, 3) for p, shape in zip(pixels.split(sizes), shapes, strict=True)], prompts, float(fps)


def read_json(text: bytes | bytearray) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WireError(f"this is not JSON: {error}") from error
