"""Rows into answers: everything that REST, the page, Slack and metrics read.

Knows nothing of HTTP. `hide_text` leaves out all text of prompts and answers (`--redact-tokens`).
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from sqlalchemy import ColumnElement, Connection, Integer, Select, Table, and_, bindparam, func, select, true
from sqlalchemy.orm import Session

from gradloc_proto.messages import SCHEMA_VERSION, Finding, Spike
from gradloc_reporter import answers as a
from gradloc_reporter.downsampling import kept
from gradloc_reporter.history import event_text
from gradloc_reporter.rendering import plain
from gradloc_reporter.store import fingerprints
from gradloc_reporter.store.tables import (
    EventRow,
    FindingRow,
    FingerprintRow,
    IncidentRow,
    LayerWindowRow,
    RunRow,
    SnapshotRow,
    SpikeRow,
    StepRow,
    SummaryRow,
)
from gradloc_reporter.text import Story, culprit_in_short, redacted, status_text, tell

SPIKES_TOLD_MAX = 200  # of one incident; a storm may have thousands
EVENTS_TOLD_MAX = 500
AUDITED = (
    *("acknowledged", "closed", "commented", "override_set", "pinned", "relocalize_requested", "reopened"),
    *("silence_created", "silence_ended", "snapshot_removed", "unpinned"),
)
STEPS_READ_MAX = 2_000_000  # of one run: twenty days at one step a second


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which incidents: None of a field is all of them."""

    run: str | None = None
    status: str | None = None
    verdict: str | None = None
    cause: str | None = None
    token_id: int | None = None
    since: float | None = None
    until: float | None = None

    def clauses(self) -> list[ColumnElement[bool]]:
        opened_at = IncidentRow.opened_at
        found = [
            column == value
            for column, value in (
                (IncidentRow.run_id, self.run),
                (IncidentRow.status, self.status),
                (IncidentRow.verdict, self.verdict),
                (IncidentRow.cause, self.cause),
            )
            if value is not None
        ]
        if self.token_id is not None:
            of_token = select(FingerprintRow.incident_id).where(fingerprints.of_token(self.token_id))
            found.append(IncidentRow.incident_id.in_(of_token))
        if self.since is not None:
            found.append(opened_at >= self.since)
        if self.until is not None:
            found.append(opened_at < self.until)
        return found


ALL = Wanted()

# Made once: SQLAlchemy takes longer to build these than a database to answer them.
NUMBER_MAX = 2**62
_incidents = cast(Table, IncidentRow.__table__)
_summaries = cast(Table, SummaryRow.__table__)
_LISTED = (
    select(_incidents.c.number, _summaries.c.incident_id, _summaries.c.made_by, _summaries.c.summary_json)
    .select_from(_incidents.outerjoin(_summaries, _summaries.c.number == _incidents.c.number))
    .where(_incidents.c.number < bindparam("before"))
    .order_by(_incidents.c.number.desc())
    .limit(
        bindparam("rows", type_=Integer, literal_execute=True)
    )  # a plan for an unknown number of rows reads them all
)
_WHOLE = (
    select(_summaries.c.made_by, _summaries.c.detail_json)
    .select_from(_incidents.outerjoin(_summaries, _summaries.c.number == _incidents.c.number))
    .where(_incidents.c.incident_id == bindparam("incident_id"))
)


