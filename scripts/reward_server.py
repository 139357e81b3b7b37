"""Serves rewards over HTTP, so that their models run off the training GPUs or in another environment.

    export SAGE_REWARD_TOKEN=$(openssl rand -hex 32)     (the same on the clients)
    python scripts/reward_server.py --reward videoalign --reward_path ckpts/VideoReward

Clients are `--reward_model remote --remote_reward_url http://HOST:PORT`; `sage_grpo/rewards/remote.py` has the format.
Clips that arrive while a batch is scored form the next batch, whoever sent them. Memory is bounded: a request declares
its length up front and is rejected if pending requests leave no room for it.
"""

import argparse
import asyncio
import hmac
import math
import socket
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sage_grpo.config.command_line import answer_early
from sage_grpo.tools.options import ToolParser


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = ToolParser("python scripts/reward_server.py", __doc__)
    parser.add_argument(
        "--reward",
        nargs="+",
        required=True,
        metavar="NAME",
        help="one or several of videoalign, clipscore, pickscore, ocr, FILE.py:NAME",
    )
    parser.add_argument(
        "--reward_path",
        type=Path,
        metavar="FOLDER",
        default=Path("ckpts/VideoReward"),
        help="folder of VideoReward; weights of other rewards are beside it",
    )
    parser.add_argument(
        "--reward_fps",
        type=float,
        metavar="X",
        default=2.0,
        above=0,
        help="frames per second that the reward sees",
    )
    parser.add_argument(
        "--reward_batch_size",
        type=int,
        metavar="N",
        default=8,
        above=0,
        help="clips scored together",
    )
    parser.add_argument(
        "--host",
        metavar="NAME",
        default="127.0.0.1",
        help="address to listen on; 0.0.0.0 accepts other machines",
    )
    parser.add_argument("--port", type=int, metavar="N", default=8900, help="port to listen on")
    parser.add_argument(
        "--device", metavar="NAME", help="device of the rewards (default: a GPU if there is one)"
    )
    parser.add_argument(
        "--max_clips",
        type=int,
        metavar="N",
        default=64,
        above=0,
        help="maximum number of clips in a request",
    )
    parser.add_argument(
        "--max_request_mb",
        type=int,
        metavar="MB",
        default=512,
        above=0,
        help="maximum size of a request",
    )
    parser.add_argument(
        "--max_waiting_mb",
        type=int,
        metavar="MB",
        default=4096,
        above=0,
        help="maximum size of all pending requests together",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        metavar="S",
        default=300.0,
        above=0,
        help="seconds for a request to arrive, and again for it to be scored",
    )
    return parser.parse_args(arguments)


answer_early(__name__, parse_arguments)

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from torch import Tensor

from sage_grpo.files.json_files import finite
from sage_grpo.plugins import trust
from sage_grpo.rewards.base import Composite, Setup
from sage_grpo.rewards.build import build_rewards
from sage_grpo.rewards.client import RemoteError, read_json, read_token
from sage_grpo.rewards.remote import MAX_HEADER

MAX_FPS = 1_000_000  # frames per second of a clip
KEYS = {"fps", "prompts", "shapes"}


class TooMuch(RemoteError):
    """A message over a limit."""


def unpack(body: bytearray, max_clips: int) -> tuple[list[Tensor], list[str], float]:
    """Clips (sharing the memory of `body`), prompts and fps; RemoteError if anything is invalid."""
    end = body.find(b"\n", 0, MAX_HEADER)
    if end < 0:
        raise RemoteError(f"the first {MAX_HEADER} bytes hold no line of JSON")
    header = read_json(body[:end])
    if not isinstance(header, dict) or set(header) != KEYS:
        raise RemoteError(f"the header must be an object with the keys {', '.join(sorted(KEYS))}")
    fps, prompts, shapes = header["fps"], header["prompts"], header["shapes"]
    if type(fps) not in (int, float) or not 0 < fps <= MAX_FPS:
        raise RemoteError(f"fps is {fps!r}; it must be a positive number of at most {MAX_FPS}")
    if not (isinstance(prompts, list) and isinstance(shapes, list)) or not 0 < len(prompts) == len(
        shapes
    ):
        raise RemoteError(
            "prompts and shapes must be lists with one entry for each clip, at least one"
        )
    if len(shapes) > max_clips:
        raise TooMuch(f"{len(shapes)} clips in one request; at most {max_clips} are allowed")
    good = (
        isinstance(s, list) and len(s) == 3 and all(type(n) is int and n > 0 for n in s)
        for s in shapes
    )
    if not all(isinstance(prompt, str) for prompt in prompts) or not all(good):
        raise RemoteError(
            "a prompt must be text, and a shape three whole numbers: frames, height, width"
        )
    sizes = [math.prod(shape) * 3 for shape in shapes]
    if sum(sizes) != len(body) - end - 1:
        raise RemoteError(f"the shapes need {sum(sizes)} bytes, but {len(body) - end - 1} came")
    pixels = torch.frombuffer(body, dtype=torch.uint8, offset=end + 1)
    return (
        [p.view(*shape, 3) for p, shape in zip(pixels.split(sizes), shapes, strict=True)],
        prompts,
        float(fps),
    )


