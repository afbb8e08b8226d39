"""REST /api/v1: what is known of runs and incidents, and the wishes of people.

Reads come from the database. A wish that others must fulfil goes out as a message on the run's
control stream and comes back like every fact; only our own facts (acknowledgements, comments) are
written here.
"""

import base64
import binascii
import secrets
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query, Response
from pydantic import BaseModel

from gradloc_proto import streams
from gradloc_proto.codec import encode
from gradloc_proto.identities import RUN_ID_PATTERN
from gradloc_proto.messages import RelocalizeRequested, Verdict
from gradloc_reporter import answers as a
from gradloc_reporter.access import Viewer
from gradloc_reporter.store.queries import Queries
from gradloc_reporter.store.wishes import acknowledge, comment
from gradloc_reporter.web.backend import Backend
from gradloc_reporter.web.gate import queries_of, viewer_of
from gradloc_reporter.web.problems import ProblemRaised, no_such

NUMBER_MAX = 2**53  # larger ones lose digits in JSON parsers
PROBLEM_CONTENT: dict[str, Any] = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}


def _problems(**described: str) -> dict[int | str, dict[str, Any]]:
    return {
        int(code.removeprefix("on_")): {"description": text, "content": PROBLEM_CONTENT}
        for code, text in described.items()
    }


Run = Annotated[str, Path(pattern=RUN_ID_PATTERN, description="run_id of a run")]
Incident = Annotated[str, Path(pattern=r"^[^\x00/]{1,512}$", description="incident_id of an incident")]
Cursor = Annotated[str | None, Query(max_length=256, description="next_cursor of the page before")]
Limit = Annotated[int, Query(ge=1, le=200)]
StepNumber = Annotated[int, Query(ge=0, le=NUMBER_MAX)]
Seen = Annotated[Queries, Depends(queries_of)]
By = Annotated[Viewer, Depends(viewer_of)]
BAD_QUERY = _problems(on_422="A parameter is not as expected", on_401="A token is wanted and none known was sent")
UNKNOWN = BAD_QUERY | _problems(on_404="There is no such thing")
WISH = UNKNOWN | _problems(on_403="The token has the scope read", on_503="Redis or the database does not answer")


def answered(model: BaseModel, status: int = 200) -> Response:
    """JSON in which NaN and infinities are strings: pydantic writes it, not the json module."""
    return Response(model.model_dump_json(), status, media_type="application/json")


def api_router(backend: Backend) -> APIRouter:
    router = APIRouter(prefix="/api/v1")
    _add_run_routes(router, backend)
    _add_incident_routes(router, backend)
    _add_wish_routes(router, backend)
    return router


def _add_run_routes(router: APIRouter, backend: Backend) -> None:
    @router.get("/runs", response_model=a.RunsAnswer, responses=BAD_QUERY, tags=["runs"])
    def list_runs(queries: Seen, cursor: Cursor = None, limit: Limit = 50) -> Response:
        """All runs, by name."""
        after = None if cursor is None else read_cursor(cursor, "r")
        with backend.database.reading() as session:
            found = queries.runs(session, after=after, limit=limit)
        next_cursor = None if found.next_cursor is None else write_cursor("r", found.next_cursor)
        return answered(found.model_copy(update={"next_cursor": next_cursor}))

    @router.get("/runs/{run}", response_model=a.RunAnswer, responses=UNKNOWN, tags=["runs"])
    def get_run(queries: Seen, run: Run) -> Response:
        """One run: what it said of itself, and where it stands."""
        with backend.database.reading() as session:
            found = queries.run(session, run)
        if found is None:
            raise no_such("run", run)
        return answered(found)

    @router.get("/runs/{run}/steps", response_model=a.StepsAnswer, responses=UNKNOWN, tags=["runs"])
    def list_steps(
        queries: Seen,
        run: Run,
        from_step: StepNumber = 0,
        to_step: Annotated[int | None, Query(ge=0, le=NUMBER_MAX)] = None,
        max_points: Annotated[int, Query(ge=4, le=10_000)] = 1000,
    ) -> Response:
        """The series of a run, thinned to `max_points` without losing its least and greatest norms."""
        with backend.database.reading() as session:
            if queries.run(session, run) is None:
                raise no_such("run", run)
            found = queries.steps(session, run, first=from_step, last=to_step, max_points=max_points)
        return answered(found)


