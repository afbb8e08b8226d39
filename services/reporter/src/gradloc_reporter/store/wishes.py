"""The reporter's own facts: acknowledgements and comments of people, written straight into the log."""

from sqlalchemy import select
from sqlalchemy.orm import Session

from gradloc_reporter.store.run_facts import add_event
from gradloc_reporter.store.tables import IncidentRow


def acknowledge(session: Session, incident_id: str, *, by: str, ts: float) -> bool:
    """The first acknowledgement counts. False for an unknown incident."""
    incident = _known(session, incident_id)
    if incident is None:
        return False
    key = f"acknowledged-{incident_id}"
    if add_event(session, key, incident.run_id, incident_id, ts, "acknowledged", {"by": by}):
        incident.acknowledged_at, incident.acknowledged_by = ts, by
        incident.revision += 1
    return True


def comment(session: Session, incident_id: str, *, key: str, by: str, text: str, ts: float) -> bool:
    """False for an unknown incident."""
    incident = _known(session, incident_id)
    if incident is None:
        return False
    add_event(session, key, incident.run_id, incident_id, ts, "commented", {"by": by, "text": text})
    return True


def _known(session: Session, incident_id: str) -> IncidentRow | None:
    query = select(IncidentRow).where(IncidentRow.incident_id == incident_id).with_for_update()
    return session.scalars(query).one_or_none()
