"""How often somebody may ask: a bucket of requests for each token, or each address where there are none.

What answers without a token is not counted: probes and scrapes must never be refused. Plain ASGI.
"""

import time
from collections import OrderedDict
from collections.abc import Callable

from fastapi import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from gradloc_reporter.answers import Problem

ASKERS_MAX = 10_000  # buckets kept; the one unheard of longest goes first


class Buckets:
    """`per_s` requests a second each, `burst` at once. Safe within one thread."""

    def __init__(self, per_s: float, burst: int, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._per_s, self._burst, self._monotonic = per_s, burst, monotonic
        self._known: OrderedDict[str, tuple[float, float]] = OrderedDict()  # asker -> (left, when)

    def wait_s(self, asker: str) -> float:
        """0 and one request less, or how long to wait for one."""
        now = self._monotonic()
        left, at = self._known.pop(asker, (float(self._burst), now))
        left = min(float(self._burst), left + (now - at) * self._per_s)
        wait_s = 0.0 if left >= 1 else (1 - left) / self._per_s
        self._known[asker] = (left - 1 if left >= 1 else left, now)
        if len(self._known) > ASKERS_MAX:
            self._known.popitem(last=False)
        return wait_s


class Pace:
    """Stands inside the gate: `scope["state"]["viewer"]` says who asks."""

    def __init__(self, app: ASGIApp, buckets: Buckets | None) -> None:
        self._app = app
        self._buckets = buckets

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._buckets is None or not scope["path"].startswith("/api/"):
            await self._app(scope, receive, send)
            return
        viewer = scope.get("state", {}).get("viewer")
        client = scope.get("client") or ("unknown", 0)
        name = client[0] if viewer is None or viewer.name is None else f"token {viewer.name}"
        wait_s = self._buckets.wait_s(name)
        if wait_s > 0:
            await _refusal(wait_s)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _refusal(wait_s: float) -> Response:
    seconds = max(1, round(wait_s + 0.5))
    problem = Problem(
        title="Too Many Requests",
        status=429,
        detail="more requests than --rate-limit allows",
        what_to_do=f"Ask again in {seconds} s; for news as it comes, read GET /api/v1/live.",
    )
    return Response(
        problem.model_dump_json(), 429, {"Retry-After": str(seconds)}, media_type="application/problem+json"
    )