def _add_incident_routes(router: APIRouter, backend: Backend) -> None:
    @router.get("/incidents", response_model=a.IncidentsAnswer, responses=BAD_QUERY, tags=["incidents"])
    def list_incidents(
        queries: Seen,
        run: Annotated[str | None, Query(pattern=RUN_ID_PATTERN)] = None,
        status: a.Status | None = None,
        verdict: Verdict | None = None,
        cursor: Cursor = None,
        limit: Limit = 50,
    ) -> Response:
        """Incidents, newest first."""
        before = None if cursor is None else _number(read_cursor(cursor, "i"))
        with backend.database.reading() as session:
            found, following = queries.incidents(
                session, run=run, status=status, verdict=verdict, before=before, limit=limit
            )
        next_cursor = None if following is None else write_cursor("i", str(following))
        return answered(a.IncidentsAnswer(incidents=found, next_cursor=next_cursor))

    @router.get("/incidents/{incident}", response_model=a.IncidentDetail, responses=UNKNOWN, tags=["incidents"])
    def get_incident(queries: Seen, incident: Incident) -> Response:
        """Everything known of one incident: spikes, findings of all attempts, snapshots, log, words."""
        with backend.database.reading() as session:
            found = queries.incident(session, incident)
        if found is None:
            raise no_such("incident", incident)
        return answered(found)


def _add_wish_routes(router: APIRouter, backend: Backend) -> None:
    @router.post(
        "/incidents/{incident}/relocalize",
        status_code=202,
        response_model=a.RelocalizeAnswer,
        responses=WISH,
        tags=["wishes"],
    )
    def relocalize(queries: Seen, viewer: By, incident: Incident, wish: a.RelocalizeWish) -> Response:
        """Ask for another localization. The same request_id twice is one wish."""
        with backend.database.reading() as session:
            found = queries.incident(session, incident)
        if found is None:
            raise no_such("incident", incident)
        request_id = wish.request_id or secrets.token_hex(8)
        message = RelocalizeRequested(
            run_id=found.run_id,
            attempt=found.attempt,
            ts=backend.clock(),
            incident_id=incident,
            request_id=request_id,
            by=viewer.signed(wish.by),
        )
        key = streams.stream(found.run_id, "control")
        backend.bus.append(key, [encode(message)], length_max=streams.STREAM_LENGTH_MAX["control"])
        return answered(a.RelocalizeAnswer(incident_id=incident, request_id=request_id), 202)

    @router.post("/incidents/{incident}/acknowledge", response_model=a.CommentAnswer, responses=WISH, tags=["wishes"])
    def acknowledge_incident(queries: Seen, viewer: By, incident: Incident, wish: a.Acknowledgement) -> Response:
        """Say that somebody looks at it. The first one counts."""
        with backend.database.writing() as session:
            known = queries.sees(session, incident) and acknowledge(
                session, incident, by=viewer.signed(wish.by), ts=backend.clock()
            )
        return log_of(queries, incident, known)

    @router.post("/incidents/{incident}/comments", response_model=a.CommentAnswer, responses=WISH, tags=["wishes"])
    def comment_incident(queries: Seen, viewer: By, incident: Incident, wish: a.Comment) -> Response:
        """Add a remark to the incident's log."""
        with backend.database.writing() as session:
            key = f"comment-{secrets.token_hex(16)}"
            known = queries.sees(session, incident) and comment(
                session, incident, key=key, by=viewer.signed(wish.by), text=wish.text, ts=backend.clock()
            )
        return log_of(queries, incident, known)

    def log_of(queries: Queries, incident: str, known: bool) -> Response:
        if not known:
            raise no_such("incident", incident)
        backend.on_change()
        with backend.database.reading() as session:
            found = queries.incident(session, incident)
        assert found is not None
        return answered(a.CommentAnswer(incident_id=incident, events=found.events))


def write_cursor(kind: str, value: str) -> str:
    return base64.urlsafe_b64encode(f"{kind}:{value}".encode()).decode().rstrip("=")


def read_cursor(cursor: str, kind: str) -> str:
    """The value of a cursor that `write_cursor` made."""
    try:
        padded = cursor.encode("ascii") + b"=" * (-len(cursor) % 4)
        found, _, value = base64.b64decode(padded, altchars=b"-_", validate=True).decode().partition(":")
    except (binascii.Error, UnicodeError):
        found, value = "", ""
    if found != kind or not value or "\x00" in value:
        raise _bad_cursor()
    return value


def _number(value: str) -> int:
    if not (value.isascii() and value.isdigit() and len(value) < 19):
        raise _bad_cursor()
    return int(value)


def _bad_cursor() -> ProblemRaised:
    return ProblemRaised(
        422, "query.cursor: not a cursor of this list", "Pass next_cursor of the page before, or none."
    )