@dataclass(frozen=True, slots=True)
class Queries:
    """Reads of one viewer: where the page is, whether text is hidden, and whose runs are seen (None: all)."""

    page_url: Callable[[str], str | None] = lambda incident_id: None
    hide_text: bool = False
    teams: frozenset[str] | None = None

    renderer: ClassVar[str] = f"3/{SCHEMA_VERSION}"  # grows when an answer changes: ready-made ones are made anew

    def _seen_run(self) -> ColumnElement[bool]:
        return true() if self.teams is None else RunRow.team.in_(sorted(self.teams))

    def _seen_incident(self) -> ColumnElement[bool]:
        return true() if self.teams is None else IncidentRow.run_id.in_(select(RunRow.run_id).where(self._seen_run()))

    # --- runs ----------------------------------------------------------------------------------

    def runs(self, session: Session, *, after: str | None, limit: int) -> a.RunsAnswer:
        """Runs by name; `after` is the last run of the page before."""
        query = select(RunRow).where(self._seen_run()).order_by(RunRow.run_id).limit(limit + 1)
        if after is not None:
            query = query.where(RunRow.run_id > after)
        rows = session.scalars(query).all()
        next_cursor = rows[limit - 1].run_id if len(rows) > limit else None
        return a.RunsAnswer(runs=self._run_answers(session, rows[:limit]), next_cursor=next_cursor)

    def newest_runs(self, session: Session, *, limit: int) -> tuple[a.RunAnswer, ...]:
        """Runs that were heard of last come first."""
        newest = func.coalesce(RunRow.last_step_at, RunRow.started_at, 0.0).desc()
        query = select(RunRow).where(self._seen_run()).order_by(newest).limit(limit)
        return self._run_answers(session, session.scalars(query).all())

    def sees_run(self, session: Session, run_id: str) -> bool:
        query = select(RunRow.run_id).where(RunRow.run_id == run_id, self._seen_run())
        return session.scalar(query) is not None

    def run(self, session: Session, run_id: str) -> a.RunAnswer | None:
        row = session.scalars(select(RunRow).where(RunRow.run_id == run_id, self._seen_run())).one_or_none()
        return None if row is None else self._run_answers(session, [row])[0]

    def _run_answers(self, session: Session, rows: Sequence[RunRow]) -> tuple[a.RunAnswer, ...]:
        names = [row.run_id for row in rows]
        counted: dict[str, dict[str, int]] = {name: {} for name in names}
        counts = (
            select(IncidentRow.run_id, IncidentRow.status, func.count())
            .where(IncidentRow.run_id.in_(names))
            .group_by(IncidentRow.run_id, IncidentRow.status)
        )
        for run_id, status, count in session.execute(counts):
            counted[run_id][status] = count
        return tuple(_run_answer(row, counted[row.run_id]) for row in rows)

    def steps(self, session: Session, run_id: str, *, first: int, last: int | None, max_points: int) -> a.StepsAnswer:
        """The run's series as it went on: of a step that was done again, the last attempt counts."""
        num_steps, chosen = _thinned(session, run_id, first, last, max_points)
        points = _points(session, run_id, chosen)
        return a.StepsAnswer(
            run_id=run_id, num_steps=num_steps, downsampled=len(chosen) < num_steps, points=tuple(points)
        )

    def recent_norms(self, session: Session, run_id: str, *, count: int) -> list[float]:
        """The newest norms, oldest first: for a sparkline."""
        query = (
            select(StepRow.grad_norm)
            .where(StepRow.run_id == run_id)
            .order_by(StepRow.attempt.desc(), StepRow.step.desc())
            .limit(count)
        )
        return list(session.scalars(query))[::-1]

    def gaps(self, session: Session, run_id: str) -> tuple[a.EventAnswer, ...]:
        query = (
            select(EventRow)
            .where(EventRow.run_id == run_id, EventRow.kind == "stream_gap_noticed")
            .order_by(EventRow.number.desc())
            .limit(EVENTS_TOLD_MAX)
        )
        return tuple(_event_answer(row) for row in session.scalars(query))

    def run_spikes(self, session: Session, run_id: str) -> list[tuple[str, Spike]]:
        """The newest spikes of a run, each with its incident."""
        query = (
            select(SpikeRow)
            .where(SpikeRow.run_id == run_id)
            .order_by(SpikeRow.attempt.desc(), SpikeRow.step.desc())
            .limit(SPIKES_TOLD_MAX)
        )
        return [(row.incident_id, Spike.model_validate_json(row.spike_json)) for row in session.scalars(query)]

    # --- incidents -----------------------------------------------------------------------------

    def incidents(
        self, session: Session, wanted: Wanted = ALL, *, before: int | None = None, limit: int
    ) -> tuple[tuple[a.IncidentAnswer, ...], int | None]:
        """Newest first; with the number to go on before, None on the last page."""
        told, following = self.incidents_json(session.connection(), wanted, before=before, limit=limit)
        return tuple(a.IncidentAnswer.model_validate_json(each) for each in told), following

    def incidents_json(
        self, connection: Connection, wanted: Wanted = ALL, *, before: int | None = None, limit: int
    ) -> tuple[list[bytes], int | None]:
        """The same, each incident as ready-made JSON."""
        query, values = _LISTED, {"before": NUMBER_MAX if before is None else before, "rows": limit + 1}
        if wanted != ALL or self.teams is not None:
            query = query.where(*wanted.clauses())
        if self.teams is not None:
            query = query.where(self._seen_incident())
        rows = connection.execute(query, values).all()
        shown = rows[:limit]
        if self.hide_text or any(row[2] != self.renderer for row in shown):
            with Session(connection) as session:
                remade = self._summaries_afresh(session, {row[0] for row in shown})
            told = [remade[row[0]] for row in shown]
        else:
            told = [self.linked(row[1], row[3].encode()) for row in shown]
        return told, shown[-1][0] if len(rows) > limit else None

    def linked(self, incident_id: str, answer: bytes) -> bytes:
        return b'{"url":' + json.dumps(self.page_url(incident_id)).encode() + b"," + answer[1:]

    def _summaries_afresh(self, session: Session, numbers: set[int]) -> dict[int, bytes]:
        if not numbers:
            return {}
        rows = session.scalars(select(IncidentRow).where(IncidentRow.number.in_(numbers))).all()
        newest = self._newest_attempts(session, rows)
        return {
            row.number: self.incident_answer(row, newest.get(row.incident_id)).model_dump_json().encode()
            for row in rows
        }

    def ready_made(self, connection: Connection, incident_id: str) -> tuple[bytes, bool] | None:
        """The stored whole answer and whether it may be used as it is; None for no such incident."""
        query = _WHOLE if self.teams is None else _WHOLE.where(self._seen_incident())
        row = connection.execute(query, {"incident_id": incident_id}).one_or_none()
        if row is None:
            return None
        fits = row[0] == self.renderer and not self.hide_text
        return (row[1].encode() if fits else b"", fits)

    def changed_since(
        self, session: Session, made_at: float, *, limit: int
    ) -> list[tuple[str, str, str | None, int, float]]:
        """(incident, run, team, revision, when) of answers made since then, by the reporter's clock."""
        query = (
            select(SummaryRow.incident_id, IncidentRow.run_id, RunRow.team, IncidentRow.revision, SummaryRow.made_at)
            .join(IncidentRow, IncidentRow.number == SummaryRow.number)
            .outerjoin(RunRow, RunRow.run_id == IncidentRow.run_id)
            .where(SummaryRow.made_at >= made_at)
            .order_by(SummaryRow.made_at)
            .limit(limit)
        )
        return [tuple(row) for row in session.execute(query)]  # type: ignore[misc]

    def summaries_of(self, session: Session, incident_ids: Sequence[str]) -> dict[str, bytes]:
        """The answers of these incidents as in the list."""
        query = select(IncidentRow.number, IncidentRow.incident_id).where(IncidentRow.incident_id.in_(incident_ids))
        names = {row[0]: row[1] for row in session.execute(query)}
        afresh = self._summaries_afresh(session, set(names)) if self.hide_text else {}
        if self.hide_text:
            return {names[number]: answer for number, answer in afresh.items()}
        ready = select(SummaryRow.incident_id, SummaryRow.summary_json).where(SummaryRow.number.in_(names))
        return {name: self.linked(name, text.encode()) for name, text in session.execute(ready)}

    def live_runs(self, session: Session, *, limit: int) -> list[RunRow]:
        """Runs that go on, those heard of last first."""
        goes_on = RunRow.ended_attempt.is_(None) | (RunRow.ended_attempt < RunRow.attempt)
        newest = func.coalesce(RunRow.last_step_at, RunRow.started_at, 0.0).desc()
        return list(session.scalars(select(RunRow).where(goes_on).order_by(newest).limit(limit)))

    # --- what comes back -----------------------------------------------------------------------

    def similar(self, session: Session, incident_id: str, *, limit: int = 10) -> a.SimilarAnswer | None:
        """How often this was seen before, and where; None for an unknown incident."""
        query = select(IncidentRow).where(IncidentRow.incident_id == incident_id, self._seen_incident())
        row = session.scalars(query).one_or_none()
        if row is None:
            return None
        seen = self._seen_incident()
        shared = fingerprints.similar(session, incident_id, seen, limit=limit)
        afresh = self._summaries_afresh(session, {number for number, _ in shared})
        return a.SimilarAnswer(
            incident_id=incident_id,
            came_back_after=fingerprints.came_back_after(session, row, seen),
            fingerprints=tuple(
                a.FingerprintAnswer(
                    kind=each.kind,
                    value=each.value.partition(":")[0] if each.kind == "token" else each.value,
                    num_incidents=each.num_incidents,
                    num_runs=each.num_runs,
                    first_seen=each.first_seen,
                )
                for each in fingerprints.returns(session, incident_id, seen)
            ),
            incidents=tuple(
                a.SimilarIncident(shared=kinds, incident=a.IncidentAnswer.model_validate_json(afresh[number]))
                for number, kinds in shared
            ),
        )

    def finding(self, session: Session, incident_id: str) -> tuple[bool, Finding | None]:
        """Whether this viewer knows the incident, and what was found."""
        query = select(IncidentRow.finding_json).where(IncidentRow.incident_id == incident_id, self._seen_incident())
        row = session.execute(query).one_or_none()
        return (False, None) if row is None else (True, self._finding(row[0]))

    def audit(self, session: Session, *, before: int | None, limit: int) -> tuple[list[a.AuditEntry], int | None]:
        """What people did, newest first. What no run names is seen by those who see every run."""
        query = select(EventRow).where(EventRow.kind.in_(AUDITED)).order_by(EventRow.number.desc()).limit(limit + 1)
        if self.teams is not None:
            query = query.where(EventRow.run_id.in_(select(RunRow.run_id).where(self._seen_run())))
        if before is not None:
            query = query.where(EventRow.number < before)
        rows = session.scalars(query).all()
        shown = rows[:limit]
        entries = [
            a.AuditEntry(
                ts=row.ts,
                kind=row.kind,
                run_id=row.run_id or None,
                incident_id=row.incident_id,
                text=event_text(row.kind, json.loads(row.detail_json)),
            )
            for row in shown
        ]
        return entries, shown[-1].number if len(rows) > limit else None

    def layer_windows(self, session: Session, run_id: str) -> list[tuple[int, int, dict[str, float]]]:
        """(first step, number of steps, greatest norm of each layer), by step."""
        query = select(LayerWindowRow).where(LayerWindowRow.run_id == run_id).order_by(LayerWindowRow.first_step)
        return [
            (row.first_step, row.width, {name: float(value) for name, value in json.loads(row.norms_json).items()})
            for row in session.scalars(query)
        ]

    def sees(self, session: Session, incident_id: str) -> bool:
        """Whether there is such an incident for this viewer."""
        query = select(IncidentRow.number).where(IncidentRow.incident_id == incident_id, self._seen_incident())
        return session.scalar(query) is not None

    def incident(self, session: Session, incident_id: str) -> a.IncidentDetail | None:
        query = select(IncidentRow).where(IncidentRow.incident_id == incident_id, self._seen_incident())
        row = session.scalars(query).one_or_none()
        if row is None:
            return None
        findings = session.scalars(
            select(FindingRow)
            .where(FindingRow.incident_id == incident_id)
            .order_by(FindingRow.localization_attempt.desc())
        ).all()
        newest = next((each for each in findings if each.localization_attempt == row.localization_attempt), None)
        story = self.story_of(row, newest)
        return a.IncidentDetail(
            **dict(self.incident_answer(row, newest)),
            text=plain(tell(story, with_link=False)),
            finding=story.finding,
            findings=tuple(self._finding_answer(each) for each in findings),
            spikes=tuple(_spike_answer(each) for each in spike_rows_of(session, incident_id)),
            snapshots=snapshots_of(session, incident_id),
            events=events_of(session, incident_id),
        )

    def story(self, session: Session, incident_id: str) -> Story | None:
        """What the words need; None for an unknown incident."""
        row = session.scalars(select(IncidentRow).where(IncidentRow.incident_id == incident_id)).one_or_none()
        if row is None:
            return None
        return self.story_of(row, self._newest_attempts(session, [row]).get(incident_id))

    def _newest_attempts(self, session: Session, rows: Sequence[IncidentRow]) -> dict[str, FindingRow]:
        query = (
            select(FindingRow)
            .join(
                IncidentRow,
                and_(
                    IncidentRow.incident_id == FindingRow.incident_id,
                    IncidentRow.localization_attempt == FindingRow.localization_attempt,
                ),
            )
            .where(FindingRow.incident_id.in_([row.incident_id for row in rows]))
        )
        return {row.incident_id: row for row in session.scalars(query)}

    def story_of(self, row: IncidentRow, newest: FindingRow | None) -> Story:
        spike = None if row.worst_spike_json is None else Spike.model_validate_json(row.worst_spike_json)
        failed = newest is not None and newest.state == "failed"
        reopened_at = -math.inf if row.reopened_at is None else row.reopened_at
        by_detector = row.resolved_at is not None and row.resolved_at > reopened_at
        return Story(
            run_id=row.run_id,
            incident_id=row.incident_id,
            status=row.status,
            spike=spike,
            num_spikes=row.num_spikes,
            finding=self._finding(row.finding_json),
            localization_attempt=row.localization_attempt,
            finding_attempt=row.finding_attempt,
            localizing=newest is not None and newest.state in ("queued", "running"),
            stage=None if newest is None else newest.stage,
            fraction=None if newest is None else newest.fraction,
            failure=(newest.reason or "no reason given") if newest is not None and failed else None,
            retryable=bool(newest is not None and newest.retryable),
            resolved_step=row.resolved_step if by_detector else None,
            resolved_reason=row.resolved_reason if by_detector else None,
            closed_by=None if by_detector or row.status != "resolved" else row.closed_by,
            acknowledged_by=row.acknowledged_by,
            opened_at=row.opened_at,
            url=self.page_url(row.incident_id),
        )

    def _finding(self, text: str | None) -> Finding | None:
        if text is None:
            return None
        finding = Finding.model_validate_json(text)
        return redacted(finding) if self.hide_text else finding

    def incident_answer(self, row: IncidentRow, newest: FindingRow | None) -> a.IncidentAnswer:
        story = self.story_of(row, newest)
        telling = tell(story)
        spike = story.spike
        return a.IncidentAnswer.model_validate(
            {
                "incident_id": row.incident_id,
                "run_id": row.run_id,
                "attempt": row.attempt,
                "status": row.status,
                "status_text": status_text(story),
                "verdict": row.verdict,
                "cause": row.cause,
                "culprit": culprit_in_short(story.finding),
                "headline": f"{telling.headline} · {telling.figures}" if telling.figures else telling.headline,
                "opened_at": row.opened_at,
                "updated_at": row.updated_at,
                "resolved_at": over_at(row),
                "first_step": row.first_step,
                "last_step": row.last_step,
                "step": None if spike is None else spike.step,
                "num_spikes": row.num_spikes,
                "grad_norm": None if spike is None else spike.grad_norm,
                "healthy_norm": None if spike is None else spike.healthy_norm,
                "limit": None if spike is None else spike.limit,
                "localization_attempt": row.localization_attempt,
                "acknowledged_by": row.acknowledged_by,
                "pinned_by": row.pinned_by,
                "url": self.page_url(row.incident_id),
            }
        )

    def _finding_answer(self, row: FindingRow) -> a.FindingAnswer:
        return a.FindingAnswer.model_validate(
            {
                "localization_attempt": row.localization_attempt,
                "state": row.state,
                "started_at": row.started_at,
                "ended_at": row.ended_at,
                "stage": row.stage,
                "fraction": row.fraction,
                "reason": row.reason,
                "finding": self._finding(row.finding_json),
            }
        )


