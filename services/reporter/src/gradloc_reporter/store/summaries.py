"""Ready-made answers: what REST says of an incident, written in the transaction that changed it.

A list of incidents is then one read of finished JSON, however large their findings are. Parts that
are JSON already (spikes, findings, as messages wrote them) go in as they are. An answer made by
another version of this renderer, or asked for without token texts, is made afresh.
"""

from collections.abc import Iterable
from typing import Any

import orjson
from sqlalchemy import Connection, select
from sqlalchemy.orm import Session

from gradloc_proto.codec import plain_number
from gradloc_proto.messages import Finding
from gradloc_reporter.rendering import plain
from gradloc_reporter.store import fingerprints
from gradloc_reporter.store.queries import Queries, events_of, snapshots_of, spike_rows_of
from gradloc_reporter.store.rows import upsert
from gradloc_reporter.store.tables import FindingRow, IncidentRow, SummaryRow
from gradloc_reporter.text import redacted, tell

RENDERER = Queries.renderer


def refresh(session: Session, incident_ids: Iterable[str], *, now: float) -> None:
    """Make the answers of these incidents anew; `now` by the reporter's clock."""
    names = sorted(incident_ids)
    if not names:
        return
    session.flush()
    queries = Queries()
    rows = session.scalars(select(IncidentRow).where(IncidentRow.incident_id.in_(names))).all()
    for row in rows:
        fingerprints.renew(session, row)
        summary, detail = rendered(session, queries, row)
        values = {
            "number": row.number,
            "incident_id": row.incident_id,
            "made_by": RENDERER,
            "made_at": now,
            "summary_json": summary.decode(),
            "detail_json": detail.decode(),
        }
        upsert(session, SummaryRow, values, key="number")


def rendered(session: Session, queries: Queries, row: IncidentRow) -> tuple[bytes, bytes]:
    """The answer in a list and the whole one, both without the link, which the reader adds."""
    attempts = session.scalars(
        select(FindingRow)
        .where(FindingRow.incident_id == row.incident_id)
        .order_by(FindingRow.localization_attempt.desc())
    ).all()
    newest = next((each for each in attempts if each.localization_attempt == row.localization_attempt), None)
    story = queries.story_of(row, newest)
    summary = queries.incident_answer(row, newest).model_dump_json(exclude={"url"}).encode()
    more = {
        "text": plain(tell(story, with_link=False)),
        "finding": _finding(queries, row.finding_json),
        "findings": [_attempt(queries, each) for each in attempts],
        "spikes": [
            {"ts": wire(each.ts), "attempt": each.attempt, "spike": orjson.Fragment(each.spike_json)}
            for each in spike_rows_of(session, row.incident_id)
        ],
        "snapshots": [
            orjson.Fragment(each.model_dump_json().encode()) for each in snapshots_of(session, row.incident_id)
        ],
        "events": [
            {"ts": wire(each.ts), "kind": each.kind, "text": each.text} for each in events_of(session, row.incident_id)
        ],
    }
    return summary, summary[:-1] + b"," + orjson.dumps(more)[1:]


def _finding(queries: Queries, text: str | None) -> Any:
    if text is None:
        return None
    if queries.hide_text:
        text = redacted(Finding.model_validate_json(text)).model_dump_json()
    return orjson.Fragment(text)


def _attempt(queries: Queries, row: FindingRow) -> dict[str, Any]:
    return {
        "localization_attempt": row.localization_attempt,
        "state": row.state,
        "started_at": wire(row.started_at),
        "ended_at": wire(row.ended_at),
        "stage": row.stage,
        "fraction": wire(row.fraction),
        "reason": row.reason,
        "finding": _finding(queries, row.finding_json),
    }


def wire(value: float | None) -> float | str | None:
    """A number as JSON takes it: what is not finite becomes the string that messages use."""
    return None if value is None else plain_number(value)


def incident_json(connection: Connection, queries: Queries, incident_id: str) -> bytes | None:
    """Everything known of one incident; None where this viewer knows none of that name."""
    found = queries.ready_made(connection, incident_id)
    if found is None:
        return None
    answer, fits = found
    if not fits:
        with Session(connection) as session:
            row = session.scalars(select(IncidentRow).where(IncidentRow.incident_id == incident_id)).one()
            answer = rendered(session, queries, row)[1]
    return queries.linked(incident_id, answer)
