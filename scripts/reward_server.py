"""Serve rewards over HTTP, so that their models run off the training GPUs or in another environment.

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
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sage_grpo.config import argument_types
from sage_grpo.config.command_line import answer_early, answering
from sage_grpo.rewards.registry import REWARDS, SERVED
from sage_grpo.tools.options import ToolParser


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = ToolParser("python scripts/reward_server.py", __doc__)
    parser.add_argument(
        "--reward",
        nargs="+",
        required=True,
        metavar="NAME",
        help=f"one or several of {', '.join(name for name in REWARDS if name not in SERVED)}, FILE.py:NAME",
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
        above=0,
        help="frames per second that the reward sees (default: that of VideoAlign's folder, 2 for other rewards)",
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
    parser.add_argument(
        "--port",
        type=argument_types.port,
        metavar="N",
        default=8900,
        help="port to listen on; 0 picks a free one",
    )
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

from sage_grpo.exit_codes import DONE
from sage_grpo.files.fingerprints import text_fingerprint
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
    fps = header["fps"]
    prompts = header["prompts"]
    shapes = header["shapes"]
    if type(fps) not in (int, float) or not 0 < fps <= MAX_FPS:
        raise RemoteError(f"fps is {fps!r}; it must be a positive number of at most {MAX_FPS}")
    are_lists = isinstance(prompts, list) and isinstance(shapes, list)
    if not are_lists or len(prompts) != len(shapes) or not prompts:
        raise RemoteError(
            "prompts and shapes must be lists with one entry for each clip, at least one"
        )
    if len(shapes) > max_clips:
        raise TooMuch(f"{len(shapes)} clips in one request; at most {max_clips} are allowed")
    if not all(isinstance(prompt, str) for prompt in prompts) or not all(map(is_shape, shapes)):
        raise RemoteError(
            "a prompt must be text, and a shape three whole numbers: frames, height, width"
        )

    sizes = [math.prod(shape) * 3 for shape in shapes]
    received = len(body) - end - 1
    if sum(sizes) != received:
        raise RemoteError(f"the shapes need {sum(sizes)} bytes, but {received} came")
    pixels = torch.frombuffer(body, dtype=torch.uint8, offset=end + 1).split(sizes)
    clips = [part.view(*shape, 3) for part, shape in zip(pixels, shapes, strict=True)]
    return clips, prompts, float(fps)


def is_shape(value: Any) -> bool:
    """Whether a value is a list of three whole numbers above 0."""
    is_list = isinstance(value, list) and len(value) == 3
    return is_list and all(type(number) is int and number > 0 for number in value)


@dataclass(frozen=True)
class Limits:
    clips: int = 64  # per request
    request: int = 512 << 20  # bytes per request
    waiting: int = 4 << 30  # bytes of all pending requests
    seconds: float = 300.0  # for a request to arrive, and again to be scored
    connections: int = 256


@dataclass(frozen=True, eq=False)
class Job:
    """A clip that waits to be scored."""

    clip: Tensor  # uint8 (F, H, W, 3)
    prompt: str
    fps: float
    result: "asyncio.Future[ClipScores]"

    @property
    def kind(self) -> tuple[torch.Size, float]:
        """Clips of one kind can be scored together by any reward."""
        return self.clip.shape, self.fps


@dataclass(frozen=True)
class ClipScores:
    """The result of a job."""

    named: dict[str, float]
    error: str | None  # why there is no total


class Batcher:
    """Scores one batch at a time: up to `reward.batch_size` waiting clips of one kind, oldest first."""

    def __init__(self, reward: Composite) -> None:
        self.reward = reward
        self.arrived = asyncio.Event()
        self.waiting: list[Job] = []

    async def scores(
        self, clips: Sequence[Tensor], prompts: Sequence[str], fps: float, seconds: float
    ) -> list[ClipScores]:
        """Scores of each clip; TimeoutError after `seconds`."""
        loop = asyncio.get_running_loop()
        jobs = [
            Job(clip, prompt, fps, loop.create_future())
            for clip, prompt in zip(clips, prompts, strict=True)
        ]
        self.waiting += jobs
        self.arrived.set()
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.gather(*(job.result for job in jobs))
        finally:  # abandoned clips must not hold memory
            self.waiting = [job for job in self.waiting if not job.result.done()]

    async def work(self) -> None:
        """Score clips as they arrive, for as long as the server runs."""
        while True:
            await self.arrived.wait()
            self.arrived.clear()
            while self.waiting:
                kind = self.waiting[0].kind
                alike = [job for job in self.waiting if job.kind == kind]
                batch = alike[: self.reward.batch_size]
                self.waiting = [job for job in self.waiting if job not in batch]
                await self._score(batch)

    async def _score(self, batch: Sequence[Job]) -> None:
        clips = [job.clip for job in batch]
        prompts = [job.prompt for job in batch]
        scores = await asyncio.to_thread(self.reward.score, clips, prompts, batch[0].fps)
        for i, job in enumerate(batch):
            if job.result.done():  # abandoned
                continue
            failed = not scores.total[i].isfinite()
            if failed and len(batch) > 1:  # another clip may be at fault
                await self._score([job])
                continue
            named = {name: values[i].item() for name, values in scores.named.items()}
            job.result.set_result(ClipScores(named, scores.errors[0] if failed else None))


class Gate:
    """Rejects requests without the token, and those that give their length twice: two readers could disagree."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self.app = app
        self.expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = scope.get("headers", ())
        authorization = dict(headers).get(b"authorization", b"")
        lengths = [name for name, _ in headers if name in (b"content-length", b"transfer-encoding")]
        answer = self.app
        if scope["type"] != "lifespan" and not hmac.compare_digest(authorization, self.expected):
            answer = error_response(
                401, "the token is missing or wrong: set SAGE_REWARD_TOKEN to that of the server"
            )
        elif len(lengths) > 1:
            answer = error_response(400, "give the length of the request once, in Content-Length")
        await answer(scope, receive, send)


