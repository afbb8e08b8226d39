"""REST /api/v1: the wishes of people.

A wish that others must fulfil goes out as a message on the run's control stream and comes back like
every fact; only our own facts (acknowledgements, closings, silences, pins, comments) are written here.
"""

import secrets
from collections.abc import Callable
from typing import Annotated

from fastapi import APIRouter, Path, Response

from gradloc_proto import streams
from gradloc_proto.codec import encode
from gradloc_proto.messages import Message, OverrideSet, RelocalizeRequested
from gradloc_reporter import answers as a
from gradloc_reporter.store import Session, silences, wishes
from gradloc_reporter.store.queries import Queries
from gradloc_reporter.web.api import UNKNOWN, By, Incident, Run, Seen, answered, problems
from gradloc_reporter.web.backend import Backend
from gradloc_reporter.web.problems import ProblemRaised, no_such

WISH = UNKNOWN | problems(
    on_400="The body is not JSON in UTF-8",
    on_403="The token has the scope read",
    on_503="Redis or the database does not answer",
)
SilenceId = Annotated[str, Path(pattern=r"^[^\x00/]{1,64}$", examples=["8c1f0a9be2d4c671"])]


def wishes_router(backend: Backend) -> APIRouter:
    router = APIRouter(prefix="/api/v1", tags=["wishes"])
    _add_messages(router, backend)
    _add_own_facts(router, backend)
    _add_silences(router, backend)
    return router


def _add_messages(router: APIRouter, backend: Backend) -> None:
    def send(message: Message) -> None:
        key = streams.stream(message.run_id, "control")
        backend.bus.append(key, [encode(message)], length_max=streams.STREAM_LENGTH_MAX["control"])

    @router.post("/incidents/{incident}/relocalize", status_code=202, response_model=a.RelocalizeAnswer, responses=WISH)
    def relocalize(queries: Seen, viewer: By, incident: Incident, wish: a.RelocalizeWish) -> Response:
        """Ask for another localization. The same request_id twice is one wish."""
        with backend.database.reading() as session:
            found = queries.incident(session, incident)
        if found is None:
            raise no_such("incident", incident)
        request_id = wish.request_id or secrets.token_hex(8)
        send(
            RelocalizeRequested(
                run_id=found.run_id,
                attempt=found.attempt,
                ts=backend.clock(),
                incident_id=incident,
                request_id=request_id,
                by=viewer.signed(wish.by),
            )
        )
        return answered(a.RelocalizeAnswer(incident_id=incident, request_id=request_id), 202)

    @router.post("/runs/{run}/overrides", status_code=202, response_model=a.WishAnswer, responses=WISH)
    def override(queries: Seen, viewer: By, run: Run, wish: a.Override) -> Response:
        """Set the detector's sensitivity for this run: 2 tolerates spikes twice as large; null takes it back."""
        with backend.database.reading() as session:
            found = queries.run(session, run)
        if found is None:
            raise no_such("run", run)
        request_id = wish.request_id or secrets.token_hex(8)
        send(
            OverrideSet(
                run_id=run,
                attempt=found.attempt,
                ts=backend.clock(),
                name=wish.name,
                value=wish.value,
                request_id=request_id,
                by=viewer.signed(wish.by),
            )
        )
        return answered(a.WishAnswer(run_id=run, request_id=request_id), 202)


def _add_own_facts(router: APIRouter, backend: Backend) -> None:
    def written(queries: Queries, incident: str, write: Callable[[Session], bool]) -> Response:
        with backend.database.writing() as session:
            known = queries.sees(session, incident) and write(session)
        if not known:
            raise no_such("incident", incident)
        backend.on_change()
        with backend.database.reading() as session:
            found = queries.incident(session, incident)
        assert found is not None
        return answered(a.CommentAnswer(incident_id=incident, events=found.events))

    @router.post("/incidents/{incident}/acknowledge", response_model=a.CommentAnswer, responses=WISH)
    def acknowledge_incident(queries: Seen, viewer: By, incident: Incident, wish: a.Acknowledgement) -> Response:
        """Say that somebody looks at it. The first one counts."""
        by, ts = viewer.signed(wish.by), backend.clock()
        return written(queries, incident, lambda session: wishes.acknowledge(session, incident, by=by, ts=ts))

    @router.post("/incidents/{incident}/resolve", response_model=a.CommentAnswer, responses=WISH)
    def resolve_incident(queries: Seen, viewer: By, incident: Incident, wish: a.Reasoned) -> Response:
        """Say that it is over. A later spike of the same incident opens it again."""
        by, ts = viewer.signed(wish.by), backend.clock()
        return written(
            queries, incident, lambda session: wishes.close(session, incident, by=by, reason=wish.reason, ts=ts)
        )

    @router.post("/incidents/{incident}/reopen", response_model=a.CommentAnswer, responses=WISH)
    def reopen_incident(queries: Seen, viewer: By, incident: Incident, wish: a.Reasoned) -> Response:
        """Say that it is not over after all."""
        by, ts = viewer.signed(wish.by), backend.clock()
        return written(
            queries, incident, lambda session: wishes.reopen(session, incident, by=by, reason=wish.reason, ts=ts)
        )

    @router.post("/incidents/{incident}/pin", response_model=a.CommentAnswer, responses=WISH)
    def pin_incident(queries: Seen, viewer: By, incident: Incident, wish: a.Pin) -> Response:
        """Keep the incident's snapshots whatever their age, or let them go."""
        signed, ts = viewer.signed(wish.by), backend.clock()
        by = signed if wish.pinned else None
        return written(queries, incident, lambda session: wishes.pin(session, incident, by=by, signed=signed, ts=ts))

    @router.post("/incidents/{incident}/comments", response_model=a.CommentAnswer, responses=WISH)
    def comment_incident(queries: Seen, viewer: By, incident: Incident, wish: a.Comment) -> Response:
        """Add a remark to the incident's log."""
        by, ts, key = viewer.signed(wish.by), backend.clock(), f"comment-{secrets.token_hex(16)}"
        return written(
            queries,
            incident,
            lambda session: wishes.comment(session, incident, key=key, by=by, text=wish.text, ts=ts),
        )


def _add_silences(router: APIRouter, backend: Backend) -> None:
    @router.post("/silences", status_code=201, response_model=a.SilenceAnswer, responses=WISH)
    def create_silence(viewer: By, wish: a.SilenceWish) -> Response:
        """Tell nobody of incidents that match all matchers, for some hours. They stay on the page."""
        ts = backend.clock()
        try:
            with backend.database.writing() as session:
                made = silences.create(session, wish, by=viewer.signed(wish.by), teams=viewer.teams, ts=ts)
        except silences.TooManySilences as error:
            raise ProblemRaised(503, str(error), "DELETE /api/v1/silences/{silence_id} ends one.") from None
        backend.on_change()
        return answered(made, 201)

    @router.delete("/silences/{silence_id}", response_model=a.SilenceAnswer, responses=WISH)
    def end_silence(viewer: By, silence_id: SilenceId) -> Response:
        """End a silence now. What it kept back and still goes on is told."""
        by = viewer.name or "somebody"
        with backend.database.writing() as session:
            found = silences.end(session, silence_id, by=by, teams=viewer.teams, ts=backend.clock())
        if found is None:
            raise no_such("silence", silence_id)
        backend.on_change()
        return answered(found)
