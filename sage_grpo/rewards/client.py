"""The client side of rewards that run on a server: tokens, retries, and answers that are JSON or an error.

Scoring is stateless on the server, so a request lost to a broken connection or a busy server is retried a few times.
Rejected or timed-out requests are not. Redirects are errors, because the token would follow them.
"""

import json
import os
import re
import ssl
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sage_grpo.background import TooSlow, within
from sage_grpo.environment import TOKEN_VARIABLE
from sage_grpo.files.json_files import printable
from sage_grpo.rewards.base import Setup

PAUSES = (1.0, 2.0, 4.0, 8.0)  # seconds before each retry, unless the server asks for more
MAX_PAUSE = 60.0  # seconds that a server may ask for
MAX_ANSWER = 1 << 24  # bytes
MAX_CHUNK = 1 << 22  # bytes sent at once; the most of a clip that is ever copied


class RemoteError(ValueError):
    """Why the server cannot be used or did not score, or a message cannot be read, in one sentence."""


def read_token() -> str:
    """Read the shared secret from the environment; errors never show it."""
    token = os.environ.get(TOKEN_VARIABLE, "")
    if not re.fullmatch(r"[\w.~+/=-]{16,}", token, re.ASCII):
        problem = "does not look like a token" if token else "is not set"
        raise RemoteError(
            f"the environment variable {TOKEN_VARIABLE} {problem}; server and clients need the same "
            "random one of at least 16 letters and digits, such as openssl rand -hex 32 prints"
        )
    return token


def read_json(text: bytes | bytearray) -> Any:
    """Parse JSON; RemoteError if the text is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RemoteError(f"this is not JSON: {error}") from error


@dataclass(frozen=True)
class Response:
    """A response, not yet checked."""

    status: int
    body: bytes
    retry_after: str  # header; empty if there is none


class ServerClient:
    """Asks the server at `setup.url`, with the token.

    `setup.timeout` is the longest wait for its next bytes, in seconds; a complete answer before training may take
    `setup.start_timeout`, and later ones as long as `Composite` allows.
    """

    busy_statuses: tuple[int, ...] = (503,)  # after which a request is repeated
    hint = "python scripts/reward_server.py"  # what should be running at the address
    content_type = "application/octet-stream"

    def __init__(self, setup: Setup) -> None:
        if setup.url is None:
            raise RemoteError(
                "this reward needs the address of its server: give --remote_reward_url"
            )
        self.url = setup.url.rstrip("/")
        self.timeout = setup.timeout
        self.start_timeout = setup.start_timeout
        self.client = _open_client(setup.url, setup.timeout, read_token())

    def _ask_in_time(
        self, method: str, path: str, parts: Sequence[bytes | memoryview] = ()
    ) -> dict[str, Any]:
        """`_ask` with an overall deadline: a server that sends a byte at a time never exceeds the read timeout."""
        try:
            return within(self.start_timeout, self._ask, method, path, parts)
        except TimeoutError as error:
            raise RemoteError(f"remote_reward_url {self.url} cannot be used: {error}") from error

    def _ask(
        self, method: str, path: str, parts: Sequence[bytes | memoryview] = ()
    ) -> dict[str, Any]:
        """The JSON object in a 200 response; anything else is an error."""
        import httpx2

        for pause in (*PAUSES, None):
            retry_after = ""
            try:
                response = self._send(method, path, parts)
                if response.status not in self.busy_statuses:
                    return self._read(response)
                problem = f"it answered {response.status}"
                retry_after = response.retry_after
            except httpx2.TimeoutException as error:
                raise TooSlow(f"{self.url} did not answer within {self.timeout:g} s") from error
            except httpx2.TransportError as error:
                # includes a response shorter than its Content-Length
                problem = printable(f"{type(error).__name__}: {error}")
            if pause is not None:
                requested = float(retry_after) if retry_after.isdecimal() else 0.0
                time.sleep(max(pause, min(requested, MAX_PAUSE)))
        raise RemoteError(
            f"remote_reward_url {self.url} could not be used {len(PAUSES) + 1} times in a row "
            f"({problem}); is {self.hint} running there?"
        )

    def _send(self, method: str, path: str, parts: Sequence[bytes | memoryview]) -> Response:
        """One attempt; reads no more than one chunk beyond `MAX_ANSWER`."""
        headers = {
            "Content-Length": str(sum(map(len, parts))),
            "Content-Type": self.content_type,
        }
        body = bytearray()
        with self.client.stream(method, path, content=_chunks(parts), headers=headers) as response:
            for chunk in response.iter_raw():
                body += chunk
                if len(body) > MAX_ANSWER:
                    break
        return Response(response.status_code, bytes(body), response.headers.get("Retry-After", ""))

    def _read(self, response: Response) -> dict[str, Any]:
        status = response.status
        if 300 <= status < 400:
            raise RemoteError(
                f"{self.url} answers with a redirect ({status}), which is not followed: name its target"
            )
        if len(response.body) > MAX_ANSWER:
            raise RemoteError(f"the answer of {self.url} has more than {MAX_ANSWER} bytes")
        try:
            answer = read_json(response.body)
        except RemoteError as error:
            raise RemoteError(f"{self.url} answered {status} without JSON") from error
        if status != 200 or not isinstance(answer, dict):
            reason = answer.get("error") if isinstance(answer, dict) else None
            raise RemoteError(
                f"{self.url} refused ({status}): {printable(reason or 'it gave no reason')}"
            )
        return answer


def _open_client(url: str, timeout: float, token: str) -> Any:
    """An httpx2.Client that opens a new connection per request, only to `url`: no proxies, no redirects."""
    try:
        import httpx2  # takes 0.1 s
    except ImportError as error:
        problem = f"a reward server is asked with httpx2, which is missing ({error})"
        raise RemoteError(f"{problem}; install requirements.txt") from error

    if "@" in url:
        raise RemoteError(
            "remote_reward_url holds a user name or password, but it is logged: take them out"
        )
    try:
        address = httpx2.URL(url)
        problem = ""
    except httpx2.InvalidURL as error:
        address = httpx2.URL()
        problem = f"{error}; "
    has_host = address.scheme in ("http", "https") and address.host and address.port != 0
    if not has_host or address.query or address.fragment:
        raise RemoteError(
            f"remote_reward_url is {url!r}; {problem}write http://HOST:PORT or https://HOST:PORT"
        )

    if address.scheme == "https":
        tls = ssl.create_default_context()  # reads the system's certificates, which takes 50 ms
    else:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # trusts no certificate
    return httpx2.Client(
        base_url=address,
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
        for start in range(0, len(view), MAX_CHUNK):
            yield view[start : start + MAX_CHUNK]