class Service:
    """The three endpoints: which scores are available, check prompts, score clips."""

    def __init__(self, reward: Composite, limits: Limits) -> None:
        self.reward = reward
        self.limits = limits
        self.batcher = Batcher(reward)
        # a run notices when a server at the same address has other weights
        self.fingerprint = text_fingerprint(repr(sorted(reward.fingerprint().items())))
        self.pending_bytes = 0

    def app(self, token: str) -> Starlette:
        """The application, behind the gate."""
        app = Starlette(
            routes=[
                Route("/info", self.info, methods=["GET"]),
                Route("/check", self.check, methods=["POST"]),
                Route("/score", self.score, methods=["POST"]),
            ],
            middleware=[Middleware(Gate, token=token)],
            exception_handlers=dict.fromkeys((HTTPException, *STATUS), refusal),
            lifespan=self.lifespan,
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
        return JSONResponse(
            {
                "names": list(self.reward.names),
                "rewards": list(self.reward.rewards),
                "max_clips": self.limits.clips,
                "max_bytes": self.limits.request,
                "fingerprint": self.fingerprint,
            }
        )

    async def check(self, request: Request) -> JSONResponse:
        async with self.body(request) as body:
            question = read_json(body)
            prompts = question.get("prompts") if isinstance(question, dict) else None
            is_list = isinstance(prompts, list)
            if not is_list or not all(isinstance(prompt, str) for prompt in prompts):
                raise RemoteError("send an object with a list of prompts")
            try:
                await asyncio.to_thread(self.reward.check, prompts)
            except ValueError as error:
                raise HTTPException(422, str(error)) from error
            return JSONResponse({})

    async def score(self, request: Request) -> JSONResponse:
        async with self.body(request) as body:
            clips, prompts, fps = unpack(body, self.limits.clips)
            results = await self.batcher.scores(clips, prompts, fps, self.limits.seconds)
            answer = {
                "scores": {
                    name: [result.named[name] for result in results] for name in self.reward.names
                },
                "errors": [result.error for result in results if result.error],
            }
            return JSONResponse(finite(answer))

    @asynccontextmanager
    async def body(self, request: Request) -> AsyncIterator[bytearray]:
        """The complete body; its memory counts as reserved until the response is ready."""
        header = request.headers.get("content-length", "")
        if not header.isascii() or not header.isdigit():
            raise HTTPException(411, "give the length of the request in Content-Length")
        length = int(header[:20])
        if length > self.limits.request:
            raise HTTPException(
                413, f"the request has {length} bytes; at most {self.limits.request} are allowed"
            )
        if self.pending_bytes + length > self.limits.waiting:
            raise HTTPException(503, "the queue is full")
        self.pending_bytes += length
        try:
            body = bytearray()
            async with asyncio.timeout(self.limits.seconds):
                async for chunk in request.stream():  # h11 passes on no more than the length
                    body += chunk
            yield body
        finally:
            self.pending_bytes -= length


# statuses of errors; an HTTPException has its own
STATUS = {
    TooMuch: 413,
    RemoteError: 400,
    TimeoutError: 504,
    ClientDisconnect: 400,
}


async def refusal(request: Request, error: Exception) -> JSONResponse:
    """The response to a request that is refused."""
    if isinstance(error, HTTPException):
        return error_response(error.status_code, error.detail)
    text = str(error) or "the request took too long, or broke off"
    return error_response(STATUS[type(error)], text)


def error_response(status: int, text: str) -> JSONResponse:
    """Closes the connection, as the rest of a body may still be in transit."""
    return JSONResponse({"error": text}, status, headers={"Connection": "close"})


def build_server(
    reward: Composite, limits: Limits, token: str, host: str, port: int
) -> uvicorn.Server:
    config = uvicorn.Config(
        Service(reward, limits).app(token),
        host,
        port,
        http="h11",
        ws="none",
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=limits.connections,
        timeout_graceful_shutdown=5,
    )
    return uvicorn.Server(config)


def listen(server: uvicorn.Server) -> tuple[socket.socket, str]:
    """The server's bound socket, which queues early clients, and its address."""
    host = server.config.host
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, server.config.port), family=family)
    except OSError as error:
        raise ValueError(
            f"--host {host} --port {server.config.port} cannot be listened on: {error.strerror}"
        ) from error
    return listener, f"http://{host}:{listener.getsockname()[1]}"


