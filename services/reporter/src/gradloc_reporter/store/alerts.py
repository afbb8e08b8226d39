"""Which alerts stand: incidents that go on and are not silenced, and those begun that must be ended."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import and_, or_, select
from sqlalchemy.orm import Session

from gradloc_reporter.answers import Matcher
from gradloc_reporter.matching import matches
from gradloc_reporter.store import silences
from gradloc_reporter.store.rows import insert_new
from gradloc_reporter.store.tables import DeliveryRow, IncidentRow, RunRow


@dataclass(frozen=True, slots=True)
class Alert:
    """`severity_before` is what it was last posted with; None for one that was never posted."""

    incident_id: str
    run_id: str
    labels: dict[str, str]
    severity: str
    severity_before: str | None
    opened_at: float | None
    is_over: bool


def standing(session: Session, *, receiver: str, now: float, limit: int, when: Sequence[Matcher] = ()) -> list[Alert]:
    """Alerts to post now, those that fire already first: they must not expire. A silenced incident that was never
    posted is left out; one that was, ends."""
    mine = and_(DeliveryRow.incident_id == IncidentRow.incident_id, DeliveryRow.receiver == receiver)
    query = (
        select(IncidentRow, DeliveryRow, RunRow)
        .outerjoin(DeliveryRow, mine)
        .outerjoin(RunRow, RunRow.run_id == IncidentRow.run_id)
        .where(or_(IncidentRow.status != "resolved", DeliveryRow.state == "firing"))
        .order_by(DeliveryRow.state.is_distinct_from("firing"), IncidentRow.number.desc())
        .execution_options(yield_per=limit)
    )
    active = silences.active(session, now)
    found: list[Alert] = []
    for incident, row, run in session.execute(query):
        if len(found) == limit:
            break
        silenced = silences.covering(active, incident, run, now) is not None
        fired = row is not None and row.state == "firing"
        names = silences.names_of_incident(incident, run)
        if not fired and (silenced or not matches(when, names)):
            continue
        found.append(
            Alert(
                incident_id=incident.incident_id,
                run_id=incident.run_id,
                labels={} if run is None else json.loads(run.labels_json),
                severity=names["severity"],
                severity_before=row.reference if fired else None,
                opened_at=incident.opened_at,
                is_over=silenced or incident.status == "resolved",
            )
        )
    return found


def intend(session: Session, alerts: Sequence[Alert], *, receiver: str, now: float) -> None:
    new = [
        {
            "incident_id": each.incident_id,
            "receiver": receiver,
            "state": "firing",
            "reference": each.severity,
            "intended_at": now,
        }
        for each in alerts
        if each.severity_before is None
    ]
    insert_new(session, DeliveryRow, new)
    for each in alerts:
        row = session.get(DeliveryRow, (each.incident_id, receiver))
        if row is not None and row.state == "ended" and not each.is_over:
            row.state, row.reference = "firing", each.severity


def posted(session: Session, alerts: Sequence[Alert], *, receiver: str) -> None:
    for each in alerts:
        row = session.get(DeliveryRow, (each.incident_id, receiver))
        if row is not None:
            row.state, row.reference = "ended" if each.is_over else "firing", each.severity
