"""Rows are a function of the facts: order, repetition and odd numbers change nothing."""

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import create_engine, select, text

from gradloc_proto import messages as m
from gradloc_reporter.answers import Matcher
from gradloc_reporter.store import alerts, deliveries
from gradloc_reporter.store.engine import Database, DatabaseUnusable, migrate
from gradloc_reporter.store.fold import Fold
from gradloc_reporter.store.incident_facts import IncidentOfOtherRun
from gradloc_reporter.store.queries import Queries
from gradloc_reporter.store.tables import Base, IncidentRow, RunRow, StepRow


@pytest.fixture
def database(database_url: str) -> Any:
    database = Database(database_url)
    yield database
    database.close()


def fold(database: Database, *messages: m.Message) -> None:
    with database.writing() as session:
        folding = Fold(session)
        for message in messages:
            folding.apply(message)
        folding.finish()


def contents(database: Database) -> dict[str, list[str]]:
    """Every row of every table, but for the numbers and revisions that count arrivals."""
    found = {}
    with database.reading() as session:
        for table in Base.metadata.sorted_tables:
            names = [column.name for column in table.columns if column.name not in ("number", "revision", "made_at")]
            rows = session.execute(select(*(table.c[name] for name in names))).all()
            found[table.name] = sorted(repr(dict(zip(names, row, strict=True))) for row in rows)
    return found


def a_whole_story(kit: Any) -> list[m.Message]:
    told = kit.Told(ts=1000.0)
    opened = told.opened()
    incident = opened.incident_id

    def of(kind: type[m.Message], **values: Any) -> m.Message:
        return told.of(kind, incident, **values)

    return [
        told.started(),
        told.step(1, 0.4, layer_norms={"model.layers.0": 0.3, "model.layers.1": math.inf}),
        told.step(300, 0.4, layer_norms={"model.layers.0": 0.2}),  # windows of two steps
        told.step(301, 0.4, layer_norms={"model.layers.0": 0.5, "model.layers.1": 0.1}),
        told.step(1204, math.nan, layer_norms={"model.layers.0": math.nan}),  # and of eight
        opened,
        of(m.IncidentJoined, spike=told.spike(1206, 2.0)),
        of(m.IncidentWorsened, spike=told.spike(1207, math.inf), ts=1004),
        of(m.JobReported, localization_attempt=1, status="submitted"),
        of(m.LocalizationStarted, localization_attempt=1, step=1204, snapshot="file:///s"),
        of(m.LocalizationProgressed, localization_attempt=1, stage="replay", fraction=0.3),
        of(m.LocalizationProgressed, localization_attempt=1, stage="verify", fraction=0.6),
        of(m.LocalizationFailed, localization_attempt=1, reason="out of memory", ts=1010),
        of(m.JobReported, localization_attempt=1, status="failed", detail="exit 1", ts=1011),
        of(m.LocalizationStarted, localization_attempt=2, step=1204, snapshot="file:///s", ts=1012),
        told.finished(incident, attempt=2),
        of(m.LocalizationFinished, localization_attempt=1, finding=kit.a_finding(verdict="inconclusive"), ts=1013),
        of(m.IncidentResolved, step=1260, reason="calm", ts=1300),
        m.LimitsChanged(run_id=told.run_id, ts=1, step=3, limits=m.Limits(version=4, norm=2.0, healthy_norm=0.4)),
        m.LimitsChanged(run_id=told.run_id, ts=1, step=2, limits=m.Limits(version=3, norm=9.0, healthy_norm=0.4)),
        m.SnapshotCommitted(
            run_id=told.run_id, ts=2, step=1204, path="file:///s", num_bytes=5, manifest_sha256="a" * 64
        ),
        m.StreamGapNoticed(run_id=told.run_id, ts=2, first_step=2, last_step=1203, reason="never arrived"),
        m.RunEnded(run_id=told.run_id, ts=2000, step=1300, num_events_dropped=7),
    ]


@settings(max_examples=15)
@given(seed=st.integers(0, 2**32), batch=st.integers(1, 30))
def test_order_repetition_and_batching_change_nothing(kit: Any, tmp_path: Path, seed: int, batch: int) -> None:
    messages = a_whole_story(kit)
    dice = random.Random(seed)
    mixed = messages + dice.choices(messages, k=len(messages))
    dice.shuffle(mixed)
    number = next(kit.numbers)
    straight, shuffled = (Database(f"sqlite:///{tmp_path}/{name}{number}.sqlite") for name in ("a", "b"))
    fold(straight, *messages)
    for start in range(0, len(mixed), batch):
        fold(shuffled, *mixed[start : start + batch])
    assert contents(straight) == contents(shuffled)
    straight.close()
    shuffled.close()