@dataclass(frozen=True)
class Limits:
    clips: int = 64  # per request
    request: int = 512 << 20  # bytes per request
    waiting: int = 4 << 30  # bytes of all pending requests
    seconds: float = 300.0  # for a request to arrive, and again to be scored
    connections: int = 256


Item = tuple[Tensor, str, float]  # a clip, its prompt and its frames per second


class Batcher:
    """Scores one batch at a time: up to `reward.batch_size` waiting clips of one kind, oldest first."""

    def __init__(self, reward: Composite) -> None:
        self.reward, self.arrived = reward, asyncio.Event()
        self.waiting: dict[
            asyncio.Future, Item
        ] = {}  # by their results: named scores, and the error if there are none

    async def scores(
        self, clips: Sequence[Tensor], prompts: Sequence[str], fps: float, seconds: float
    ) -> list[Any]:
        """Named scores and error for each clip; TimeoutError after `seconds`."""
        new = asyncio.get_running_loop().create_future
        items = {new(): (clip, prompt, fps) for clip, prompt in zip(clips, prompts, strict=True)}
        self.waiting |= items
        self.arrived.set()
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.gather(*items)
        finally:  # abandoned clips must not hold memory
            self.waiting = {
                result: item for result, item in self.waiting.items() if not result.done()
            }

    async def work(self) -> None:
        while True:
            await self.arrived.wait()
            self.arrived.clear()
            while self.waiting:
                kinds = {
                    result: (clip.shape, fps) for result, (clip, _, fps) in self.waiting.items()
                }
                oldest = next(iter(kinds.values()))
                alike = [
                    result for result, kind in kinds.items() if kind == oldest
                ]  # any reward can batch one kind
                await self._score(
                    {result: self.waiting.pop(result) for result in alike[: self.reward.batch_size]}
                )

    async def _score(self, batch: Mapping[asyncio.Future, Item]) -> None:
        clips, prompts, rates = zip(*batch.values(), strict=True)
        found = await asyncio.to_thread(self.reward.score, clips, prompts, rates[0])
        for i, (result, item) in enumerate(batch.items()):
            lost = not found.total[i].isfinite()
            if lost and len(batch) > 1 and not result.done():  # another clip may be at fault
                await self._score({result: item})
            elif not result.done():
                row = {name: values[i].item() for name, values in found.named.items()}
                result.set_result((row, found.errors[0] if lost else None))