def over_at(row: IncidentRow) -> float | None:
    """Since when an incident is over; None while it is not."""
    if row.status != "resolved":
        return None
    return min(at for at in (row.resolved_at, row.closed_at) if at is not None)


def _run_answer(row: RunRow, counted: dict[str, int]) -> a.RunAnswer:
    ended = row.ended_attempt is not None and row.ended_attempt >= row.attempt
    return a.RunAnswer(
        run_id=row.run_id,
        attempt=row.attempt,
        status="ended" if ended else "running",
        framework=row.framework,
        world_size=row.world_size,
        model=row.model,
        num_parameters=row.num_parameters,
        labels=json.loads(row.labels_json),
        started_at=row.started_at,
        ended_at=row.ended_at if ended else None,
        end_reason=row.end_reason if ended else None,
        last_step=row.last_step,
        last_step_at=row.last_step_at,
        grad_norm=row.last_norm,
        healthy_norm=row.healthy_norm,
        limit=row.norm_limit if row.norm_limit is not None else row.last_limit,
        num_events_dropped=row.num_events_dropped,
        num_incidents=sum(counted.values()),
        num_incidents_open=sum(count for status, count in counted.items() if status != "resolved"),
    )


def _thinned(
    session: Session, run_id: str, first: int, last: int | None, max_points: int
) -> tuple[int, list[tuple[int, int]]]:
    """How many steps there are, and (attempt, step) of those to show."""
    inside = [_steps.c.run_id == run_id, _steps.c.step >= first]
    if last is not None:
        inside.append(_steps.c.step <= last)
    attempts = session.execute(
        select(func.min(StepRow.attempt), func.max(StepRow.attempt)).where(StepRow.run_id == run_id)
    ).one()
    query = select(_steps.c.attempt, _steps.c.step, _steps.c.grad_norm).where(*inside)
    query = query.order_by(_steps.c.attempt, _steps.c.step).limit(STEPS_READ_MAX)
    if attempts[0] == attempts[1]:
        steps, norms = _columns(session, query.with_only_columns(_steps.c.step, _steps.c.grad_norm), 2)
        return len(steps), [(attempts[0], steps[index]) for index in kept(_numbers(norms), max_points)]
    series = _without_superseded(list(zip(*_columns(session, query, 3), strict=True)))
    chosen = kept(_numbers([value for _, _, value in series]), max_points)
    return len(series), [(series[index][0], series[index][1]) for index in chosen]


