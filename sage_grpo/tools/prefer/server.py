"""The server of the labeling page: on this machine alone, one secret address per rater, clips by number.

GET  /?token=TOKEN     the page
POST /state            the pair to show
POST /answer           {"trial": 7, "answers": {"overall": "left"}, "seconds": 3.2}; stored before the next pair is sent
POST /undo             {"trial": 7}; take back the last answer, if it is that of the trial or none is named
GET  /clips/NUMBER     a clip of the pair that is shown, or of the next one

All but the page take the token in a header, which a page of another site cannot send. The number of a clip is different
in every trial and follows from a key that is never sent, so nothing that a browser receives tells which system made
which clip.
"""

import asyncio
import hashlib
import hmac
import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from sage_grpo.tools.gate import Gate, SafeJSONResponse, http_refusal, page_response, refusal
from sage_grpo.tools.prefer.answers import AnswersFile
from sage_grpo.tools.prefer.blinding import equal_size, padded
from sage_grpo.tools.prefer.pairs import Trial, trials
from sage_grpo.tools.prefer.study import CHOICES, LEFT, QUESTIONS, RIGHT, check_raters, read_clip

MAX_BYTES = 4096  # of an answer


class Labeling:
    """The endpoints. What a rater sees next follows from the answers file alone."""

    def __init__(self, answers: AnswersFile, raters: Sequence[str]) -> None:
        check_raters(raters)
        self.answers = answers
        self.study = answers.study
        self.tokens = {secrets.token_urlsafe(24): rater for rater in raters}
        self.schedules = {rater: trials(self.study, rater) for rater in raters}
        self.key = secrets.token_bytes(32)
        self.writing = asyncio.Lock()  # one answer at a time

    def app(self, hosts: Sequence[str] = ()) -> Starlette:
        app = Starlette(
            routes=[
                Route("/", self.page, methods=["GET"]),
                Route("/state", self.state, methods=["POST"]),
                Route("/answer", self.answer, methods=["POST"]),
                Route("/undo", self.undo, methods=["POST"]),
                Route("/clips/{number}", self.clip, methods=["GET"]),
            ],
            middleware=[Middleware(Gate, raters=self.tokens, hosts=hosts)],
            exception_handlers={HTTPException: http_refusal, OSError: disk_refusal},
        )
        app.router.redirect_slashes = False
        return app

    async def page(self, request: Request) -> HTMLResponse:
        return page_response(
            "label.html",
            title="Which clip is better?",
            rater=request.scope["rater"],
            questions=[(name, QUESTIONS[name]) for name in self.study.questions],
        )

    async def state(self, request: Request) -> SafeJSONResponse:
        return SafeJSONResponse(self.current(request.scope["rater"]))

    async def answer(self, request: Request) -> SafeJSONResponse:
        """Store an answer to the pair that is shown; one to another pair, of an old tab, changes nothing."""
        rater = request.scope["rater"]
        number, choices, seconds = self.checked(await read_object(request))
        async with self.writing:
            if number != self.number(rater):
                raise HTTPException(409, "this pair has been answered already")
            trial = self.schedules[rater][number]
            await asyncio.to_thread(self.answers.add, rater, number, trial, choices, seconds)
            return SafeJSONResponse(self.current(rater))

    async def undo(self, request: Request) -> SafeJSONResponse:
        """Take back the last answer; a request that names another one, such as a second try, changes nothing."""
        rater = request.scope["rater"]
        has_body = "content-type" in request.headers
        number = (await read_object(request)).get("trial") if has_body else None
        async with self.writing:
            if number is None or number == self.last(rater):
                await asyncio.to_thread(self.answers.undo, rater)
            return SafeJSONResponse(self.current(rater))

    async def clip(self, request: Request) -> Response:
        rater = request.scope["rater"]
        shown = self.number(rater)
        given = request.path_params["number"]
        for number in (shown, shown + 1):
            if number >= len(self.schedules[rater]):
                continue
            for side in (LEFT, RIGHT):
                if hmac.compare_digest(
                    self.clip_number(rater, number, side).encode(), given.encode()
                ):
                    trial = self.schedules[rater][number]
                    try:
                        video = await asyncio.to_thread(self.video, trial, side)
                    except (
                        OSError,
                        ValueError,
                    ):  # ValueError: it is a link, or names another place
                        raise HTTPException(404, "the clip is gone") from None
                    return Response(video, media_type="video/mp4")
        raise HTTPException(404, "there is no such clip")

    # what is shown

    def number(self, rater: str) -> int:
        """The first trial of a rater that is not answered; their number if all are."""
        given = self.answers.of(rater)
        schedule = self.schedules[rater]
        return next((i for i in range(len(schedule)) if i not in given), len(schedule))

    def last(self, rater: str) -> int | None:
        """The trial of a rater's last answer."""
        given = list(self.answers.of(rater))
        return given[-1] if given else None

    def current(self, rater: str) -> dict[str, Any]:
        """The pair to show to a rater, and the clips of the next one to load ahead."""
        schedule = self.schedules[rater]
        number = self.number(rater)
        state: dict[str, Any] = {
            "done": number,
            "total": len(schedule),
            "can_undo": bool(self.answers.of(rater)),
            "last_trial": self.last(rater),
        }
        if number < len(schedule):
            state["trial"] = number
            state["prompt"] = self.study.prompt(schedule[number].pair)
            state["clips"] = self.clip_numbers(rater, number)
        if number + 1 < len(schedule):
            state["next_clips"] = self.clip_numbers(rater, number + 1)
        return state

    def clip_numbers(self, rater: str, number: int) -> list[str]:
        """The numbers of the left and the right clip of a trial."""
        return [self.clip_number(rater, number, side) for side in (LEFT, RIGHT)]

    def clip_number(self, rater: str, number: int, side: str) -> str:
        text = f"{number}\0{side}\0{rater}"
        return hmac.new(self.key, text.encode(errors="replace"), hashlib.sha256).hexdigest()[:32]

    def video(self, trial: Trial, side: str) -> bytes:
        """The clip on one side of a trial, as large as the other one."""
        pair = self.study.pairs[trial.pair]
        shows_second = side == LEFT if trial.swapped else side == RIGHT
        index = 1 if shows_second else 0  # of the clip in its pair
        videos = [read_clip(self.answers.path, self.study.clips[clip]) for clip in pair]
        return padded(videos[index], equal_size(*map(len, videos)))

    def checked(self, body: Mapping[str, Any]) -> tuple[int, dict[str, str], float]:
        """Trial, choices and seconds of a request."""
        number = body.get("trial")
        choices = body.get("answers")
        seconds = body.get("seconds", 0)
        if type(number) is not int or not isinstance(choices, dict):
            raise HTTPException(400, "an answer has a trial and answers")
        if set(choices) != set(self.study.questions):
            raise HTTPException(400, f"answer {', '.join(self.study.questions)}")
        if not all(isinstance(choice, str) and choice in CHOICES for choice in choices.values()):
            raise HTTPException(400, f"choose from {', '.join(CHOICES)}")
        if type(seconds) not in (int, float) or not 0 <= seconds < 1e6:
            raise HTTPException(400, "seconds is not a time")
        return number, choices, float(seconds)


async def read_object(request: Request) -> dict[str, Any]:
    """The JSON object of a request of limited size."""
    if request.headers.get("content-type", "").partition(";")[0] != "application/json":
        raise HTTPException(415, "send application/json")
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BYTES:
            raise HTTPException(413, f"an answer has at most {MAX_BYTES} bytes")
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, "the answer is not JSON") from error
    if not isinstance(value, dict):
        raise HTTPException(400, "an answer is an object")
    return value


async def disk_refusal(request: Request, error: Exception) -> SafeJSONResponse:
    """An answer that is not on disk was not given, and the rater has to know."""
    return refusal(507, "the answer could not be stored; is the disk full?")


def addresses(labeling: Labeling, base: str) -> dict[str, str]:
    """The address of each rater's page, by name."""
    return {rater: f"{base}/?token={token}" for token, rater in labeling.tokens.items()}
