"""REST /api/v1: what is known of runs and incidents, for programs.

Reads come from the database; `wishes` are what people ask for. Cursors are plain words with a
pattern: whatever fits the pattern is answered.
"""

from hashlib import blake2b
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from pydantic import BaseModel

from gradloc_proto.identities import RUN_ID_PATTERN
from gradloc_proto.messages import Verdict
from gradloc_reporter import answers as a
from gradloc_reporter.access import Viewer
from gradloc_reporter.attribution import along
from gradloc_reporter.store import silences
from gradloc_reporter.store.queries import Queries, Wanted
from gradloc_reporter.store.summaries import incident_json
from gradloc_reporter.web.backend import Backend
from gradloc_reporter.web.gate import queries_of, viewer_of
from gradloc_reporter.web.problems import no_such

NUMBER_MAX = 2**53  # larger ones lose digits in JSON parsers
TIME_MAX = 1e11  # seconds: the year 5138
PROBLEM_CONTENT: dict[str, Any] = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}


def problems(**described: str) -> dict[int | str, dict[str, Any]]:
    return {
        int(code.removeprefix("on_")): {"description": text, "content": PROBLEM_CONTENT}
        for code, text in described.items()
    }


Run = Annotated[str, Path(pattern=RUN_ID_PATTERN, description="run_id of a run", examples=["qwen3-4b-grpo"])]
Incident = Annotated[
    str,
    Path(pattern=r"^[^\x00/]{1,512}$", description="incident_id of an incident", examples=["inc-7c1e0b7a5d1f2a33"]),
]
_BEFORE = "next_cursor of the page before"
RunCursor = Annotated[str | None, Query(pattern=RUN_ID_PATTERN, description=_BEFORE)]
IncidentCursor = Annotated[str | None, Query(pattern=r"^i[0-9]{1,18}$", description=_BEFORE)]
EntryCursor = Annotated[str | None, Query(pattern=r"^e[0-9]{1,18}$", description=_BEFORE)]
Limit = Annotated[int, Query(ge=1, le=200)]
StepNumber = Annotated[int, Query(ge=0, le=NUMBER_MAX)]
Time = Annotated[float | None, Query(ge=0, le=TIME_MAX, allow_inf_nan=False, description="seconds since 1970")]
Seen = Annotated[Queries, Depends(queries_of)]
By = Annotated[Viewer, Depends(viewer_of)]
BAD_QUERY = problems(
    on_422="A parameter is not as expected",
    on_401="A token is wanted and none known was sent",
    on_429="Too many requests; the header Retry-After says when to ask again",
)
UNKNOWN = BAD_QUERY | problems(on_404="There is no such thing")


def answered(model: BaseModel, status: int = 200) -> Response:
    """JSON in which NaN and infinities are strings: pydantic writes it, not the json module."""
    return Response(model.model_dump_json(), status, media_type="application/json")


def tagged(request: Request, body: bytes) -> Response:
    """An answer to GET with its ETag, or 304 where the asker has it already."""
    tag = f'"{blake2b(body, digest_size=12).hexdigest()}"'
    headers = {"ETag": tag, "Cache-Control": "private, no-cache"}
    known = [each.strip().removeprefix("W/") for each in request.headers.get("if-none-match", "").split(",")]
    if tag in known:
        return Response(status_code=304, headers=headers)
    return Response(body, media_type="application/json", headers=headers)


def _tagged(request: Request, model: BaseModel) -> Response:
    return tagged(request, model.model_dump_json().encode())


def api_router(backend: Backend) -> APIRouter:
    router = APIRouter(prefix="/api/v1")
    _add_run_routes(router, backend)
    _add_incident_routes(router, backend)
    _add_finding_routes(router, backend)
    _add_log_routes(router, backend)
    return router


def _add_run_routes(router: APIRouter, backend: Backend) -> None:
    @router.get("/runs", response_model=a.RunsAnswer, responses=BAD_QUERY, tags=["runs"])
    def list_runs(
        request: Request,
        queries: Seen,
        cursor: RunCursor = None,
        limit: Limit = 50,
    ) -> Response:
        """All runs, by name."""
        with backend.database.reading() as session:
            return _tagged(request, queries.runs(session, after=cursor, limit=limit))

    @router.get("/runs/{run}", response_model=a.RunAnswer, responses=UNKNOWN, tags=["runs"])
    def get_run(request: Request, queries: Seen, run: Run) -> Response:
        """One run: what it said of itself, and where it stands."""
        with backend.database.reading() as session:
            found = queries.run(session, run)
        if found is None:
            raise no_such("run", run)
        return _tagged(request, found)

    @router.get("/runs/{run}/steps", response_model=a.StepsAnswer, responses=UNKNOWN, tags=["runs"])
    def list_steps(
        request: Request,
        queries: Seen,
        run: Run,
        from_step: StepNumber = 0,
        to_step: Annotated[int | None, Query(ge=0, le=NUMBER_MAX)] = None,
        max_points: Annotated[int, Query(ge=4, le=10_000)] = 1000,
    ) -> Response:
        """The series of a run, thinned to `max_points` without losing its least and greatest norms."""
        with backend.database.reading() as session:
            if not queries.sees_run(session, run):
                raise no_such("run", run)
            found = queries.steps(session, run, first=from_step, last=to_step, max_points=max_points)
        return _tagged(request, found)

    @router.get("/runs/{run}/series", response_model=a.SeriesAnswer, responses=UNKNOWN, tags=["runs"])
    def get_series(
        request: Request,
        queries: Seen,
        run: Run,
        name: Literal["grad_norm", "limit", "loss", "reward_mean", "ratio_max", "ratio_min"] = "grad_norm",
        max_points: Annotated[int, Query(ge=4, le=10_000)] = 1000,
    ) -> Response:
        """One series as rows of step, time in milliseconds and value: for Grafana's JSON panels, step-exact."""
        with backend.database.reading() as session:
            if not queries.sees_run(session, run):
                raise no_such("run", run)
            points = queries.steps(session, run, first=0, last=None, max_points=max_points).points
        rows = tuple(
            a.SeriesRow(step=point.step, time_ms=_milliseconds(point.ts), value=getattr(point, name))
            for point in points
        )
        return _tagged(request, a.SeriesAnswer(run_id=run, name=name, rows=rows))


