"""A page for the user of this machine alone: on 127.0.0.1, opened by a secret address, behind the gate of `prefer`.

The address has a random token. The page itself takes it from there; everything else takes it in a header, which a page
of another site cannot send. Works through an SSH tunnel (`ssh -L 8000:127.0.0.1:8000 MACHINE`).
"""

import secrets
import socket
from collections.abc import Sequence

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse
from starlette.routing import Route

from sage_grpo.tools.prefer.server import POLICY, Gate, http_refusal, listen
from sage_grpo.tools.templating import render


class LocalPage:
    """An application with one user: a page from a template at /, and other routes."""

    def __init__(self, template: str, title: str, routes: Sequence[Route]) -> None:
        self.template = template
        self.title = title
        self.token = secrets.token_urlsafe(24)
        self.app = Starlette(
            routes=[Route("/", self.page, methods=["GET"]), *routes],
            middleware=[Middleware(Gate, raters={self.token: "user"}, hosts=())],
            exception_handlers={HTTPException: http_refusal},
        )
        self.app.router.redirect_slashes = False

    async def page(self, request: Request) -> HTMLResponse:
        nonce = secrets.token_urlsafe(16)
        html = render(self.template, title=self.title, nonce=nonce)
        return HTMLResponse(html, headers={"Content-Security-Policy": POLICY.format(nonce=nonce)})

    def listen(self, port: int) -> tuple[uvicorn.Server, socket.socket, str]:
        """A server, its bound socket, and the address to open; port 0 takes a free one."""
        config = uvicorn.Config(
            self.app,
            "127.0.0.1",
            port,
            http="h11",
            ws="none",
            log_level="warning",
            access_log=False,  # addresses hold the token
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=2,
        )
        server = uvicorn.Server(config)
        listener, base = listen(server)
        return server, listener, f"{base}/?token={self.token}"
