"""A reward that runs elsewhere: the client of `python -m sage_grpo.tools.reward_server`.

Scoring changes nothing on the server, so a request that a broken connection or a full queue swallowed is asked again, a
few times. Nothing else is: not one that was refused, nor one that ran out of time. Redirects are errors, for the token
would go with them.
"""

import http.client
import json
import math
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

from sage_grpo.rewards.wire import WireError, is_number, pack, read_json, read_token, total_bytes

PAUSES = (1.0, 2.0, 4.0, 8.0)  # seconds before each further attempt
MAX_ANSWER = 1 << 24  # bytes
BUSY = 503
CONNECTIONS = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}


class RemoteError(ValueError):
    """The server cannot be used, or would not score, in one sentence."""


class RemoteReward:
    """Whatever the server at `url` scores; `timeout` is the longest wait for the server's next bytes, in seconds."""

    def __init__(self, url: str, timeout: float = 300.0) -> None:
        self.url, self.timeout, self.token = url.rstrip("/"), timeout, read_token()
        self.parts = urlsplit(self.url)
        _check_url(url, self.parts)
        try:
            about = self._ask("GET", "/info")
        except TimeoutError as error:
            raise RemoteError(str(error)) from error
        if not isinstance(about.get("names"), list) or not is_number(about.get("max_bytes")):
            raise RemoteError(f"{self.url} is no reward server: its /info tells no names and limits")
        self.names: tuple[str, ...] = tuple(map(str, about["names"]))
        self.limits = (about.get("max_clips", math.inf), about["max_bytes"])

    def check(self, prompts: Sequence[str]) -> None:
        """What the rewards on the server refuse."""
        self._ask("POST", "/check", [json.dumps({"prompts": list(prompts)}).encode()])

    def score(self, clips: Sequence[Tensor], prompts: Sequence[str], fps: float) -> dict[str, Tensor]:
        """Scores (B,) fp64; NaN for clips that the server could not score, an error if it scored none."""
        parts = pack(clips, prompts, fps)
        if len(clips) > self.limits[0] or total_bytes(parts) > self.limits[1]:
            raise RemoteError(
                f"{len(clips)} clips of {total_bytes(parts)} bytes are more than {self.url} takes at once ("
                f"{self.limits[0]} clips, {self.limits[1]} bytes): lower reward_batch_size or raise the server's limits"
            )
        answer = self._ask("POST", "/score", parts)
        scores, errors = answer.get("scores"), answer.get("errors")
        if not isinstance(scores, dict) or not isinstance(errors, list):
            raise RemoteError(f"the answer of {self.url} holds no scores and errors")
        found = {name: self._column(name, scores.get(name), len(clips)) for name in self.names}
        if errors and all(values.isnan().all() for values in found.values()):
            raise RemoteError(f"{self.url}: {_line(errors[0])}")
        return found

    def _column(self, name: str, values: Any, count: int) -> Tensor:
        if not isinstance(values, list) or len(values) != count:
            raise RemoteError(f"{self.url} gave no {count} values of {name}, one for each clip")
        if not all(value is None or is_number(value) for value in values):
            raise RemoteError(f"{self.url} gave a value of {name} that is no number")
        return torch.tensor([math.nan if value is None else value for value in values], dtype=torch.float64)

    def _ask(self, method: str, path: str, parts: Sequence[bytes | memoryview] = ()) -> dict[str, Any]:
        """The JSON that the server answers with 200; anything else is an error."""
        for pause in (*PAUSES, None):
            try:
                status, body = self._exchange(method, path, parts)
                if status != BUSY:
                    return self._read(status, body)
                problem = "its queue is full"
            except TimeoutError as error:
                raise TimeoutError(f"{self.url} did not answer within {self.timeout:g} s") from error
            except (OSError, http.client.HTTPException) as error:
                problem = f"{type(error).__name__}: {_line(error)}"
            if pause is not None:
                time.sleep(pause)
        raise RemoteError(
            f"remote_reward_url {self.url} could not be used {len(PAUSES) + 1} times in a row ({problem}); is "
            "python -m sage_grpo.tools.reward_server running there?"
        )

    def _exchange(self, method: str, path: str, parts: Sequence[bytes | memoryview]) -> tuple[int, bytes]:
        connection = CONNECTIONS[self.parts.scheme](self.parts.hostname, self.parts.port, timeout=self.timeout)
        headers = {"Authorization": f"Bearer {self.token}", "Content-Length": str(total_bytes(parts))}
        try:
            connection.request(method, self.parts.path + path, iter(parts), headers)
            response = connection.getresponse()
            body = response.read(MAX_ANSWER + 1)
            if response.length and len(body) <= MAX_ANSWER:  # what is still to come; read says nothing about it
                raise http.client.IncompleteRead(body, response.length)
            return response.status, body
        finally:
            connection.close()

    def _read(self, status: int, body: bytes) -> dict[str, Any]:
        if 300 <= status < 400:
            raise RemoteError(f"{self.url} answers with a redirect ({status}), which is not followed: name its target")
        if len(body) > MAX_ANSWER:
            raise RemoteError(f"the answer of {self.url} has more than {MAX_ANSWER} bytes")
        try:
            answer = read_json(body)
        except WireError as error:
            raise RemoteError(f"{self.url} answered {status} without JSON") from error
        if status != 200 or not isinstance(answer, dict):
            told = answer.get("error") if isinstance(answer, dict) else None
            raise RemoteError(f"{self.url} refused ({status}): {_line(told or 'it did not say why')}")
        return answer


def _check_url(url: str, parts: Any) -> None:
    if parts.username is not None or parts.password is not None:
        raise RemoteError("remote_reward_url holds a user name or password, but it is logged: take them out")
    try:
        good = (
            parts.scheme in CONNECTIONS and parts.hostname and parts.port != 0 and not (parts.query or parts.fragment)
        )
    except ValueError:  # a port that is none
        good = False
    if not good:
        raise RemoteError(f"remote_reward_url is {url!r}; write http://HOST:PORT or https://HOST:PORT")


def _line(text: Any) -> str:
    return " ".join(str(text).split())[:300]
