"""Two ways of writing that both databases know: insert what is new, and get-or-insert one row."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast

from sqlalchemy import CursorResult, Table
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from gradloc_reporter.store.tables import Base

Row = TypeVar("Row", bound=Base)


def insert_new(session: Session, row_type: type[Base], rows: Sequence[Mapping[str, Any]]) -> int:
    """Insert rows whose keys are not there yet; returns how many were (exact for a single row)."""
    if not rows:
        return 0
    table = cast(Table, row_type.__table__)
    insert = postgresql.insert if session.get_bind().dialect.name == "postgresql" else sqlite.insert
    result = session.execute(insert(table).on_conflict_do_nothing(), [dict(row) for row in rows])
    return cast(CursorResult[Any], result).rowcount


def get_or_insert(session: Session, row_type: type[Row], key: Any, values: Mapping[str, Any]) -> Row:
    """The row of a primary key, locked for this transaction (where the database locks rows)."""
    row = session.get(row_type, key, with_for_update=True)
    if row is None:
        insert_new(session, row_type, [values])
        row = session.get(row_type, key, with_for_update=True)
    assert row is not None
    return row