def check_device(device: str) -> None:
    """Reject the name of a device that is not there."""
    name, _, number = device.partition(":")
    count = {"cpu": 1, "cuda": torch.cuda.device_count()}.get(name, 0)
    if (number or "0") not in map(str, range(count)):
        raise ValueError(
            f"--device is {device!r}; give cpu, or cuda or cuda:N for a GPU that exists"
        )


def build_served_reward(args: argparse.Namespace, device: str) -> Composite:
    """The rewards that the flags name, every score with weight 1."""
    elsewhere = [name for name in args.reward if name in SERVED]
    if elsewhere:
        raise ValueError(
            f"{elsewhere[0]} is served by another machine; name it in the run that uses it"
        )
    setup = Setup(args.reward_path, torch.device(device), args.reward_fps)
    return Composite(
        build_rewards(args.reward, setup),
        weights=None,
        batch_size=args.reward_batch_size,
        timeout=args.timeout,
    )


@answering("reward_server: ")
def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_arguments(arguments)
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    check_device(device)
    token = read_token()
    trust(*args.reward)
    reward = build_served_reward(args, device)

    limits = Limits(
        clips=args.max_clips,
        request=args.max_request_mb << 20,
        waiting=args.max_waiting_mb << 20,
        seconds=args.timeout,
    )
    server = build_server(reward, limits, token, args.host, args.port)
    listener, address = listen(server)
    print(
        f"{address} scores {', '.join(reward.names)}, "
        f"up to {args.reward_batch_size} clips together, on {device}",
        flush=True,
    )
    server.run(sockets=[listener])
    return DONE


if __name__ == "__main__":
    sys.exit(main())