_steps = cast(Table, StepRow.__table__)


def _columns(session: Session, query: Select[Any], count: int) -> list[Sequence[Any]]:
    """Columns as the driver gives them: a hundred thousand values go through no type's and no row's Python code."""
    result = session.connection().execute(query)
    assert result.cursor is not None
    rows = result.cursor.fetchall()
    result.close()
    return [[row[index] for row in rows] for index in range(count)]


def _numbers(values: Sequence[float | str]) -> Sequence[float]:
    """SQLite keeps NaN as a text."""
    try:
        math.fsum(values)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return [float(value) for value in values]
    return values  # type: ignore[return-value]


def _without_superseded(series: list[tuple[int, int, float]]) -> list[tuple[int, int, float]]:
    """Steps that a later attempt did again from its first step on are history that did not count."""
    first_of: dict[int, int] = {}
    for attempt, step, _ in series:
        first_of.setdefault(attempt, step)
    if len(first_of) < 2:
        return series
    attempts = sorted(first_of)
    end_of = {
        attempt: min((first_of[later] for later in attempts if later > attempt), default=None) for attempt in attempts
    }
    live = [item for item in series if (end := end_of[item[0]]) is None or item[1] < end]
    return sorted(live, key=lambda item: item[1])


def _points(session: Session, run_id: str, wanted: list[tuple[int, int]]) -> list[a.StepPoint]:
    if not wanted:
        return []
    keys = set(wanted)
    steps = [step for _, step in wanted]
    found: list[tuple[Any, ...]] = []
    size = 500  # names in one IN list that every database takes
    columns: list[Any] = [StepRow.step, StepRow.attempt, StepRow.ts, StepRow.grad_norm, StepRow.limit, StepRow.loss]
    columns += [StepRow.reward_mean, StepRow.ratio_max, StepRow.ratio_min, StepRow.decision, StepRow.rules_hit]
    query = select(*columns).where(StepRow.run_id == run_id)
    attempts = sorted({attempt for attempt, _ in wanted})
    for start in range(0, len(steps), size):
        chunk = StepRow.step.in_(steps[start : start + size])
        found += [tuple(row) for row in session.execute(query.where(StepRow.attempt.in_(attempts), chunk))]
    rows = sorted((row for row in found if (row[1], row[0]) in keys), key=lambda row: row[0])
    return [
        a.StepPoint.model_construct(
            **dict(zip(_POINT, row[:10], strict=True)), rules_hit=tuple(filter(None, row[10].split(",")))
        )
        for row in rows
    ]


