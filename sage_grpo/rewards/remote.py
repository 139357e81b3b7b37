"""Rewards that run elsewhere: how a server is asked, and the client of `python scripts/reward_server.py`.

Scoring is stateless on the server, so a request lost to a broken connection or a busy server is retried a few times.
Rejected or timed-out requests are not. Redirects are errors, because the token would follow them.

Clips are sent as one line of JSON, then their raw bytes. Messages cannot name code.

    {"fps": 8, "prompts": ["a red circle"], "shapes": [[9, 32, 32]]}\n<9 * 32 * 32 * 3 bytes>
"""

import json
import math
import os
import re
import ssl
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from sage_grpo.background import within
from sage_grpo.environment import TOKEN_VARIABLE
from sage_grpo.files.json_files import printable
from sage_grpo.rewards.base import Setup
from sage_grpo.rewards.video_frames import check_clips

PAUSES, LONGEST_PAUSE = (
    (1.0, 2.0, 4.0, 8.0),
    60.0,
)  # seconds before each retry, unless the server asks for more
MAX_HEADER, MAX_ANSWER = 1 << 20, 1 << 24  # bytes of a request's first line, and of an answer
MAX_CHUNK = 1 << 22  # bytes sent at once; the most of a clip that is ever copied


class RemoteError(ValueError):
    """Why the server cannot be used or did not score, or a message cannot be read, in one sentence."""


def read_token() -> str:
    """Read the shared secret from the environment; errors never show it."""
    token = os.environ.get(TOKEN_VARIABLE, "")
    if not re.fullmatch(r"[\w.~+/=-]{16,}", token, re.ASCII):
        what = "does not look like a token" if token else "is not set"
        raise RemoteError(
            f"the environment variable {TOKEN_VARIABLE} {what}; server and clients need the same random one of at "
            "least 16 letters and digits, such as openssl rand -hex 32 prints"
        )
    return token


def read_json(text: bytes | bytearray) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RemoteError(f"this is not JSON: {error}") from error


class Server:
    """Asks the server at `setup.url`, with the token. `retried`: statuses that mean busy; `hint`: what runs there.

    `setup.timeout` is the longest wait for its next bytes, in seconds; a complete answer before training may take
    `setup.start_timeout`, and later ones as long as `Composite` allows.
    """

    retried, hint, content_type = (
        (503,),
        "python scripts/reward_server.py",
        "application/octet-stream",
    )

    def __init__(self, setup: Setup) -> None:
        if setup.url is None:
            raise RemoteError(
                "this reward needs the address of its server: give --remote_reward_url"
            )
        self.url, self.timeout, self.start_timeout = (
            setup.url.rstrip("/"),
            setup.timeout,
            setup.start_timeout,
        )
        self.client = _open_client(setup.url, setup.timeout, read_token())

    def _ask_in_time(self, *request: Any) -> dict[str, Any]:
        """`_ask` with a deadline for everything together: a server may send byte after byte, each of them in time."""
        try:
            return within(self.start_timeout, self._ask, *request)
        except TimeoutError as error:
            raise RemoteError(f"remote_reward_url {self.url} cannot be used: {error}") from error

    def _ask(
        self, method: str, path: str, parts: Sequence[bytes | memoryview] = ()
    ) -> dict[str, Any]:
        """The JSON body of a 200 response; anything else is an error."""
        import httpx2

        about = {"Content-Length": str(sum(map(len, parts))), "Content-Type": self.content_type}
        for pause in (*PAUSES, None):
            body, later = bytearray(), ""
            try:
                with self.client.stream(
                    method, path, content=_chunks(parts), headers=about
                ) as response:
                    for chunk in response.iter_raw():
                        body += chunk
                        if len(body) > MAX_ANSWER:
                            break
                if response.status_code not in self.retried:
                    return self._read(response.status_code, bytes(body))
                problem, later = (
                    f"it answered {response.status_code}",
                    response.headers.get("Retry-After", ""),
                )
            except httpx2.TimeoutException as error:
                raise TimeoutError(
                    f"{self.url} did not answer within {self.timeout:g} s"
                ) from error
            except (
                httpx2.TransportError
            ) as error:  # includes a response shorter than its Content-Length
                problem = printable(f"{type(error).__name__}: {error}")
            if pause is not None:
                time.sleep(
                    max(pause, min(float(later) if later.isdecimal() else 0.0, LONGEST_PAUSE))
                )
        raise RemoteError(
            f"remote_reward_url {self.url} could not be used {len(PAUSES) + 1} times in a row ({problem}); is "
            f"{self.hint} running there?"
        )

    def _read(self, status: int, body: bytes) -> dict[str, Any]:
        if 300 <= status < 400:
            raise RemoteError(
                f"{self.url} answers with a redirect ({status}), which is not followed: name its target"
            )
        if len(body) > MAX_ANSWER:
            raise RemoteError(f"the answer of {self.url} has more than {MAX_ANSWER} bytes")
        try:
            answer = read_json(body)
        except RemoteError as error:
            raise RemoteError(f"{self.url} answered {status} without JSON") from error
        if status != 200 or not isinstance(answer, dict):
            told = answer.get("error") if isinstance(answer, dict) else None
            raise RemoteError(
                f"{self.url} refused ({status}): {printable(told or 'it did not say why')}"
            )
        return answer


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
    return [line, *(memoryview(clip.cpu().contiguous().numpy()).cast("B") for clip in clips)]


