"""What is kept: old steps thinned without losing what people look for; a copy of the database is the database."""

import math
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select

from gradloc_reporter.keeper import Keeper
from gradloc_reporter.store.engine import Database
from gradloc_reporter.store.fold import Fold
from gradloc_reporter.store.queries import Queries
from gradloc_reporter.store.tables import StepRow

DAY_S = 86_400.0


@pytest.fixture
def database(database_url: str) -> Any:
    database = Database(database_url)
    yield database
    database.close()


def fold(database: Database, *messages: Any) -> None:
    with database.writing() as session:
        folding = Fold(session)
        for message in messages:
            folding.apply(message)
        folding.finish()


def count(database: Database) -> int:
    with database.reading() as session:
        return int(session.scalar(select(func.count()).select_from(StepRow)) or 0)


def test_old_steps_are_thinned_and_what_people_look_for_stays(kit: Any, database: Database) -> None:
    told = kit.Told(ts=0.0)
    odd = {300: 640.0, 500: math.nan, 700: 0.0, 901: 2.0}
    steps = [told.step(step, odd.get(step, 0.4 + 0.001 * (step % 7))) for step in range(1000)]
    flagged = told.step(1000, 0.4, rules_hit=("reward-cliff",))
    recent = [told.step(step, 0.4).model_copy(update={"ts": 40 * DAY_S}) for step in range(1001, 1101)]
    fold(database, told.started(), *steps, flagged, *recent, told.opened(901, 2.0))
    keeper = Keeper(database, keep_steps_days=30, clock=lambda: 41 * DAY_S)
    removed = keeper.thin_once()
    assert 850 <= removed <= 910 and count(database) == 1101 - removed
    with database.reading() as session:
        points = {
            p.step: p for p in Queries().steps(session, told.run_id, first=0, last=None, max_points=10_000).points
        }
    assert {0, 300, 500, 700, 901, 1000} <= set(points) and set(range(1001, 1101)) <= set(points)
    assert points[300].grad_norm == 640.0 and math.isnan(points[500].grad_norm)
    assert keeper.thin_once() == 0, "what was thinned is not thinned again"


def test_a_run_that_is_young_or_short_is_left_alone(kit: Any, database: Database) -> None:
    young, short = kit.Told(run_id="young", ts=40 * DAY_S), kit.Told(run_id="short", ts=0.0)
    fold(database, young.started(), *(young.step(step, 0.4) for step in range(200)))
    fold(database, short.started(), *(short.step(step, 0.4) for step in range(10)))
    assert Keeper(database, keep_steps_days=30, clock=lambda: 41 * DAY_S).thin_once() == 0
    assert count(database) == 210


def test_a_backup_taken_while_it_is_written_is_the_whole_database(
    kit: Any, database: Database, database_url: str, tmp_path: Path
) -> None:
    """As docs/reporter.md says: sqlite3's own backup, then the reporter on the copy."""
    told = kit.Told()
    opened = told.opened()
    fold(database, told.started(), told.step(1, math.nan), opened, told.finished(opened.incident_id))
    with database.writing() as session:  # a transaction is open meanwhile, and is not in the copy
        Fold(session).apply(told.opened(7))
        session.flush()
        source = sqlite3.connect(database_url.removeprefix("sqlite:///"))
        target = sqlite3.connect(tmp_path / "copy.sqlite")
        source.backup(target)
        source.close()
        target.close()
    copy = Database(f"sqlite:///{tmp_path}/copy.sqlite")
    with copy.reading() as session, database.reading() as original:
        listed, _ = Queries().incidents(session, limit=10)
        assert [each.incident_id for each in listed] == [opened.incident_id]
        assert Queries().incident(session, opened.incident_id) == Queries().incident(original, opened.incident_id)
    copy.close()