class Gate:
    """Rejects requests without the token, and those that give their length twice: two readers could disagree."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self.app, self.expected = app, f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer, headers = self.app, scope.get("headers", ())
        given = dict(headers).get(b"authorization", b"")
        if scope["type"] != "lifespan" and not hmac.compare_digest(given, self.expected):
            answer = error_response(
                401, "the token is missing or wrong: set SAGE_REWARD_TOKEN to that of the server"
            )
        elif sum(name in (b"content-length", b"transfer-encoding") for name, _ in headers) > 1:
            answer = error_response(400, "say the length of the request once, in Content-Length")
        await answer(scope, receive, send)


class Service:
    """The three endpoints: which scores are available, check prompts, score clips."""

    def __init__(self, reward: Composite, limits: Limits) -> None:
        self.reward, self.limits, self.inside, self.batcher = reward, limits, 0, Batcher(reward)

    def app(self, token: str) -> Starlette:
        paths = {
            "/info": (self.info, "GET"),
            "/check": (self.check, "POST"),
            "/score": (self.score, "POST"),
        }
        routes = [Route(path, call, methods=[method]) for path, (call, method) in paths.items()]
        gate, turned_away = [Middleware(Gate, token=token)], dict.fromkeys(STATUS, refusal)
        app = Starlette(
            routes=routes, middleware=gate, exception_handlers=turned_away, lifespan=self.lifespan
        )
        app.router.redirect_slashes = False
        return app

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as tasks:
            work = tasks.create_task(self.batcher.work())
            yield
            work.cancel()

    async def info(self, request: Request) -> JSONResponse:
        limits = {"max_clips": self.limits.clips, "max_bytes": self.limits.request}
        return JSONResponse(
            {"names": list(self.reward.names), "rewards": list(self.reward.rewards)} | limits
        )

    async def check(self, request: Request) -> JSONResponse:
        async with self.body(request) as body:
            asked = read_json(body)
            prompts = asked.get("prompts") if isinstance(asked, dict) else None
            if not isinstance(prompts, list) or not all(
                isinstance(prompt, str) for prompt in prompts
            ):
                raise RemoteError("send an object with a list of prompts")
            try:
                await asyncio.to_thread(self.reward.check, prompts)
            except ValueError as error:
                raise HTTPException(422, str(error)) from error
            return JSONResponse({})

    async def score(self, request: Request) -> JSONResponse:
        async with self.body(request) as body:
            rows = await self.batcher.scores(*unpack(body, self.limits.clips), self.limits.seconds)
            scores = {name: [row[name] for row, _ in rows] for name in self.reward.names}
            return JSONResponse(
                finite({"scores": scores, "errors": [error for _, error in rows if error]})
            )

    @asynccontextmanager
    async def body(self, request: Request) -> AsyncIterator[bytearray]:
        """The complete body; its memory counts as reserved until the response is ready."""
        told = request.headers.get("content-length", "")
        if not told.isascii() or not told.isdigit():
            raise HTTPException(411, "say the length of the request in Content-Length")
        length = int(told[:20])
        if length > self.limits.request:
            raise HTTPException(
                413, f"the request has {length} bytes; at most {self.limits.request} are allowed"
            )
        if self.inside + length > self.limits.waiting:
            raise HTTPException(503, "the queue is full")
        self.inside += length
        try:
            body = bytearray()
            async with asyncio.timeout(self.limits.seconds):
                async for chunk in request.stream():  # h11 passes on no more than the length
                    body += chunk
            yield body
        finally:
            self.inside -= length


STATUS = {
    HTTPException: 0,
    TooMuch: 413,
    RemoteError: 400,
    TimeoutError: 504,
    ClientDisconnect: 400,
}


async def refusal(request: Request, error: Exception) -> JSONResponse:
    """The response to a request that was turned away."""
    status = getattr(error, "status_code", None) or STATUS[type(error)]
    told = getattr(error, "detail", None) or str(error) or "the request took too long, or broke off"
    return error_response(status, told)


def error_response(status: int, told: str) -> JSONResponse:
    """Closes the connection, as the rest of a body may still be in transit."""
    return JSONResponse({"error": told}, status, headers={"Connection": "close"})


def build_server(
    reward: Composite, limits: Limits, token: str, host: str, port: int
) -> uvicorn.Server:
    settings = {
        "log_level": "warning",
        "access_log": False,
        "server_header": False,
        "proxy_headers": False,
    }
    settings |= {
        "limit_concurrency": limits.connections,
        "timeout_graceful_shutdown": 5,
        "ws": "none",
        "http": "h11",
    }
    return uvicorn.Server(
        uvicorn.Config(Service(reward, limits).app(token), host, port, **settings)
    )


def listen(server: uvicorn.Server) -> tuple[socket.socket, str]:
    """The server's bound socket, which queues early clients, and its address."""
    listener = server.config.bind_socket()
    listener.listen()
    return listener, f"http://{server.config.host}:{listener.getsockname()[1]}"


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        args = parse_arguments(arguments)
        if served := {"remote", "judge"} & set(args.reward):
            raise ValueError(
                f"{served.pop()} is served by another machine; name it in the run that uses it"
            )
        args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
        token = read_token()
        trust(*args.reward)
        rewards = build_rewards(
            args.reward, Setup(args.reward_path, torch.device(args.device), args.reward_fps)
        )
        reward = Composite(rewards, None, args.reward_batch_size, args.timeout)
    except (ValueError, FileNotFoundError) as error:
        print(f"reward_server: {error}", file=sys.stderr)
        return 2
    limits = Limits(
        args.max_clips, args.max_request_mb << 20, args.max_waiting_mb << 20, args.timeout
    )
    server = build_server(reward, limits, token, args.host, args.port)
    listener, address = listen(server)
    told = f"up to {args.reward_batch_size} clips together, on {args.device}"
    print(f"{address} scores {', '.join(reward.names)}, {told}", flush=True)
    server.run(sockets=[listener])
    return 0


if __name__ == "__main__":
    sys.exit(main())
