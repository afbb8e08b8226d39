"""The gate before every route: who asks, and may they. Plain ASGI; the rules are `access`'s.

A program sends `Authorization: Bearer`; a person signs in once, and the browser keeps the token in a
cookie that no script reads and no other site sends along. What answers without a token holds no
data of runs: health, metrics, the sign-in form and the page's own static files.
"""

from collections.abc import Callable
from dataclasses import replace
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs, quote

from fastapi import APIRouter, Request, Response
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from gradloc_reporter.access import ANYBODY, TOKEN_LENGTH_MAX, Tokens, Viewer
from gradloc_reporter.answers import Problem
from gradloc_reporter.store.queries import Queries

COOKIE = "gradloc_token"
COOKIE_MAX_AGE_S = 30 * 86_400
SIGN_IN = "/sign-in"
BODY_LENGTH_MAX = 4_096
_OPEN = ("/healthz", "/readyz", "/metrics", SIGN_IN)
_READS = ("GET", "HEAD", "OPTIONS")


class Gate:
    """Lets a request through with its viewer and the queries that see what the viewer may see."""

    def __init__(self, app: ASGIApp, tokens: Tokens | None, queries: Queries) -> None:
        self._app = app
        self._tokens = tokens
        self._queries = queries

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        viewer = ANYBODY if self._tokens is None else self._viewer(self._tokens, Headers(scope=scope))
        if viewer is None and not _is_open(scope["path"]):
            await _unauthorized(scope)(scope, receive, send)
            return
        if viewer is not None and not viewer.operates and scope["method"] not in _READS and not _is_open(scope["path"]):
            await _forbidden(viewer)(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        state["viewer"] = viewer
        state["queries"] = None if viewer is None else replace(self._queries, teams=viewer.teams)
        await self._app(scope, receive, send)

    def _viewer(self, tokens: Tokens, headers: Headers) -> Viewer | None:
        given = headers.get("authorization")
        if given is not None:  # a wrong header is not outweighed by a right cookie
            kind, _, token = given.partition(" ")
            return tokens.viewer(token.strip()) if kind.lower() == "bearer" else None
        try:
            cookie = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
        except CookieError:
            return None
        return None if cookie is None else tokens.viewer(cookie.value)


def viewer_of(request: Request) -> Viewer:
    """Who asks; for handlers behind the gate."""
    viewer: Viewer = request.state.viewer
    return viewer


def queries_of(request: Request) -> Queries:
    """What may be read by who asks; for handlers behind the gate."""
    queries: Queries = request.state.queries
    return queries


def sign_in_router(tokens: Tokens | None, form: Callable[[str, bool], str], *, secure: bool) -> APIRouter:
    """The form, what it sends, and the way out. `form(next address, token was wrong)` renders it."""
    router = APIRouter(include_in_schema=False)

    @router.get(SIGN_IN)
    async def ask(request: Request) -> Response:
        return _html(form(_own_address(request.query_params.get("next", "/")), False))

    @router.post(SIGN_IN)
    async def sign_in(request: Request) -> Response:
        fields = parse_qs(await _body(request), keep_blank_values=True)
        token = fields.get("token", [""])[0].strip()
        address = _own_address(fields.get("next", ["/"])[0])
        if tokens is None or tokens.viewer(token) is None:
            return _html(form(address, True), 401)
        answer = Response(status_code=303, headers={"Location": address})
        answer.set_cookie(
            COOKIE, token, max_age=COOKIE_MAX_AGE_S, httponly=True, samesite="strict", secure=secure, path="/"
        )
        return answer

    @router.post("/sign-out")
    async def sign_out() -> Response:
        answer = Response(status_code=303, headers={"Location": SIGN_IN})
        answer.delete_cookie(COOKIE, httponly=True, samesite="strict", secure=secure, path="/")
        return answer

    return router


def _is_open(path: str) -> bool:
    return path in _OPEN or path.startswith("/static/") or path == "/sign-out"


def _unauthorized(scope: Scope) -> Response:
    if not scope["path"].startswith("/api/") and scope["method"] in ("GET", "HEAD"):
        address = quote(scope["path"], safe="/")
        return Response(status_code=303, headers={"Location": f"{SIGN_IN}?next={quote(address, safe='')}"})
    return _problem(
        Problem(
            title="Unauthorized",
            status=401,
            detail="this reporter wants a token, and none that it knows was sent",
            what_to_do="Send Authorization: Bearer TOKEN; whoever runs the reporter makes tokens with "
            "gradloc reporter-token.",
        ),
        {"WWW-Authenticate": 'Bearer realm="gradloc"'},
    )


def _forbidden(viewer: Viewer) -> Response:
    return _problem(
        Problem(
            title="Forbidden",
            status=403,
            detail=f"the token {viewer.name} has the scope read; this needs operate",
            what_to_do="Ask whoever runs the reporter for a token of scope operate.",
        ),
        {},
    )


def _problem(problem: Problem, headers: dict[str, str]) -> Response:
    return Response(problem.model_dump_json(), problem.status, headers, media_type="application/problem+json")


def _own_address(address: str) -> str:
    """The address, if it is one of ours; never another site's."""
    plain = address.isascii() and address.isprintable() and "\\" not in address
    return address if plain and address.startswith("/") and not address.startswith("//") else "/"


async def _body(request: Request) -> str:
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > BODY_LENGTH_MAX + 4 * TOKEN_LENGTH_MAX:
            return ""
    return body.decode(errors="replace")


def _html(body: str, status: int = 200) -> Response:
    return Response(body, status, media_type="text/html", headers={"Cache-Control": "no-store"})
