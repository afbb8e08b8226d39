"""Where each stream was read to, and which runs are worth reading."""

from sqlalchemy import or_, select
from sqlalchemy.orm import Session

from gradloc_proto.bus import START
from gradloc_reporter.store.rows import chunks, insert_new
from gradloc_reporter.store.tables import CursorRow, IncidentRow, RunRow


class CursorMoved(RuntimeError):
    """Another reporter has read this stream meanwhile; our transaction must not be committed."""


def load_cursors(session: Session) -> dict[str, str]:
    return {row.stream: row.cursor for row in session.scalars(select(CursorRow))}


def move_cursors(session: Session, moves: dict[str, tuple[str, str]]) -> None:
    """Move each stream's cursor from the expected place to the new one. Raises CursorMoved."""
    new = [{"stream": stream, "cursor": START} for stream, (expected, _) in sorted(moves.items()) if expected == START]
    insert_new(session, CursorRow, new)
    rows: dict[str, CursorRow] = {}
    for names in chunks(sorted(moves)):  # in one order: no deadlock
        query = select(CursorRow).where(CursorRow.stream.in_(names)).order_by(CursorRow.stream).with_for_update()
        rows |= {row.stream: row for row in session.scalars(query)}
    for stream, (expected, going) in moves.items():
        if stream not in rows or rows[stream].cursor != expected:
            raise CursorMoved(f"stream {stream} was read by another reporter")
        rows[stream].cursor = going
    session.flush()


def is_over(session: Session, run_id: str) -> bool:
    """Whether the run's newest attempt has ended."""
    row = session.get(RunRow, run_id)
    return row is not None and row.ended_attempt is not None and row.ended_attempt >= row.attempt


def runs_to_read(session: Session, *, with_ended: bool) -> list[str]:
    """Ids of the runs that go on or wait for a finding; or of all, to look for late news of ended ones."""
    query = select(RunRow.run_id)
    if not with_ended:
        waiting = select(IncidentRow.run_id).where(IncidentRow.status.in_(("open", "localizing")))
        goes_on = or_(RunRow.ended_attempt.is_(None), RunRow.ended_attempt < RunRow.attempt)
        query = query.where(or_(goes_on, RunRow.run_id.in_(waiting)))
    return list(session.scalars(query))
