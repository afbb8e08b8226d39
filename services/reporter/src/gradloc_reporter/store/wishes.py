"""The reporter's own facts: what people say and do about incidents, written straight into the log.

Every function says whether there is such an incident; the log keeps who and when.
"""

import math
from collections.abc import Callable
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from gradloc_reporter.store import summaries
from gradloc_reporter.store.incident_facts import is_over, refresh_status
from gradloc_reporter.store.run_facts import add_event
from gradloc_reporter.store.tables import IncidentRow


def acknowledge(session: Session, incident_id: str, *, by: str, ts: float) -> bool:
    """The first acknowledgement counts."""

    def first(incident: IncidentRow) -> None:
        incident.acknowledged_at, incident.acknowledged_by = ts, by

    return _done(session, incident_id, f"acknowledged-{incident_id}", ts, "acknowledged", {"by": by}, first)


def comment(session: Session, incident_id: str, *, key: str, by: str, text: str, ts: float) -> bool:
    return _done(session, incident_id, key, ts, "commented", {"by": by, "text": text}, lambda incident: None)


def close(session: Session, incident_id: str, *, by: str, reason: str, ts: float) -> bool:
    """Say that it is over; a later spike of it, or `reopen`, says otherwise."""

    def over(incident: IncidentRow) -> None:
        # Later than what it ends, whatever the clocks say.
        latest = max(ts, incident.closed_at or ts, incident.reopened_at or ts, incident.last_spike_at or ts)
        incident.closed_at, incident.closed_by = latest if latest == ts else math.nextafter(latest, math.inf), by

    def again(incident: IncidentRow) -> bool:
        if is_over(incident) and incident.closed_at is not None:
            incident.closed_at = max(ts, incident.closed_at)  # a spike of before that arrives later changes nothing
        return not is_over(incident)

    key = f"closed-{incident_id}-{ts!r}"
    return _done(session, incident_id, key, ts, "closed", {"by": by, "reason": reason}, over, only_if=again)


def reopen(session: Session, incident_id: str, *, by: str, reason: str, ts: float) -> bool:
    def again(incident: IncidentRow) -> None:
        # Later than what it takes back, whatever the clocks say.
        incident.reopened_at = max(ts, incident.resolved_at or ts, incident.closed_at or ts)

    key = f"reopened-{incident_id}-{ts!r}"
    return _done(session, incident_id, key, ts, "reopened", {"by": by, "reason": reason}, again, only_if=is_over)


def pin(session: Session, incident_id: str, *, by: str | None, signed: str, ts: float) -> bool:
    """Keep the incident's snapshots whatever their age; `by` None lets them go."""

    def pinned(incident: IncidentRow) -> None:
        incident.pinned_by = by

    kind = "unpinned" if by is None else "pinned"
    return _done(session, incident_id, f"{kind}-{incident_id}-{ts!r}", ts, kind, {"by": signed}, pinned)


def _done(
    session: Session,
    incident_id: str,
    key: str,
    ts: float,
    kind: str,
    detail: dict[str, Any],
    change: Callable[[IncidentRow], None],
    *,
    only_if: Callable[[IncidentRow], bool] = lambda incident: True,
) -> bool:
    incident = session.scalars(
        select(IncidentRow).where(IncidentRow.incident_id == incident_id).with_for_update()
    ).one_or_none()
    if incident is None:
        return False
    if only_if(incident) and add_event(session, key, incident.run_id, incident_id, ts, kind, detail):
        change(incident)
        incident.revision += 1
        refresh_status(session, incident)
        summaries.refresh(session, [incident_id], now=ts)
    return True
