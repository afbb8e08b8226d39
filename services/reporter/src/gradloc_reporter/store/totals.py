"""Counts and last values over the whole database, for metrics."""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import func, or_, select
from sqlalchemy.orm import Session

from gradloc_reporter.store.tables import FindingRow, IncidentRow, RunRow

RUNS_MAX = 500  # series of more runs than these would hurt Prometheus; the newest are kept
ENDED_KEPT_S = 3600.0  # series of ended runs expire after an hour


@dataclass(frozen=True, slots=True)
class RunTotals:
    run_id: str
    step: int | None
    grad_norm: float | None
    limit: float | None
    healthy_norm: float | None
    num_events_dropped: int
    num_incidents: int
    num_incidents_open: int
    num_spikes: int


def run_totals(session: Session, now: float) -> list[RunTotals]:
    """Runs that go on or ended lately."""
    recent = or_(
        RunRow.ended_attempt.is_(None), RunRow.ended_attempt < RunRow.attempt, RunRow.ended_at > now - ENDED_KEPT_S
    )
    newest = func.coalesce(RunRow.last_step_at, RunRow.started_at, 0.0).desc()
    runs = session.scalars(select(RunRow).where(recent).order_by(newest).limit(RUNS_MAX)).all()
    counts = _incident_counts(session, [run.run_id for run in runs])
    return [
        RunTotals(
            run_id=run.run_id,
            step=run.last_step,
            grad_norm=run.last_norm,
            limit=run.norm_limit,
            healthy_norm=run.healthy_norm,
            num_events_dropped=run.num_events_dropped,
            num_incidents=counts.get(run.run_id, (0, 0, 0))[0],
            num_incidents_open=counts.get(run.run_id, (0, 0, 0))[1],
            num_spikes=counts.get(run.run_id, (0, 0, 0))[2],
        )
        for run in runs
    ]


def _incident_counts(session: Session, run_ids: Sequence[str]) -> dict[str, tuple[int, int, int]]:
    query = (
        select(
            IncidentRow.run_id,
            func.count(),
            func.count().filter(IncidentRow.status != "resolved"),
            func.coalesce(func.sum(IncidentRow.num_spikes), 0),
        )
        .where(IncidentRow.run_id.in_(run_ids))
        .group_by(IncidentRow.run_id)
    )
    return {run: (total, unresolved, int(spikes)) for run, total, unresolved, spikes in session.execute(query)}


def finding_counts(session: Session) -> list[tuple[str, str | None, int]]:
    """Incidents that have a finding, by verdict and first cause."""
    query = (
        select(IncidentRow.verdict, IncidentRow.cause, func.count())
        .where(IncidentRow.verdict.is_not(None))
        .group_by(IncidentRow.verdict, IncidentRow.cause)
    )
    return [(str(verdict), cause, count) for verdict, cause, count in session.execute(query)]


def localization_counts(session: Session) -> dict[str, int]:
    """Localization attempts by state."""
    query = select(FindingRow.state, func.count()).group_by(FindingRow.state)
    return {str(state): int(count) for state, count in session.execute(query)}
