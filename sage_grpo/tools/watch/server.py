"""The endpoints of the page that follows runs.

GET  /?token=TOKEN     the page
GET  /state            what it shows, as JSON
GET  /clips/NUMBER     a clip; the number stands for a file that the state named, never for a path
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from sage_grpo.files import foreign
from sage_grpo.tools.gate import SafeJSONResponse
from sage_grpo.tools.local_page import LocalPage
from sage_grpo.tools.watch.state import Watched

MAX_CLIP_BYTES = 50_000_000


def build_page(runs: Sequence[Path]) -> LocalPage:
    watched = Watched(runs)
    reading = asyncio.Lock()  # several tabs read once

    async def state(request: Request) -> SafeJSONResponse:
        async with reading:
            return SafeJSONResponse(await asyncio.to_thread(watched.state))

    async def clip(request: Request) -> Response:
        path = watched.clips.get(request.path_params["number"])
        if path is None:
            raise HTTPException(404, "there is no such clip")
        try:
            video = await asyncio.to_thread(foreign.read_bytes, path, MAX_CLIP_BYTES)
        except (OSError, foreign.Refused):
            raise HTTPException(404, "the clip is gone") from None
        return Response(video, media_type="video/mp4")

    routes = [
        Route("/state", state, methods=["GET"]),
        Route("/clips/{number}", clip, methods=["GET"]),
    ]
    return LocalPage("watch.html", "Runs", routes)
