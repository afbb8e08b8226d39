"""What the database knows of snapshots: which incidents name them, and that they were removed."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from sqlalchemy import and_, select
from sqlalchemy.orm import Session

from gradloc_reporter.snapshot_rules import Known, Place
from gradloc_reporter.store import summaries
from gradloc_reporter.store.queries import over_at
from gradloc_reporter.store.run_facts import add_event
from gradloc_reporter.store.tables import IncidentRow, RunRow, SnapshotRow, SpikeRow

PlaceOf = Callable[[SnapshotRow], Place | None]
REASONS = {
    "age": "its incident was over for longer than snapshots are kept",
    "orphan": "no incident names it",
    "quota": "the store was over its quota",
}


@dataclass(slots=True)
class _Newest:
    """A run's newest healthy reference, and whether one of its other snapshots is held."""

    row: SnapshotRow | None = None
    is_needed: bool = False


def known(session: Session, place_of: PlaceOf, *, run_id: str | None = None) -> dict[Place, Known]:
    """Of every snapshot (of one run) that was told and not removed, where its path is one of the store's."""
    spike = and_(
        SpikeRow.run_id == SnapshotRow.run_id,
        SpikeRow.attempt == SnapshotRow.attempt,
        SpikeRow.step == SnapshotRow.step,
    )
    query = (
        select(SnapshotRow, IncidentRow, RunRow)
        .outerjoin(SpikeRow, spike)
        .outerjoin(IncidentRow, IncidentRow.incident_id == SpikeRow.incident_id)
        .outerjoin(RunRow, RunRow.run_id == SnapshotRow.run_id)
        .where(SnapshotRow.path.is_not(None), SnapshotRow.removed_at.is_(None))
        .order_by(SnapshotRow.run_id, SnapshotRow.ts)
        .execution_options(yield_per=1_000)
    )
    if run_id is not None:
        query = query.where(SnapshotRow.run_id == run_id)
    found: dict[Place, Known] = {}
    references: dict[str, _Newest] = {}
    for snapshot, incident, run in session.execute(query):
        place = place_of(snapshot)
        if place is None:
            continue
        newest = references.setdefault(snapshot.run_id, _Newest())
        if snapshot.weights == "reference":
            newest.row = snapshot
            newest.is_needed |= run is not None and not _is_over(run)
            found.setdefault(
                place, Known(held=False, over_at=_later(snapshot.ts, None if run is None else run.ended_at))
            )
            continue
        mine = _of_incident(incident)
        newest.is_needed |= mine.held
        found[place] = _both(found[place], mine) if place in found else mine
    for newest in references.values():
        place = None if newest.row is None or not newest.is_needed else place_of(newest.row)
        if place is not None:
            found[place] = Known(held=True, over_at=None)
    return found


def known_runs(session: Session) -> set[str]:
    return set(session.scalars(select(RunRow.run_id)))


def _of_incident(incident: IncidentRow | None) -> Known:
    if incident is None:
        return Known(held=False, over_at=None)
    return Known(held=incident.status != "resolved" or incident.pinned_by is not None, over_at=over_at(incident))


def _both(one: Known, other: Known) -> Known:
    """A step may be named by several incidents: what one of them holds is held, the last one's end counts."""
    ends = [each.over_at for each in (one, other) if each.over_at is not None]
    return Known(held=one.held or other.held, over_at=max(ends, default=None))


def _is_over(run: RunRow) -> bool:
    return run.ended_attempt is not None and run.ended_attempt >= run.attempt


def _later(ts: float, other: float | None) -> float:
    return ts if other is None or math.isnan(other) else max(ts, other)


def removed(session: Session, place: Place, reason: str, *, place_of: PlaceOf, now: float) -> None:
    """It is gone: mark it, and say so in the log of the incidents that name it."""
    mine = and_(SnapshotRow.run_id == place.run_id, SnapshotRow.attempt == place.attempt)
    for row in session.scalars(select(SnapshotRow).where(mine, SnapshotRow.removed_at.is_(None))).all():
        if row.path is None or place_of(row) != place:
            continue
        row.removed_at = now
        named = incidents_of(session, row.run_id, row.attempt, row.step)
        nobody: list[str | None] = [None]
        for incident_id in named or nobody:
            key = f"snapshot-removed-{row.message_key}-{incident_id or ''}"
            detail = {"step": place.step, "reason": REASONS[reason]}
            add_event(session, key, place.run_id, incident_id, now, "snapshot_removed", detail)
        summaries.refresh(session, named, now=now)


def incidents_of(session: Session, run_id: str, attempt: int, step: int) -> list[str]:
    """Ids of the incidents that name this step."""
    here: Iterable[str] = session.scalars(
        select(SpikeRow.incident_id)
        .where(SpikeRow.run_id == run_id, SpikeRow.attempt == attempt, SpikeRow.step == step)
        .distinct()
    )
    return sorted(here)