_POINT = (
    *("step", "attempt", "ts", "grad_norm", "limit", "loss", "reward_mean", "ratio_max", "ratio_min", "decision"),
)


def spike_rows_of(session: Session, incident_id: str) -> list[SpikeRow]:
    """The newest spikes of an incident, by step."""
    query = (
        select(SpikeRow)
        .where(SpikeRow.incident_id == incident_id)
        .order_by(SpikeRow.attempt.desc(), SpikeRow.step.desc(), SpikeRow.spike_id)
        .limit(SPIKES_TOLD_MAX)
    )
    return list(session.scalars(query))[::-1]


def _spike_answer(row: SpikeRow) -> a.SpikeAnswer:
    return a.SpikeAnswer(ts=row.ts, attempt=row.attempt, spike=Spike.model_validate_json(row.spike_json))


def snapshots_of(session: Session, incident_id: str) -> tuple[a.SnapshotAnswer, ...]:
    query = (
        select(SnapshotRow)
        .join(
            SpikeRow,
            and_(
                SpikeRow.run_id == SnapshotRow.run_id,
                SpikeRow.attempt == SnapshotRow.attempt,
                SpikeRow.step == SnapshotRow.step,
            ),
        )
        .where(SpikeRow.incident_id == incident_id)
        .order_by(SnapshotRow.ts, SnapshotRow.message_key)
        .distinct()
        .limit(SPIKES_TOLD_MAX)
    )
    return tuple(
        a.SnapshotAnswer(
            step=row.step,
            attempt=row.attempt,
            ts=row.ts,
            path=row.path,
            num_bytes=row.num_bytes,
            weights=row.weights,
            failure=row.failure,
            removed_at=row.removed_at,
        )
        for row in session.scalars(query)
    )


def events_of(session: Session, incident_id: str) -> tuple[a.EventAnswer, ...]:
    query = (
        select(EventRow)
        .where(EventRow.incident_id == incident_id)
        .order_by(EventRow.ts.desc(), EventRow.message_key.desc())
        .limit(EVENTS_TOLD_MAX)
    )
    return tuple(_event_answer(row) for row in session.scalars(query).all()[::-1])


def _event_answer(row: EventRow) -> a.EventAnswer:
    return a.EventAnswer(ts=row.ts, kind=row.kind, text=event_text(row.kind, json.loads(row.detail_json)))