class RemoteReward(Server):
    """The rewards of a reward server."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        about = self._ask_in_time("GET", "/info")
        if not isinstance(about.get("names"), list) or type(about.get("max_bytes")) not in (
            int,
            float,
        ):
            raise RemoteError(
                f"{self.url} is not a reward server: its /info lists no names and limits"
            )
        self.names: tuple[str, ...] = tuple(map(str, about["names"]))
        self.limits = (about.get("max_clips", math.inf), about["max_bytes"])

    def check(self, prompts: Sequence[str]) -> None:
        """Reject prompts that the server's rewards reject."""
        self._ask_in_time("POST", "/check", [json.dumps({"prompts": list(prompts)}).encode()])

    def score(
        self, clips: Sequence[Tensor], prompts: Sequence[str], fps: float
    ) -> dict[str, Tensor]:
        """Scores (B,) fp64; NaN for clips that the server could not score, an error if it scored none."""
        parts = pack(clips, prompts, fps)
        size = sum(map(len, parts))
        if len(clips) > self.limits[0] or size > self.limits[1]:
            raise RemoteError(
                f"{len(clips)} clips of {size} bytes are more than {self.url} takes at once ("
                f"{self.limits[0]} clips, {self.limits[1]} bytes): lower reward_batch_size or raise the server's limits"
            )
        answer = self._ask("POST", "/score", parts)
        scores, errors = answer.get("scores"), answer.get("errors")
        if not isinstance(scores, dict) or not isinstance(errors, list):
            raise RemoteError(f"the answer of {self.url} holds no scores and errors")
        found = {name: self._column(name, scores.get(name), len(clips)) for name in self.names}
        if errors and all(values.isnan().all() for values in found.values()):
            raise RemoteError(f"{self.url}: {printable(errors[0])}")
        return found

    def _column(self, name: str, values: Any, count: int) -> Tensor:
        found = len(values) if isinstance(values, list) else "no"
        if found != count:
            raise RemoteError(
                f"{self.url} returned {found} values for {name}; expected {count}, one per clip"
            )
        if not all(value is None or type(value) in (int, float) for value in values):
            raise RemoteError(f"{self.url} returned a value for {name} that is not a number")
        return torch.tensor(
            [math.nan if value is None else value for value in values], dtype=torch.float64
        )


def _open_client(url: str, timeout: float, token: str) -> Any:
    """An httpx2.Client that opens a new connection per request, only to `url`: no proxies, no redirects."""
    import httpx2  # takes 0.1 s

    if "@" in url:
        raise RemoteError(
            "remote_reward_url holds a user name or password, but it is logged: take them out"
        )
    try:
        parts, wrong = httpx2.URL(url), ""
    except httpx2.InvalidURL as error:
        parts, wrong = httpx2.URL(), f"{error}; "
    if (
        parts.scheme not in ("http", "https")
        or not parts.host
        or parts.port == 0
        or parts.query
        or parts.fragment
    ):
        raise RemoteError(
            f"remote_reward_url is {url!r}; {wrong}write http://HOST:PORT or https://HOST:PORT"
        )
    # the certificates of the system take 50 ms to read; the other context trusts none
    tls = (
        ssl.create_default_context()
        if parts.scheme == "https"
        else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    )
    return httpx2.Client(
        base_url=parts,
        headers={"Authorization": f"Bearer {token}", "Accept-Encoding": "identity"},
        timeout=timeout,
        limits=httpx2.Limits(max_keepalive_connections=0),
        verify=tls,
        follow_redirects=False,
        trust_env=False,
    )


def _chunks(parts: Sequence[bytes | memoryview]) -> Iterator[memoryview]:
    for part in parts:
        view = memoryview(part)
        yield from (view[start : start + MAX_CHUNK] for start in range(0, len(view), MAX_CHUNK))
