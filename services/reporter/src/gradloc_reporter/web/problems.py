"""Errors as answers: application/problem+json for programs, a page for people.

Every problem says what went wrong and what to do. Never says what was in a message or a parameter.
"""

import logging
from collections.abc import Callable
from http import HTTPStatus

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Match

from gradloc_proto.bus import BusUnavailable
from gradloc_reporter.answers import Problem
from gradloc_reporter.store import DBAPIError

log = logging.getLogger(__name__)
RETRY_AFTER_S = 5
_ADVICE = {
    404: "Check the address; GET /api/v1/runs and /api/v1/incidents list what there is.",
    405: "Use one of the methods that the Allow header names; /api/v1/openapi.json lists them all.",
    413: "Send the wish alone; /api/v1/openapi.json says what it holds.",
    415: "Send the body as application/json.",
}


class ProblemRaised(Exception):
    """Ends a request with this problem."""

    def __init__(self, status: int, detail: str, what_to_do: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(detail)
        self.problem = Problem(title=_title(status), status=status, detail=detail, what_to_do=what_to_do)
        self.headers = headers or {}


def no_such(kind: str, name: str) -> ProblemRaised:
    return ProblemRaised(404, f"there is no {kind} {name[:128]!r}", f"GET /api/v1/{kind}s lists the {kind}s there are.")


def add_problem_handlers(app: FastAPI, error_page: Callable[[Problem], str]) -> None:
    """Make `app` answer every error as a problem, or as `error_page` where a person asked for a page."""

    def answer(request: Request, problem: Problem, headers: dict[str, str] | None = None) -> Response:
        if _is_page(request):
            return Response(error_page(problem), problem.status, headers, media_type="text/html")
        return Response(problem.model_dump_json(), problem.status, headers, media_type="application/problem+json")

    async def raised(request: Request, error: Exception) -> Response:
        assert isinstance(error, ProblemRaised)
        return answer(request, error.problem, error.headers)

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        advice = _ADVICE.get(error.status_code, "Check the request; /api/v1/openapi.json says what is expected.")
        title = _title(error.status_code)
        problem = Problem(title=title, status=error.status_code, detail=str(error.detail), what_to_do=advice)
        headers = dict(error.headers or {})
        if error.status_code == 405:  # Starlette names the methods of the first route only
            headers["Allow"] = ", ".join(sorted(_methods_at(request)))
        return answer(request, problem, headers)

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        problem = Problem(
            title=_title(422),
            status=422,
            detail=f"{where}: {first['msg']}",
            what_to_do=f"Correct {where}; /api/v1/openapi.json says what is expected.",
        )
        return answer(request, problem)

    async def bus(request: Request, error: Exception) -> Response:
        return answer(request, _unavailable("Redis does not answer, so that the wish could not go out"), _RETRY)

    async def database(request: Request, error: Exception) -> Response:
        log.error("database: %s", type(getattr(error, "orig", error)).__name__)
        return answer(request, _unavailable("the database does not answer"), _RETRY)

    async def unexpected(request: Request, error: Exception) -> Response:
        problem = Problem(
            title=_title(500),
            status=500,
            detail="the reporter failed to answer; nothing was changed",
            what_to_do="The reporter's log holds the traceback; please report it.",
        )
        return answer(request, problem)

    app.add_exception_handler(ProblemRaised, raised)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(BusUnavailable, bus)
    app.add_exception_handler(DBAPIError, database)
    app.add_exception_handler(Exception, unexpected)


def _methods_at(request: Request) -> set[str]:
    """Every method that some route takes at this address."""
    found: set[str] = set()
    for route in request.app.routes:
        if route.matches(request.scope)[0] is not Match.NONE:
            found |= set(getattr(route, "methods", None) or ())
    return found


_RETRY = {"Retry-After": str(RETRY_AFTER_S)}


def _unavailable(detail: str) -> Problem:
    return Problem(
        title=_title(503),
        status=503,
        detail=detail,
        what_to_do=f"Ask again in {RETRY_AFTER_S} s; see the reporter's log.",
    )


def _is_page(request: Request) -> bool:
    return not request.url.path.startswith(("/api/", "/metrics", "/healthz", "/readyz")) and request.method == "GET"


def _title(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Error"
