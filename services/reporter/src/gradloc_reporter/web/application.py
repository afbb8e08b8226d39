"""The FastAPI application: routes, security headers, OpenAPI, health. Starts nothing by itself."""

from collections.abc import Awaitable, Callable
from importlib import metadata
from typing import Any

from fastapi import FastAPI, Response
from fastapi.openapi.utils import get_openapi
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gradloc_reporter import answers
from gradloc_reporter.answers import Problem
from gradloc_reporter.web.api import PROBLEM_CONTENT, api_router
from gradloc_reporter.web.backend import Backend
from gradloc_reporter.web.body_size import BodySize
from gradloc_reporter.web.gate import Gate, sign_in_router
from gradloc_reporter.web.live import Live, live_router
from gradloc_reporter.web.pace import Buckets, Pace
from gradloc_reporter.web.pages import Pages, pages_router
from gradloc_reporter.web.problems import ProblemRaised, add_problem_handlers
from gradloc_reporter.web.whatif import WhatIfApp, whatif_router
from gradloc_reporter.web.wishes import wishes_router

# Nothing from elsewhere, no inline script or style: token texts are shown, and they are not trusted.
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


BURST_S = 10.0  # an asker may use the requests of so many seconds at once


def application(backend: Backend, live: Live, whatif: WhatIfApp | None = None) -> FastAPI:
    pages = Pages(backend)
    # No docs_url: FastAPI's own page loads its script from a CDN.
    app = FastAPI(
        title="gradloc reporter",
        version=metadata.version("gradloc-reporter"),
        openapi_url="/api/v1/openapi.json",
        docs_url=None,
        redoc_url=None,
        separate_input_output_schemas=False,  # what an older gradloc wrote may lack newer fields
    )
    app.include_router(api_router(backend))
    app.include_router(wishes_router(backend))
    app.include_router(whatif_router(backend, whatif))
    app.include_router(live_router(live))
    app.include_router(pages_router(pages))
    app.include_router(sign_in_router(backend.tokens, pages.sign_in, secure=backend.secure))
    app.mount("/static", StaticFiles(packages=[("gradloc_reporter.web", "static")]))
    _add_health(app, backend)
    add_problem_handlers(app, pages.error)
    per_s = backend.rate_limit_per_s
    app.add_middleware(Pace, buckets=None if per_s is None else Buckets(per_s, max(1, round(BURST_S * per_s))))
    app.add_middleware(BodySize)
    app.add_middleware(Gate, tokens=backend.tokens, queries=backend.queries)
    app.add_middleware(SecurityHeaders)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


def _add_health(app: FastAPI, backend: Backend) -> None:
    @app.get("/healthz", include_in_schema=False)
    def health() -> Response:
        """The process answers."""
        return Response("ok\n", media_type="text/plain")

    @app.get("/readyz", include_in_schema=False)
    def ready() -> Response:
        """The reporter reads its streams and its database."""
        trouble = backend.trouble()
        if trouble is not None:
            raise ProblemRaised(503, trouble, "See the reporter's log.", {"Retry-After": "5"})
        return Response("ready\n", media_type="text/plain")

    @app.get("/metrics", include_in_schema=False)
    def metrics() -> Response:
        body, content_type = backend.metrics()
        return Response(body, headers={"Content-Type": content_type})


class SecurityHeaders:
    """Adds HEADERS to every answer. Plain ASGI: no task and no copy of the body for each request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._headers = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, self._sender(send) if scope["type"] == "http" else send)

    def _sender(self, send: Send) -> Callable[[Message], Awaitable[None]]:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *self._headers]}
            await send(message)

        return with_headers


def _openapi(app: FastAPI) -> dict[str, Any]:
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
        schema["components"]["schemas"]["Problem"] = Problem.model_json_schema()
        for unused in ("HTTPValidationError", "ValidationError"):
            schema["components"]["schemas"].pop(unused, None)
        schema["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        schema["security"] = [{"token": []}, {}]  # {}: a reporter without --tokens lets everybody in
        asked = {name for name in schema["components"]["schemas"] if name in _ASKED}
        _allow_non_finite({n: s for n, s in schema["components"]["schemas"].items() if n not in asked})
        _name_problem_contents(schema)
        app.openapi_schema = schema
    return app.openapi_schema


# What people send is finite; only answers may hold the strings that stand for NaN and infinities.
_ASKED = {kind.__name__ for kind in answers.Wish.__subclasses__()}


def _allow_non_finite(node: Any) -> None:
    """A number in an answer may be one of the strings that stand for NaN and infinities."""
    if isinstance(node, dict):
        if node.get("type") == "number":
            bounds = {key: node.pop(key) for key in ("type", "minimum", "maximum") if key in node}
            node["anyOf"] = [bounds, {"type": "string", "enum": ["NaN", "Infinity", "-Infinity"]}]
            return
        for value in node.values():
            _allow_non_finite(value)
    elif isinstance(node, list):
        for value in node:
            _allow_non_finite(value)


def _name_problem_contents(schema: dict[str, Any]) -> None:
    for path in schema["paths"].values():
        for operation in path.values():
            for code, response in operation["responses"].items():
                if code.startswith(("4", "5")):
                    response["content"] = PROBLEM_CONTENT