def _milliseconds(ts: float) -> float:
    return round(1000 * ts) if abs(ts) < TIME_MAX else ts


def _add_incident_routes(router: APIRouter, backend: Backend) -> None:
    @router.get("/incidents", response_model=a.IncidentsAnswer, responses=BAD_QUERY, tags=["incidents"])
    def list_incidents(
        request: Request,
        queries: Seen,
        run: Annotated[str | None, Query(pattern=RUN_ID_PATTERN)] = None,
        status: a.Status | None = None,
        verdict: Verdict | None = None,
        cause: Annotated[str | None, Query(pattern=r"^[^\x00]{1,512}$")] = None,
        token_id: Annotated[int | None, Query(ge=0, le=NUMBER_MAX)] = None,
        since: Time = None,
        until: Time = None,
        cursor: IncidentCursor = None,
        limit: Limit = 50,
    ) -> Response:
        """Incidents, newest first. `since` and `until` are about when they opened."""
        before = None if cursor is None else int(cursor[1:])
        wanted = Wanted(run, status, verdict, cause, token_id, since, until)
        with backend.database.rows() as connection:
            found, following = queries.incidents_json(connection, wanted, before=before, limit=limit)
        return tagged(request, incidents_body(found, following))

    @router.get("/incidents/{incident}", response_model=a.IncidentDetail, responses=UNKNOWN, tags=["incidents"])
    def get_incident(request: Request, queries: Seen, incident: Incident) -> Response:
        """Everything known of one incident: spikes, findings of all attempts, snapshots, log, words."""
        with backend.database.rows() as connection:
            found = incident_json(connection, queries, incident)
        if found is None:
            raise no_such("incident", incident)
        return tagged(request, found)


def incidents_body(found: list[bytes], following: int | None) -> bytes:
    next_cursor = b"null" if following is None else b'"i%d"' % following
    return b'{"incidents":[' + b",".join(found) + b'],"next_cursor":' + next_cursor + b"}"


def _add_finding_routes(router: APIRouter, backend: Backend) -> None:
    @router.get(
        "/incidents/{incident}/attribution", response_model=a.AttributionAnswer, responses=UNKNOWN, tags=["incidents"]
    )
    def get_attribution(
        request: Request,
        queries: Seen,
        incident: Incident,
        axis: a.Axis = "token",
        limit: Annotated[int, Query(ge=1, le=20_000)] = 200,
    ) -> Response:
        """Shares of the squared norm along one axis, the largest first; empty until something was found."""
        with backend.database.reading() as session:
            known, finding = queries.finding(session, incident)
        if not known:
            raise no_such("incident", incident)
        shares = [] if finding is None else along(finding, axis)
        return _tagged(
            request,
            a.AttributionAnswer(incident_id=incident, axis=axis, shares=tuple(shares[:limit]), num_places=len(shares)),
        )

    @router.get("/incidents/{incident}/similar", response_model=a.SimilarAnswer, responses=UNKNOWN, tags=["incidents"])
    def list_similar(
        request: Request, queries: Seen, incident: Incident, limit: Annotated[int, Query(ge=1, le=50)] = 10
    ) -> Response:
        """How often its token, data source, layer and cause were seen, and in which other incidents."""
        with backend.database.reading() as session:
            found = queries.similar(session, incident, limit=limit)
        if found is None:
            raise no_such("incident", incident)
        return _tagged(request, found)


def _add_log_routes(router: APIRouter, backend: Backend) -> None:
    @router.get("/silences", response_model=a.SilencesAnswer, responses=BAD_QUERY, tags=["silences"])
    def list_silences(viewer: By) -> Response:
        """Silences, the newest first; those that ended stay for a month."""
        with backend.database.reading() as session:
            found = silences.listed(session, teams=viewer.teams, now=backend.clock())
        return answered(a.SilencesAnswer(silences=found))

    @router.get("/audit", response_model=a.AuditAnswer, responses=BAD_QUERY, tags=["audit"])
    def list_audit(
        request: Request,
        queries: Seen,
        cursor: EntryCursor = None,
        limit: Limit = 50,
    ) -> Response:
        """Who did what, newest first."""
        before = None if cursor is None else int(cursor[1:])
        with backend.database.reading() as session:
            entries, following = queries.audit(session, before=before, limit=limit)
        next_cursor = None if following is None else f"e{following}"
        return _tagged(request, a.AuditAnswer(entries=tuple(entries), next_cursor=next_cursor))
