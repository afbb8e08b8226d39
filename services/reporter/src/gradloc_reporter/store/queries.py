"""Rows into answers: everything that REST, the page, Slack and metrics read.

Knows nothing of HTTP. `hide_text` leaves out all text of prompts and answers (`--redact-tokens`).
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, and_, func, select, true
from sqlalchemy.orm import Session

from gradloc_proto.messages import Finding, Spike
from gradloc_reporter import answers as a
from gradloc_reporter.downsampling import kept
from gradloc_reporter.history import event_text
from gradloc_reporter.store.tables import (
    EventRow,
    FindingRow,
    IncidentRow,
    RunRow,
    SnapshotRow,
    SpikeRow,
    StepRow,
)
from gradloc_reporter.text import Story, culprit_in_short, plain, redacted, status_text, tell

SPIKES_TOLD_MAX = 200  # of one incident; a storm may have thousands
EVENTS_TOLD_MAX = 500
STEPS_READ_MAX = 2_000_000  # of one run: twenty days at one step a second


@dataclass(frozen=True, slots=True)
class Queries:
    """Reads of one viewer: where the page is, whether text is hidden, and whose runs are seen (None: all)."""

    page_url: Callable[[str], str | None] = lambda incident_id: None
    hide_text: bool = False
    teams: frozenset[str] | None = None

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
        query = (
            select(StepRow.attempt, StepRow.step, StepRow.grad_norm)
            .where(StepRow.run_id == run_id, StepRow.step >= first)
            .order_by(StepRow.attempt, StepRow.step)
            .limit(STEPS_READ_MAX)
        )
        if last is not None:
            query = query.where(StepRow.step <= last)
        series = _without_superseded([(row.attempt, row.step, row.grad_norm) for row in session.execute(query)])
        chosen = [series[index] for index in kept([norm for _, _, norm in series], max_points)]
        points = _points(session, run_id, [(attempt, step) for attempt, step, _ in chosen])
        return a.StepsAnswer(
            run_id=run_id, num_steps=len(series), downsampled=len(chosen) < len(series), points=tuple(points)
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
        self,
        session: Session,
        *,
        run: str | None = None,
        status: str | None = None,
        verdict: str | None = None,
        before: int | None = None,
        limit: int,
    ) -> tuple[tuple[a.IncidentAnswer, ...], int | None]:
        """Newest first; with the number to go on before, None on the last page."""
        query = select(IncidentRow).where(self._seen_incident()).order_by(IncidentRow.number.desc()).limit(limit + 1)
        for column, wanted in (
            (IncidentRow.run_id, run),
            (IncidentRow.status, status),
            (IncidentRow.verdict, verdict),
        ):
            if wanted is not None:
                query = query.where(column == wanted)
        if before is not None:
            query = query.where(IncidentRow.number < before)
        rows = session.scalars(query).all()
        shown = rows[:limit]
        newest = self._newest_attempts(session, shown)
        told = tuple(self._incident_answer(row, newest.get(row.incident_id)) for row in shown)
        return told, shown[-1].number if len(rows) > limit else None

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
        story = self._story(row, newest)
        return a.IncidentDetail(
            **dict(self._incident_answer(row, newest)),
            text=plain(tell(story)),
            finding=story.finding,
            findings=tuple(self._finding_answer(each) for each in findings),
            spikes=_spikes(session, incident_id),
            snapshots=_snapshots(session, incident_id),
            events=_events(session, incident_id),
        )

    def story(self, session: Session, incident_id: str) -> Story | None:
        """What the words need; None for an unknown incident."""
        row = session.scalars(select(IncidentRow).where(IncidentRow.incident_id == incident_id)).one_or_none()
        if row is None:
            return None
        return self._story(row, self._newest_attempts(session, [row]).get(incident_id))

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

    def _story(self, row: IncidentRow, newest: FindingRow | None) -> Story:
        spike = None if row.worst_spike_json is None else Spike.model_validate_json(row.worst_spike_json)
        failed = newest is not None and newest.state == "failed"
        return Story(
            run_id=row.run_id,
            incident_id=row.incident_id,
            status=row.status,
            spike=spike,
            num_spikes=row.num_spikes,
            finding=self._finding(row.finding_json),
            localization_attempt=row.localization_attempt,
            localizing=newest is not None and newest.state in ("queued", "running"),
            stage=None if newest is None else newest.stage,
            fraction=None if newest is None else newest.fraction,
            failure=(newest.reason or "no reason given") if newest is not None and failed else None,
            retryable=bool(newest is not None and newest.retryable),
            resolved_step=row.resolved_step,
            resolved_reason=row.resolved_reason,
            acknowledged_by=row.acknowledged_by,
            url=self.page_url(row.incident_id),
        )

    def _finding(self, text: str | None) -> Finding | None:
        if text is None:
            return None
        finding = Finding.model_validate_json(text)
        return redacted(finding) if self.hide_text else finding

    def _incident_answer(self, row: IncidentRow, newest: FindingRow | None) -> a.IncidentAnswer:
        story = self._story(row, newest)
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
                "resolved_at": row.resolved_at,
                "first_step": row.first_step,
                "last_step": row.last_step,
                "step": None if spike is None else spike.step,
                "num_spikes": row.num_spikes,
                "grad_norm": None if spike is None else spike.grad_norm,
                "healthy_norm": None if spike is None else spike.healthy_norm,
                "limit": None if spike is None else spike.limit,
                "localization_attempt": row.localization_attempt,
                "acknowledged_by": row.acknowledged_by,
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
    rows: list[StepRow] = []
    size = 500  # names in one IN list that every database takes
    for start in range(0, len(steps), size):
        chunk = steps[start : start + size]
        rows += session.scalars(select(StepRow).where(StepRow.run_id == run_id, StepRow.step.in_(chunk)))
    found = [row for row in rows if (row.attempt, row.step) in keys]
    return [
        a.StepPoint(
            step=row.step,
            attempt=row.attempt,
            ts=row.ts,
            grad_norm=row.grad_norm,
            limit=row.limit,
            loss=row.loss,
            reward_mean=row.reward_mean,
            ratio_max=row.ratio_max,
            decision=row.decision,
            rules_hit=tuple(filter(None, row.rules_hit.split(","))),
        )
        for row in sorted(found, key=lambda row: row.step)
    ]


def _spikes(session: Session, incident_id: str) -> tuple[a.SpikeAnswer, ...]:
    query = (
        select(SpikeRow)
        .where(SpikeRow.incident_id == incident_id)
        .order_by(SpikeRow.attempt.desc(), SpikeRow.step.desc())
        .limit(SPIKES_TOLD_MAX)
    )
    rows = session.scalars(query).all()[::-1]
    return tuple(
        a.SpikeAnswer(ts=row.ts, attempt=row.attempt, spike=Spike.model_validate_json(row.spike_json)) for row in rows
    )


def _snapshots(session: Session, incident_id: str) -> tuple[a.SnapshotAnswer, ...]:
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
        .order_by(SnapshotRow.ts)
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
        )
        for row in session.scalars(query)
    )


def _events(session: Session, incident_id: str) -> tuple[a.EventAnswer, ...]:
    query = (
        select(EventRow)
        .where(EventRow.incident_id == incident_id)
        .order_by(EventRow.ts.desc(), EventRow.number.desc())
        .limit(EVENTS_TOLD_MAX)
    )
    return tuple(_event_answer(row) for row in session.scalars(query).all()[::-1])


def _event_answer(row: EventRow) -> a.EventAnswer:
    return a.EventAnswer(ts=row.ts, kind=row.kind, text=event_text(row.kind, json.loads(row.detail_json)))
