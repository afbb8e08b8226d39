"""What each receiver was told of each incident, and what it is still to be told.

A receiver is a Slack channel, a webhook, an address of e-mail. Silences and routes decide anew
whenever the incident changes, and silences also when they end.
"""

from collections.abc import Callable
from dataclasses import dataclass

from sqlalchemy import and_, func, or_, select
from sqlalchemy.orm import Session

from gradloc_reporter.store import silences
from gradloc_reporter.store.rows import insert_new
from gradloc_reporter.store.tables import DeliveryRow, IncidentRow, RunRow

# An incident older than this when a receiver first hears of it is history: no flood after a change of settings.
NEWS_S = 24 * 3600.0
ROWS_AT_ONCE = 200  # of those looked at for one batch: many may be silenced or others' to hear


@dataclass(frozen=True, slots=True)
class Due:
    """An incident that has changed since the receiver was told. `state` is None, intended or posted."""

    incident_id: str
    revision: int
    status: str
    state: str | None
    reference: str | None
    told_status: str | None
    intended_at: float | None
    thread_told: str


def due(
    session: Session,
    *,
    receiver: str,
    now: float,
    limit: int,
    wanted: Callable[[dict[str, str]], bool] = lambda names: True,
) -> list[Due]:
    """Incidents to tell `receiver` of, those that it has not heard of first.

    Of one that was posted every change is told, silenced or not: an edit rings no bell.
    """
    mine = and_(DeliveryRow.incident_id == IncidentRow.incident_id, DeliveryRow.receiver == receiver)
    news = func.coalesce(IncidentRow.opened_at, IncidentRow.updated_at) > now - NEWS_S
    changed = DeliveryRow.told_revision < IncidentRow.revision
    query = (
        select(IncidentRow, DeliveryRow, RunRow)
        .outerjoin(DeliveryRow, mine)
        .outerjoin(RunRow, RunRow.run_id == IncidentRow.run_id)
        .where(
            or_(
                and_(DeliveryRow.incident_id.is_(None), news),
                DeliveryRow.state == "intended",
                and_(DeliveryRow.state == "posted", changed),
            )
        )
        .order_by(DeliveryRow.incident_id.is_not(None), IncidentRow.number)
        .execution_options(yield_per=ROWS_AT_ONCE)
    )
    active = silences.active(session, now)
    found = []
    for incident, row, run in session.execute(query):
        if row is None and (
            silences.covering(active, incident, run, now) is not None
            or not wanted(silences.names_of_incident(incident, run))
        ):
            continue
        found.append(
            Due(
                incident_id=incident.incident_id,
                revision=incident.revision,
                status=incident.status,
                state=None if row is None else row.state,
                reference=None if row is None else row.reference,
                told_status=None if row is None else row.told_status,
                intended_at=None if row is None else row.intended_at,
                thread_told="" if row is None else row.thread_told,
            )
        )
        if len(found) == limit:
            break
    return found


def intend(session: Session, incident_id: str, *, receiver: str, now: float) -> None:
    """Say, before sending, that something may be sent: a crash in between leaves this to look up."""
    values = {"incident_id": incident_id, "receiver": receiver, "state": "intended", "intended_at": now}
    insert_new(session, DeliveryRow, [values])


def told(
    session: Session, incident_id: str, *, receiver: str, reference: str | None, revision: int, status: str
) -> None:
    row = _row(session, incident_id, receiver)
    row.state, row.told_revision, row.told_status = "posted", revision, status
    row.reference = reference if reference is not None else row.reference


def told_in_thread(session: Session, incident_id: str, *, receiver: str, what: str) -> None:
    """The thread holds this too."""
    row = _row(session, incident_id, receiver)
    row.thread_told = ",".join([*filter(None, row.thread_told.split(",")), what])


def gone(session: Session, incident_id: str, *, receiver: str) -> None:
    """Somebody deleted the message: respect it, say no more of this incident."""
    _row(session, incident_id, receiver).state = "gone"


def _row(session: Session, incident_id: str, receiver: str) -> DeliveryRow:
    row = session.get(DeliveryRow, (incident_id, receiver))
    assert row is not None, "told without intend"
    return row
