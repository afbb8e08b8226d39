"""Two ways of writing that both databases know: insert what is new, and get-or-insert one row."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast

from sqlalchemy import Table
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from gradloc_reporter.store.tables import Base

Row = TypeVar("Row", bound=Base)


def insert_new(session: Session, row_type: type[Base], rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert those rows whose keys are not there yet."""
    if rows:
        session.execute(_insert(session, row_type), [dict(row) for row in rows])


def insert_if_new(session: Session, row_type: type[Base], row: Mapping[str, Any]) -> bool:
    """Insert one row; False when its key was there already."""
    table = cast(Table, row_type.__table__)
    # RETURNING rather than a row count: after an insert SQLAlchemy keeps no count for PostgreSQL.
    statement = _insert(session, row_type).returning(*table.primary_key.columns)
    return session.execute(statement, dict(row)).first() is not None


def _insert(session: Session, row_type: type[Base]) -> postgresql.Insert | sqlite.Insert:
    table = cast(Table, row_type.__table__)
    if session.get_bind().dialect.name == "postgresql":
        return postgresql.insert(table).on_conflict_do_nothing()
    return sqlite.insert(table).on_conflict_do_nothing()


def get_or_insert(session: Session, row_type: type[Row], key: Any, values: Mapping[str, Any]) -> Row:
    """The row of a primary key, locked for this transaction (where the database locks rows)."""
    row = session.get(row_type, key, with_for_update=True)
    if row is None:
        insert_new(session, row_type, [values])
        row = session.get(row_type, key, with_for_update=True)
    assert row is not None
    return row
