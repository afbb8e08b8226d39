"""Two ways of writing that both databases know: insert what is new, and get-or-insert one row."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

from sqlalchemy import Table
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from gradloc_reporter.store.tables import Base

COPY_MIN = 16  # fewer rows are not worth the statements around them
NAMES_MAX = 500  # in one IN list that every database takes
Row = TypeVar("Row", bound=Base)


def chunks(names: Sequence[str], size: int = NAMES_MAX) -> Iterator[Sequence[str]]:
    return (names[start : start + size] for start in range(0, len(names), size))


def insert_new(session: Session, row_type: type[Base], rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert those rows whose keys are not there yet."""
    if len(rows) >= COPY_MIN and session.get_bind().dialect.name == "postgresql":
        _copy_new(session, cast(Table, row_type.__table__), rows)
    elif rows:
        session.execute(_insert(session, row_type), [dict(row) for row in rows])


def insert_known_new(session: Session, row_type: type[Base], rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert rows that cannot be there yet: the caller has locked what they hang on, and has looked."""
    if len(rows) >= COPY_MIN and session.get_bind().dialect.name == "postgresql":
        table = cast(Table, row_type.__table__)
        quote = session.connection().dialect.identifier_preparer.quote
        _copy(session, table, quote(table.name), rows)
    else:
        insert_new(session, row_type, rows)


def _copy_new(session: Session, table: Table, rows: Sequence[Mapping[str, Any]]) -> None:
    """COPY into a table of this transaction, then one insert: a statement a row costs PostgreSQL several times that."""
    connection = session.connection()
    quote = connection.dialect.identifier_preparer.quote
    stage = quote(f"stage_{table.name}")
    connection.exec_driver_sql(
        f"CREATE TEMP TABLE IF NOT EXISTS {stage} (LIKE {quote(table.name)}) ON COMMIT DELETE ROWS"
    )
    connection.exec_driver_sql(f"DELETE FROM {stage}")
    names = _copy(session, table, stage, rows)
    connection.exec_driver_sql(
        f"INSERT INTO {quote(table.name)} ({names}) SELECT {names} FROM {stage} ON CONFLICT DO NOTHING"
    )


def _copy(session: Session, table: Table, target: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """COPY rows of `table` into `target`; gives the names of the columns."""
    connection = session.connection()
    quote = connection.dialect.identifier_preparer.quote
    # Defaults are SQLAlchemy's, not the database's: a column that no row names takes its default here.
    columns = [column for column in table.columns if column.name in rows[0] or column.default is not None]
    defaults = [None if column.default is None else column.default.arg for column in columns]  # type: ignore[attr-defined]
    names = ", ".join(quote(column.name) for column in columns)
    driver: Any = connection.connection.driver_connection
    copy = f"COPY {target} ({names}) FROM STDIN"
    try:
        with driver.cursor() as cursor, cursor.copy(copy) as copying:
            for row in rows:
                copying.write_row(
                    [row.get(column.name, default) for column, default in zip(columns, defaults, strict=True)]
                )
    except connection.dialect.loaded_dbapi.Error as error:  # as SQLAlchemy would have said it, without the values
        raise DBAPIError.instance(copy, None, error, connection.dialect.loaded_dbapi.Error) from error
    return names


def insert_if_new(session: Session, row_type: type[Base], row: Mapping[str, Any]) -> bool:
    """Insert one row; False when its key was there already."""
    table = cast(Table, row_type.__table__)
    # RETURNING rather than a row count: after an insert SQLAlchemy keeps no count for PostgreSQL.
    statement = _insert(session, row_type).returning(*table.primary_key.columns)
    return session.execute(statement, dict(row)).first() is not None


def upsert(session: Session, row_type: type[Base], row: Mapping[str, Any], *, key: str) -> None:
    """Insert the row, or overwrite the one that has its key."""
    dialect = postgresql if session.get_bind().dialect.name == "postgresql" else sqlite
    statement = dialect.insert(cast(Table, row_type.__table__)).values(dict(row))
    others = {name: getattr(statement.excluded, name) for name in row if name != key}
    session.execute(statement.on_conflict_do_update(index_elements=[key], set_=others))


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
