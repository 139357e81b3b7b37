"""The gate before the pages that this machine serves: on 127.0.0.1, opened by a secret address.

The address has a random token. The page itself takes it from there; everything else takes it in a header, which a page
of another site cannot send. Works through an SSH tunnel (`ssh -L 8000:127.0.0.1:8000 MACHINE`).
"""

import hmac
import json
import secrets
import socket
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import parse_qs

import uvicorn
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sage_grpo.tools.templating import render

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
POLICY = (
    "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; media-src blob:; img-src data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class Gate:
    """Rejects what does not come from a rater's own page: wrong host, other origin, missing or wrong token."""

    def __init__(self, app: ASGIApp, raters: Mapping[str, str], hosts: Sequence[str]) -> None:
        """raters: token -> name. hosts: names under which the page may be opened, besides this machine."""
        self.app = app
        self.raters = raters
        self.hosts = {*LOOPBACK, *hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                extra = [(name.lower().encode(), text.encode()) for name, text in HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *extra]}
            await send(message)

        headers = {
            name.decode("latin-1"): text.decode("latin-1") for name, text in scope["headers"]
        }
        problem = self._problem(headers)
        rater = self._rater(scope, headers)
        answer = self.app
        if problem:
            answer = refusal(403, problem)
        elif rater is None:
            answer = refusal(
                403, "this page opens only with the whole address that the program printed"
            )
        else:
            scope["rater"] = rater
        await answer(scope, receive, send_with_headers)

    def _problem(self, headers: Mapping[str, str]) -> str:
        """Why a request is not from our own page, or empty: guards against other sites and DNS rebinding."""
        host = headers.get("host", "")
        name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
        if name not in self.hosts:
            return "open the page as 127.0.0.1 or localhost, or name the host with --allow_host"
        origin = headers.get("origin")
        if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
            return "the request comes from another page"
        return ""

    def _rater(self, scope: Scope, headers: Mapping[str, str]) -> str | None:
        """Whose token it is; every token is compared, so that timing reveals nothing."""
        if scope["path"] == "/":
            query = parse_qs(scope["query_string"].decode("latin-1"))
            given = query.get("token", [""])[0]
        else:
            given = headers.get("authorization", "").removeprefix("Bearer ")
        owners = [
            rater
            for token, rater in self.raters.items()
            if hmac.compare_digest(token.encode(), given.encode(errors="replace"))
        ]
        return owners[0] if owners else None


def page_response(template: str, **values: Any) -> HTMLResponse:
    """A page whose own script and style run, and nothing else."""
    nonce = secrets.token_urlsafe(16)
    html = render(template, nonce=nonce, **values)
    return HTMLResponse(html, headers={"Content-Security-Policy": POLICY.format(nonce=nonce)})


class SafeJSONResponse(JSONResponse):
    """JSON with a ? for what UTF-8 lacks, such as half a surrogate pair: one bad name does not take a page down."""

    def render(self, content: Any) -> bytes:
        text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.encode(errors="replace")


def refusal(status: int, text: str) -> JSONResponse:
    """Closes the connection, as the rest of a body may still be in transit."""
    return SafeJSONResponse({"error": text}, status, headers={"Connection": "close"})


async def http_refusal(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    return refusal(error.status_code, error.detail)


def build_server(app: ASGIApp, port: int, shutdown_seconds: int = 5) -> uvicorn.Server:
    """A server on this machine alone; port 0 picks a free one."""
    config = uvicorn.Config(
        app,
        "127.0.0.1",
        port,
        http="h11",
        ws="none",
        log_level="warning",
        access_log=False,  # addresses hold tokens
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=shutdown_seconds,
    )
    return uvicorn.Server(config)


def listen(server: uvicorn.Server) -> tuple[socket.socket, str]:
    """The server's bound socket, and its address."""
    port = server.config.port
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
        listener.listen()
    except (OSError, OverflowError) as error:  # in use, not allowed, or no port at all
        listener.close()
        raise ValueError(f"port {port} cannot be used; give another --port") from error
    return listener, f"http://127.0.0.1:{listener.getsockname()[1]}"
