"""A page with one user, behind the gate."""

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

from sage_grpo.tools.gate import Gate, build_server, http_refusal, listen, page_response


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
        return page_response(self.template, title=self.title)

    def listen(self, port: int) -> tuple[uvicorn.Server, socket.socket, str]:
        """A server, its bound socket, and the address to open; port 0 picks a free one."""
        server = build_server(self.app, port, shutdown_seconds=2)
        listener, base = listen(server)
        return server, listener, f"{base}/?token={self.token}"
