"""REST /api/v1: what an incident's step would have been under remedies, asked of the what-if app and passed on.

The app's lines come through as they are told (docs/protocol.md), so a replica that starts is seen starting. Nothing
of an answer is believed that does not parse.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import httpx
from fastapi import APIRouter
from fastapi.concurrency import run_in_threadpool
from pydantic import ValidationError
from starlette.responses import Response, StreamingResponse

from gradloc_proto.messages import Part
from gradloc_proto.whatif import LINE_LENGTH_MAX, MEDIA_TYPE, WhatIfLine, WhatIfProblem, WhatIfRequest
from gradloc_reporter import answers as a
from gradloc_reporter.web.api import Incident, Seen, problems
from gradloc_reporter.web.backend import Backend
from gradloc_reporter.web.problems import ProblemRaised, no_such
from gradloc_reporter.web.wishes import WISH

log = logging.getLogger(__name__)
NUM_ASKING_MAX = 8  # each holds two sockets; the app has few replicas
CONNECT_S, SILENCE_MAX_S = 10.0, 900.0  # one replay of a large step goes by without a line
REFUSAL_LENGTH_MAX = 64 * 1024
ANSWERS = {
    200: {"description": "Lines of JSON; the last has `answer` or `problem`", "content": {MEDIA_TYPE: {}}}
} | problems(on_409="There is no what-if app, or no snapshot of the incident")


class _Refusal(Part):
    problem: WhatIfProblem


@dataclass(frozen=True, slots=True)
class WhatIfApp:
    url: str
    token: str | None = field(default=None, repr=False)


def whatif_router(backend: Backend, app: WhatIfApp | None) -> APIRouter:
    router = APIRouter(prefix="/api/v1", tags=["wishes"])
    free = asyncio.Semaphore(NUM_ASKING_MAX)

    def step_of(queries: Seen, incident: str) -> tuple[str, int, int]:
        with backend.database.reading() as session:
            found = queries.incident(session, incident)
        if found is None:
            raise no_such("incident", incident)
        there = [each for each in found.snapshots if each.path is not None and each.weights != "none"]
        wanted = None if found.finding is None else found.finding.step
        chosen = next((each for each in there if each.step == wanted), there[-1] if there else None)
        if chosen is None:
            raise ProblemRaised(409, "no snapshot of this incident is known", "Ask for the incident of another step.")
        return found.run_id, chosen.attempt, chosen.step

    @router.post("/incidents/{incident}/whatif", response_class=StreamingResponse, responses=WISH | ANSWERS)
    async def ask_what_if(queries: Seen, incident: Incident, wish: a.WhatIfWish) -> Response:
        """The norm and direction of the incident's step under remedies, by the what-if app: lines while it works."""
        run, attempt, step = await run_in_threadpool(step_of, queries, incident)
        if app is None:
            raise ProblemRaised(409, "this reporter knows no what-if app", "Start it with --whatif-url.")
        if free.locked():
            raise ProblemRaised(429, f"{NUM_ASKING_MAX} ask already", "Ask again soon.", {"Retry-After": "10"})
        asked = WhatIfRequest(run=run, attempt=attempt, step=step, **wish.model_dump(exclude={"by"}))
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(free)
            reply = await _opened(stack, app, asked)
            left = stack.pop_all()

        async def passed() -> AsyncIterator[bytes]:
            async with left:
                async for line in _lines(reply):
                    yield line.model_dump_json(exclude_none=True).encode() + b"\n"

        return StreamingResponse(passed(), media_type=MEDIA_TYPE, headers={"Cache-Control": "no-store"})

    return router


async def _opened(stack: AsyncExitStack, app: WhatIfApp, asked: WhatIfRequest) -> httpx.Response:
    """The app's answer, as soon as it has said that it is none of refusal. Raises ProblemRaised."""
    headers = {"Content-Type": "application/json"}
    if app.token:
        headers["Authorization"] = f"Bearer {app.token}"
    timeout = httpx.Timeout(CONNECT_S, read=SILENCE_MAX_S)
    try:
        client = await stack.enter_async_context(httpx.AsyncClient(timeout=timeout, trust_env=False))
        sent = client.stream("POST", app.url, content=asked.model_dump_json().encode(), headers=headers)
        reply = await stack.enter_async_context(sent)
        if reply.status_code == 200:
            return reply
        refusal = b""
        async for chunk in reply.aiter_bytes():
            refusal += chunk
            if len(refusal) > REFUSAL_LENGTH_MAX:
                break
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        log.warning("the what-if app does not answer: %s", type(error).__name__)
        raise ProblemRaised(503, "the what-if app does not answer", "Look at its RayService.") from None
    if reply.status_code == 422:
        with contextlib.suppress(ValidationError):
            raise ProblemRaised(422, _Refusal.model_validate_json(refusal).problem.detail, "Change that option.")
    log.warning("the what-if app refuses with status %d", reply.status_code)
    raise ProblemRaised(503, f"the what-if app refuses with status {reply.status_code}", "Check its address and token.")


async def _lines(reply: httpx.Response) -> AsyncIterator[WhatIfLine]:
    """What parses; the last line says how it ended, whatever happened."""
    waited_s, left = 0.0, b""
    try:
        async for chunk in reply.aiter_bytes():
            *whole, left = (left + chunk).split(b"\n")
            for data in whole:
                line = WhatIfLine.model_validate_json(data)
                waited_s = line.waited_s
                yield line
                if line.is_last:
                    return
            if len(left) > LINE_LENGTH_MAX:
                break
    except (httpx.HTTPError, ValidationError) as error:
        log.warning("the what-if app's answer ended: %s", type(error).__name__)
    problem = WhatIfProblem(
        status=503, title="Unavailable", detail="the what-if app ended without an answer; ask again"
    )
    yield WhatIfLine(waited_s=waited_s, problem=problem)