def test_a_snapshot_that_comes_after_its_incident_is_shown_with_it(kit: Any, tmp_path: Path) -> None:
    messages = a_whole_story(kit)
    taken = [message for message in messages if isinstance(message, m.SnapshotCommitted)]
    at_once, later = (Database(f"sqlite:///{tmp_path}/{name}.sqlite") for name in ("a", "b"))
    fold(at_once, *messages)
    fold(later, *(message for message in messages if message not in taken))
    assert contents(at_once) != contents(later)
    fold(later, *taken)
    assert contents(at_once) == contents(later)
    at_once.close()
    later.close()


def test_the_worst_spike_and_the_highest_finished_attempt_win(kit: Any, database: Database) -> None:
    messages = a_whole_story(kit)
    fold(database, *messages)
    with database.reading() as session:
        incident = session.scalars(select(IncidentRow)).one()
        answer = Queries().incident(session, incident.incident_id)
    assert answer is not None and answer.finding is not None
    assert (answer.num_spikes, answer.first_step, answer.last_step) == (3, 1204, 1207)
    assert answer.grad_norm == math.inf
    assert (answer.verdict, answer.finding.verdict, answer.status) == ("token", "token", "resolved")
    assert [(f.localization_attempt, f.state) for f in answer.findings] == [(2, "finished"), (1, "finished")]
    assert answer.findings[1].reason == "out of memory", "the localizer's own word counts more than Ray's"
    assert answer.events[0].kind == "incident_opened"


def test_a_later_attempt_that_failed_leaves_the_finding_standing(kit: Any, database: Database) -> None:
    told = kit.Told()
    opened = told.opened()
    failed = told.of(m.LocalizationFailed, opened.incident_id, localization_attempt=2, reason="no GPU")
    fold(database, opened, told.finished(opened.incident_id), failed)
    with database.reading() as session:
        answer = Queries().incident(session, opened.incident_id)
    assert answer is not None and (answer.status, answer.verdict) == ("located", "token")


def test_a_message_of_one_run_cannot_touch_anothers_incident(kit: Any, database: Database) -> None:
    told, other = kit.Told(), kit.Told(run_id="other")
    opened = told.opened()
    fold(database, opened)
    before = contents(database)
    with pytest.raises(IncidentOfOtherRun):
        fold(database, other.finished(opened.incident_id))
    assert contents(database) == before


def test_a_restart_from_a_checkpoint_replaces_the_steps_it_does_again(kit: Any, database: Database) -> None:
    first, second = kit.Told(), kit.Told(attempt=1)
    fold(
        database,
        first.started(),
        *(first.step(step, 1.0) for step in range(10)),
        m.RunEnded(run_id=first.run_id, ts=1, step=9, reason="preempted"),
        second.started(),
        *(second.step(step, 2.0) for step in range(6, 12)),
    )
    with database.reading() as session:
        run = Queries().run(session, first.run_id)
        series = Queries().steps(session, first.run_id, first=0, last=None, max_points=100)
    assert run is not None and (run.status, run.attempt, run.last_step) == ("running", 1, 11)
    assert [(point.step, point.attempt) for point in series.points] == [(step, int(step >= 6)) for step in range(12)]


def test_nan_and_infinities_survive_the_database(kit: Any, database: Database) -> None:
    told = kit.Told()
    fold(database, *(told.step(step, value) for step, value in enumerate((math.nan, math.inf, -math.inf, 0.0))))
    with database.reading() as session:
        norms = list(session.scalars(select(StepRow.grad_norm).order_by(StepRow.step)))
    assert math.isnan(norms[0]) and norms[1:] == [math.inf, -math.inf, 0.0]


def test_the_migrations_make_exactly_the_models_tables(database_url: str) -> None:
    Database(database_url).close()
    engine = create_engine(database_url)
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), Base.metadata) == []
    engine.dispose()


def test_a_database_of_before_learns_the_teams_of_its_runs(database_url: str) -> None:
    engine = create_engine(database_url)
    with engine.begin() as connection:
        migrate(connection, to="0001")
        row = "INSERT INTO runs (run_id, attempt, labels_json, last_attempt, limits_attempt, limits_version, "
        row += "num_events_dropped) VALUES (:run, 0, :labels, 0, 0, -1, 0)"
        for run, labels in (("a", {"team": "vision"}), ("b", {"task": "sort"}), ("c", {})):
            connection.execute(text(row), {"run": run, "labels": json.dumps(labels)})
    engine.dispose()
    database = Database(database_url)
    with database.reading() as session:
        teams = dict(session.execute(select(RunRow.run_id, RunRow.team)).all())  # type: ignore[arg-type]
    database.close()
    assert teams == {"a": "vision", "b": None, "c": None}


