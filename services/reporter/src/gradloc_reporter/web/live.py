"""Server-sent events: what has changed, as it changes, to many listeners at the cost of one.

One task a process looks into the database (at once when this process wrote something, each POLL_S
anyway: another replica may have) and hands what is new to every listener that may see it. A listener
that does not read is told to ask again for everything, and costs a bounded queue.

    event: incident   data: the incident as in the list
    event: step       data: {"run_id", "attempt", "step", "ts", "grad_norm", "limit"}, the newest of a run
    event: reset      data: {}: something was left out, ask again
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from sse_starlette.event import ServerSentEvent
from sse_starlette.sse import EventSourceResponse

from gradloc_proto.identities import RUN_ID_PATTERN
from gradloc_reporter.access import Viewer
from gradloc_reporter.store import DBAPIError
from gradloc_reporter.store.summaries import wire
from gradloc_reporter.web.backend import Backend
from gradloc_reporter.web.gate import viewer_of
from gradloc_reporter.web.problems import ProblemRaised

log = logging.getLogger(__name__)

LISTENERS_MAX = 1_000  # each holds a socket and a queue
QUEUE_MAX = 200  # events a listener may be behind
POLL_S = 1.0
TOGETHER_S = 0.2  # what happens within this is looked up together: a storm is a few reads a second
OVERLAP_S = 10.0  # answers are looked at again this long: a transaction may be committed late
CHANGES_MAX, RUNS_MAX = 500, 500
PING_S = 15


@dataclass(frozen=True, slots=True)
class Event:
    kind: str
    run_id: str
    incident_id: str | None
    team: str | None
    data: str


@dataclass(eq=False, slots=True)
class Listener:
    teams: frozenset[str] | None
    run: str | None
    incident: str | None
    queue: asyncio.Queue[Event | None] = field(default_factory=lambda: asyncio.Queue(QUEUE_MAX))

    def hears(self, event: Event) -> bool:
        return (
            (self.teams is None or event.team in self.teams)
            and (self.run is None or event.run_id == self.run)
            and (self.incident is None or event.incident_id == self.incident)
        )


class Live:
    """`poke` and `close` may be called from any thread, everything else from the server's loop."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._listeners: set[Listener] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._news: asyncio.Event | None = None
        self._task: asyncio.Task[None] | None = None
        self._closing = False
        self._since = 0.0
        self._revisions: dict[str, int] = {}  # of the incidents within the overlap
        self._steps: dict[str, tuple[int, int | None]] = {}

    @property
    def num_listeners(self) -> int:
        return len(self._listeners)

    def poke(self) -> None:
        if self._listeners and self._loop is not None and self._news is not None:
            self._loop.call_soon_threadsafe(self._news.set)

    def close(self) -> None:
        self._closing = True
        if self._loop is not None and self._loop.is_running():
            self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        for listener in self._listeners:
            _put(listener, None)
        if self._task is not None:
            self._task.cancel()

    async def listen(self, listener: Listener) -> AsyncIterator[ServerSentEvent]:
        """What the listener hears, until it leaves or the reporter ends."""
        await self._begin()
        self._listeners.add(listener)
        try:
            yield ServerSentEvent(event="hello", data="{}", retry=2_000)
            while not self._closing:
                event = await listener.queue.get()
                if event is None:
                    return
                yield ServerSentEvent(event=event.kind, data=event.data)
        finally:
            self._listeners.discard(listener)

    async def _begin(self) -> None:
        if self._task is not None and not self._task.done():
            return
        self._loop, self._news = asyncio.get_running_loop(), asyncio.Event()
        self._since = self._backend.clock() - OVERLAP_S
        self._task = self._loop.create_task(self._watch())
        await self._look(first=True)

    async def _watch(self) -> None:
        assert self._news is not None
        while self._listeners or not self._closing:
            try:
                await asyncio.wait_for(self._news.wait(), POLL_S)
                await asyncio.sleep(TOGETHER_S)
            except TimeoutError:
                pass
            self._news.clear()
            if self._listeners:
                await self._look(first=False)

    async def _look(self, *, first: bool) -> None:
        try:
            events = await asyncio.to_thread(self._changes)
        except DBAPIError as error:
            log.warning("live views: the database does not answer: %s", type(error).__name__)
            return
        except Exception:  # one answer that cannot be made must not end everybody's view
            log.exception("live views: looking for changes failed; trying again")
            return
        for event in () if first else events:
            for listener in self._listeners:
                if listener.hears(event):
                    _put(listener, event)

    def _changes(self) -> list[Event]:
        queries = self._backend.queries
        events = []
        with self._backend.database.reading() as session:
            changed = queries.changed_since(session, self._since - OVERLAP_S, limit=CHANGES_MAX)
            new = [row for row in changed if self._revisions.get(row[0]) != row[3]]
            answers = queries.summaries_of(session, [row[0] for row in new])
            before, self._steps = self._steps, {}  # of runs that go on, and no longer
            for run in queries.live_runs(session, limit=RUNS_MAX):
                seen = (run.last_attempt, run.last_step)
                if run.last_step is not None and before.get(run.run_id) != seen:
                    events.append(Event("step", run.run_id, None, run.team, _step(run)))
                self._steps[run.run_id] = seen
        for incident_id, run_id, team, _, made_at in new:
            if incident_id in answers:
                events.append(Event("incident", run_id, incident_id, team, answers[incident_id].decode()))
            self._since = max(self._since, made_at)
        self._revisions = {row[0]: row[3] for row in changed}
        if len(changed) == CHANGES_MAX:
            self._since = changed[-1][4] + OVERLAP_S
        return events


def _step(run: Any) -> str:
    return json.dumps(
        {
            "run_id": run.run_id,
            "attempt": run.last_attempt,
            "step": run.last_step,
            "ts": wire(run.last_step_at),
            "grad_norm": wire(run.last_norm),
            "limit": wire(run.norm_limit if run.norm_limit is not None else run.last_limit),
        }
    )


def _put(listener: Listener, event: Event | None) -> None:
    queue = listener.queue
    if queue.full():
        while not queue.empty():
            queue.get_nowait()
        queue.put_nowait(Event("reset", "", None, None, "{}"))
    queue.put_nowait(event)


def live_router(live: Live) -> APIRouter:
    """Not in the OpenAPI document: it cannot say what a stream without end is."""
    router = APIRouter(include_in_schema=False)

    @router.get("/api/v1/live")
    async def listen(
        request: Request,
        viewer: Annotated[Viewer, Depends(viewer_of)],
        run: Annotated[str | None, Query(pattern=RUN_ID_PATTERN)] = None,
        incident: Annotated[str | None, Query(max_length=512)] = None,
    ) -> EventSourceResponse:
        if live.num_listeners >= LISTENERS_MAX:
            raise ProblemRaised(
                503, f"there are {LISTENERS_MAX} live views already", "Close one, or poll.", {"Retry-After": "30"}
            )
        return EventSourceResponse(live.listen(Listener(viewer.teams, run, incident)), ping=PING_S)

    return router
