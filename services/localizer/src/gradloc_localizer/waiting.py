"""What the asker of the what-if app reads while a replica starts and works: lines merged from both. Pure of Ray.

A line at least every few seconds: silence is what a cold start must not look like.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from gradloc_proto.whatif import WhatIfLine, WhatIfProblem

EVERY_S = 2.0
Stage = Callable[[], Awaitable[str]]


async def lines(
    told: AsyncIterator[Mapping[str, Any]],
    stage: Stage,
    problem_of: Callable[[Exception], WhatIfProblem],
    *,
    start_timeout_s: float,
    every_s: float = EVERY_S,
    clock: Callable[[], float] = time.monotonic,
) -> AsyncIterator[WhatIfLine]:
    """Lines for the asker. told: the replica's own, the first of them once it begins. stage: what is waited for."""
    began = clock()

    def waited() -> float:
        return round(clock() - began, 1)

    begun = False
    coming: asyncio.Task[Mapping[str, Any]] = asyncio.ensure_future(_next(told))
    try:
        while True:
            done, _ = await asyncio.wait([coming], timeout=every_s)
            if not done:
                if begun:
                    continue
                if waited() > start_timeout_s:
                    yield _last(waited(), 503, f"no replica began within {start_timeout_s:.0f} s; look at the pool")
                    return
                yield WhatIfLine(waited_s=waited(), stage=await stage())
                continue
            try:
                fields = coming.result()
            except StopAsyncIteration:
                yield _last(waited(), 503, "the replica ended without an answer; ask again")
                return
            except Exception as error:  # noqa: BLE001 - whatever it was, the asker must be told
                yield WhatIfLine(waited_s=waited(), problem=problem_of(error))
                return
            begun = True
            line = WhatIfLine(waited_s=waited(), **fields)
            yield line
            if line.is_last:
                return
            coming = asyncio.ensure_future(_next(told))
    finally:
        coming.cancel()


async def _next(told: AsyncIterator[Mapping[str, Any]]) -> Mapping[str, Any]:
    return await anext(told)


def _last(waited_s: float, status: int, detail: str) -> WhatIfLine:
    return WhatIfLine(waited_s=waited_s, problem=problem(status, detail))


def problem(status: int, detail: str) -> WhatIfProblem:
    titles = {401: "Unauthorized", 404: "Not Found", 405: "Method Not Allowed", 413: "Content Too Large"}
    titles |= {422: "Unprocessable", 500: "Internal Error", 503: "Unavailable"}
    return WhatIfProblem(status=status, title=titles[status], detail=detail[:512])


def problem_of(error: Exception) -> WhatIfProblem:
    """What an asker is told; tracebacks stay in the log."""
    line = str(error).split("\n", maxsplit=1)[0][:400] or type(error).__name__
    if isinstance(error, FileNotFoundError) or "no snapshot at" in line:
        return problem(404, line)
    if isinstance(error, ValueError):  # SnapshotRejected and ModelRejected too
        return problem(422, line)
    if isinstance(error, OSError):
        return problem(503, line)
    return problem(500, f"{type(error).__name__}: {line}")