def test_a_database_of_before_learns_how_wide_its_layer_windows_are(kit: Any, database_url: str) -> None:
    engine = create_engine(database_url)
    with engine.begin() as connection:
        migrate(connection, to="0003")
        row = "INSERT INTO runs (run_id, attempt, labels_json, last_attempt, limits_attempt, limits_version, "
        row += "num_events_dropped, thinned_to) VALUES (:run, 0, '{}', 0, 0, -1, 0, 0)"
        connection.execute(text(row), [{"run": kit.Told().run_id}, {"run": "without"}])
        windows = "INSERT INTO layer_windows (run_id, first_step, width, norms_json) VALUES (:run, :first, 4, :norms)"
        parts = [{"run": kit.Told().run_id, "first": first, "norms": '{"a": 1.0}'} for first in (0, 4)]
        connection.execute(text(windows), parts)
    engine.dispose()
    database = Database(database_url)
    fold(database, kit.Told().step(5, 0.4, layer_norms={"a": 2.0}))  # alone it would ask for windows of one step
    with database.reading() as session:
        widths = dict(session.execute(select(RunRow.run_id, RunRow.layer_width)).all())  # type: ignore[arg-type]
        windows_now = Queries().layer_windows(session, kit.Told().run_id)
    database.close()
    assert widths == {kit.Told().run_id: 4, "without": 1}
    assert windows_now == [(0, 4, {"a": 1.0}), (4, 4, {"a": 2.0})]


def test_opening_again_keeps_what_was_there(kit: Any, database_url: str) -> None:
    for _ in range(2):
        database = Database(database_url)
        fold(database, kit.Told().step(1, 0.4))
        database.close()
    database = Database(database_url)
    with database.reading() as session:
        assert len(session.scalars(select(StepRow)).all()) == 1
    database.close()


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("nonsense", "not a database URL"),
        ("mysql://host/db", "'mysql' is not supported"),
        ("sqlite://", "in memory cannot be shared"),
        ("sqlite:////no/such/folder/x.sqlite", "does not exist; create it"),
        ("postgresql+nodriver://u:secret@h/x", "expected a database that can be opened"),
    ],
)
def test_a_database_that_cannot_be_used_says_why_in_one_line(url: str, reason: str) -> None:
    with pytest.raises(DatabaseUnusable) as raised:
        Database(url)
    assert reason in str(raised.value)
    assert "\n" not in str(raised.value) and "secret" not in str(raised.value)


def test_a_file_that_is_no_database_says_so(tmp_path: Path) -> None:
    (tmp_path / "x.sqlite").write_text("this is not a database at all, only some text in a file" * 40)
    with pytest.raises(DatabaseUnusable, match="not a database"):
        Database(f"sqlite:///{tmp_path}/x.sqlite")


def test_redaction_reaches_every_answer(kit: Any, database: Database) -> None:
    told = kit.Told()
    opened = told.opened()
    fold(database, opened, told.finished(opened.incident_id, culprits=(kit.a_culprit(token_text="SECRET"),)))
    with database.reading() as session:
        shown = Queries().incident(session, opened.incident_id)
        hidden = Queries(hide_text=True).incident(session, opened.incident_id)
    assert shown is not None and hidden is not None
    assert "SECRET" in shown.model_dump_json()
    assert "SECRET" not in hidden.model_dump_json()
    assert json.loads(hidden.model_dump_json())["culprit"].endswith("token 358 (id 13708)")


def test_incidents_that_are_others_to_hear_hold_up_none(kit: Any, database: Database) -> None:
    """Hundreds that no route of this receiver wants, and behind them one that it does."""
    now = 1_000_000.0
    told = kit.Told(run_id="others", ts=now)
    fold(database, told.started(), *(told.opened(step) for step in range(700)))
    mine = kit.Told(run_id="mine", ts=now)
    fold(database, mine.started(), mine.opened())
    with database.reading() as session:
        found = deliveries.due(
            session, receiver="oncall", now=now, limit=5, wanted=lambda names: names["run"] == "mine"
        )
        standing = alerts.standing(
            session, receiver="am", now=now, limit=5, when=(Matcher(name="run", op="=", value="mine"),)
        )
    assert [one.incident_id for one in found] == [mine.opened().incident_id]
    assert [one.incident_id for one in standing] == [mine.opened().incident_id]


def test_an_alert_that_fires_does_not_expire_behind_newer_ones(kit: Any, database: Database) -> None:
    now = 1_000_000.0
    told = kit.Told(ts=now)
    fold(database, told.started(), told.opened(1))
    with database.writing() as session:
        alerts.intend(session, alerts.standing(session, receiver="am", now=now, limit=5), receiver="am", now=now)
    fold(database, *(told.opened(step) for step in range(2, 30)))
    with database.reading() as session:
        found = [one.incident_id for one in alerts.standing(session, receiver="am", now=now, limit=5)]
    assert len(found) == 5 and told.opened(1).incident_id in found
