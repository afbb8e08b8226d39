"""The connection to the database and its migration to the newest version at start.

SQLite (in WAL mode, so that readers never wait for the writer) is the default for one replica;
PostgreSQL is for several. Knows nothing of what the tables mean.
"""

import hashlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url, text
from sqlalchemy.exc import ArgumentError, DBAPIError, DisconnectionError, NoSuchModuleError
from sqlalchemy.orm import Session

# A writer waits this long for another one (consumer, Slack, a request) before it gives up.
SQLITE_BUSY_S = 30.0
# Of pages, by each connection. SQLite's own 2 MB are filled only when the database has grown for hours, and until then
# the reporter's memory grows; what is not kept here the system's cache of files has.
SQLITE_CACHE_KB = 1_024
IDLE_S = 5.0  # a connection idle for longer is tried before it is used: the server may have gone meanwhile
_WRITES = "gradloc_writes"
_MIGRATION_LOCK = 0x67726164  # any number that no other user of the database's advisory locks takes


class DatabaseUnusable(ValueError):
    """The database cannot be opened; the text says why and what to do, in one line, without password."""


class Database:
    """Sessions for reading and writing. Safe to share between threads."""

    def __init__(self, url: str) -> None:
        self._url = _checked(url)
        try:
            self._engine = _engine(self._url)
            self._migrate()
        except (DBAPIError, ModuleNotFoundError, NoSuchModuleError) as error:
            raise DatabaseUnusable(
                f"database {self.display_url}: {_one_line(error)}; expected a database that can be opened and "
                "written, e.g. --database sqlite:///gradloc.sqlite"
            ) from error

    @property
    def display_url(self) -> str:
        return self._url.render_as_string(hide_password=True)

    @property
    def dialect(self) -> str:
        return self._engine.dialect.name

    @contextmanager
    def reading(self) -> Iterator[Session]:
        """One consistent view; nothing may be written."""
        with Session(self._engine, autoflush=False) as session:
            yield session

    @contextmanager
    def rows(self) -> Iterator[Connection]:
        """The same without the ORM: for answers that are ready-made, which a Session would cost twice."""
        # One statement needs no transaction of its own around it: on PostgreSQL that is two round trips more.
        options = {"isolation_level": "AUTOCOMMIT"} if self.dialect == "postgresql" else {}
        with self._engine.connect().execution_options(**options) as connection:
            yield connection

    @contextmanager
    def writing(self) -> Iterator[Session]:
        """One transaction: committed when the block ends, rolled back when it raises."""
        with self._engine.connect().execution_options(**{_WRITES: True}) as connection, Session(connection) as session:
            yield session
            session.commit()

    @contextmanager
    def alone(self, name: str) -> Iterator[bool]:
        """Whether no other reporter on this database is inside a block of this name; a crash leaves the block, too."""
        if self.dialect != "postgresql":  # SQLite is one reporter's
            yield True
            return
        key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big", signed=True)
        with self._engine.connect() as connection, connection.begin():
            yield bool(connection.scalar(text("SELECT pg_try_advisory_xact_lock(:key)"), {"key": key}))

    def ping(self) -> None:
        """Raises sqlalchemy.exc.DBAPIError when the database does not answer."""
        with self._engine.connect() as connection:
            connection.execute(text("SELECT 1"))

    def close(self) -> None:
        self._engine.dispose()

    def _migrate(self) -> None:
        with self._engine.connect().execution_options(**{_WRITES: True}) as connection, connection.begin():
            if self.dialect == "postgresql":  # several replicas may start at once; SQLite's write lock does the same
                connection.execute(text(f"SELECT pg_advisory_xact_lock({_MIGRATION_LOCK})"))
            migrate(connection)


def migrate(connection: Connection, to: str = "head") -> None:
    """Bring the database to the newest version, or to another one, inside the caller's transaction."""
    with resources.as_file(resources.files("gradloc_reporter.store").joinpath("migrations")) as folder:
        config = Config()
        config.set_main_option("script_location", str(folder))
        config.attributes["connection"] = connection
        command.upgrade(config, to)


def _checked(text_url: str) -> URL:
    try:
        url = make_url(text_url)
    except ArgumentError:
        raise DatabaseUnusable(
            "--database is not a database URL; expected e.g. sqlite:///gradloc.sqlite or postgresql+psycopg://..."
        ) from None
    backend = url.get_backend_name()
    if backend not in ("sqlite", "postgresql"):
        raise DatabaseUnusable(f"database kind {backend!r} is not supported; expected sqlite or postgresql")
    if backend == "sqlite":
        if not url.database or url.database == ":memory:":
            raise DatabaseUnusable(
                "a SQLite database in memory cannot be shared by threads; expected a file, sqlite:///F"
            )
        folder = Path(url.database).parent
        if not folder.is_dir():
            raise DatabaseUnusable(f"the folder of the database, {folder}, does not exist; create it first")
    return url


def _engine(url: URL) -> Engine:
    if url.get_backend_name() != "sqlite":
        engine = create_engine(url, hide_parameters=True)
        event.listen(engine, "checkin", _remember_use)
        event.listen(engine, "checkout", _ping_if_idle)
        return engine
    # The connection of last, and its caches, rather than all of the pool in turn, each with caches of its own.
    engine = create_engine(url, connect_args={"timeout": SQLITE_BUSY_S}, hide_parameters=True, pool_use_lifo=True)
    event.listen(engine, "connect", _prepare_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _remember_use(_connection: Any, record: Any) -> None:
    record.info["used_at"] = time.monotonic()


def _ping_if_idle(connection: Any, record: Any, _proxy: Any) -> None:
    """As pool_pre_ping, but not for a connection that was in use just now: a ping is a round trip."""
    if time.monotonic() - record.info.get("used_at", time.monotonic()) < IDLE_S:
        return
    try:
        connection.execute("SELECT 1")
        connection.rollback()
    except Exception as error:
        raise DisconnectionError("the connection was closed while it was idle") from error


def _prepare_sqlite(connection: Any, _record: Any) -> None:
    connection.isolation_level = None  # we say BEGIN ourselves, below
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute(f"PRAGMA cache_size=-{SQLITE_CACHE_KB}")
    cursor.execute("PRAGMA synchronous=NORMAL")  # in WAL mode a crash loses at most what Redis still has
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    # A writer takes the lock at once: a reader that turned writer half-way could not wait for it.
    writes = connection.get_execution_options().get(_WRITES, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _one_line(error: Exception) -> str:
    cause = getattr(error, "orig", None) or error
    return str(cause).split("\n", maxsplit=1)[0][:200]
