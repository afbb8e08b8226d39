"""Consuming streams: exactly once in effect, poison set aside, loss noticed, patience with Redis."""

import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gradloc_proto import messages as m
from gradloc_proto import streams
from gradloc_proto.bus import START
from gradloc_proto.codec import encode
from gradloc_proto.memory_bus import MemoryBus
from gradloc_proto.redis_bus import RedisBus
from gradloc_reporter import Reporter
from gradloc_reporter.consumer import READ_TOTAL, Consumer
from gradloc_reporter.store.cursors import CursorMoved
from gradloc_reporter.store.engine import Database
from gradloc_reporter.store.queries import Queries


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    database = Database(database_url)
    yield database
    database.close()


def drain(consumer: Consumer) -> None:
    for _ in range(1000):
        if not consumer.consume_once():
            return
    raise AssertionError("the consumer never caught up")


def steps_of(database: Database, run_id: str) -> list[int]:
    with database.reading() as session:
        found = Queries().steps(session, run_id, first=0, last=None, max_points=10_000)
    return [point.step for point in found.points]


def test_a_run_is_found_in_the_registry_and_read_whole(
    kit: Any, told: Any, redis_server: Any, database: Database
) -> None:
    bus = RedisBus(redis_server.url)
    kit.tell(bus, told.started(), *(told.step(step, 0.4) for step in range(1, 2000)))
    consumer = Consumer(bus, database)
    drain(consumer)
    assert steps_of(database, told.run_id) == list(range(1, 2000))
    assert consumer.consumption.rejected.total() == 0
    bus.close()


def test_what_waits_in_many_runs_is_read_in_bounded_portions(kit: Any, told: Any, database: Database) -> None:
    runs = [kit.Told(run_id=f"run-{number}") for number in range(64)]
    bus = MemoryBus()
    kit.tell(bus, *(message for one in runs for message in (one.started(), *(one.step(k, 0.4) for k in range(90)))))
    consumer = Consumer(bus, database)
    consumer.consume_once()  # the registry
    before = consumer.consumption.consumed["steps"]
    consumer.consume_once()
    assert 0 < consumer.consumption.consumed["steps"] - before <= READ_TOTAL < 64 * 90
    drain(consumer)
    assert all(steps_of(database, one.run_id) == list(range(90)) for one in runs)


def test_a_restart_goes_on_where_the_rows_end(kit: Any, told: Any, redis_server: Any, database: Database) -> None:
    bus = RedisBus(redis_server.url)
    kit.tell(bus, told.started(), told.step(1, 0.4), told.opened())
    drain(Consumer(bus, database))
    kit.tell(bus, told.step(2, 0.4))
    second = Consumer(bus, database)
    drain(second)
    assert steps_of(database, told.run_id) == [1, 2]
    assert second.consumption.consumed["steps"] == 1, "what was committed is not read again"
    bus.close()


def test_the_same_stream_again_under_new_ids_changes_nothing(kit: Any, told: Any, database: Database) -> None:
    def messages() -> list[m.Message]:
        opened = told.opened()
        return [told.started(), told.step(1, 0.4), opened, told.finished(opened.incident_id)]

    bus = MemoryBus()
    kit.tell(bus, *messages(), *messages(), *reversed(messages()))
    drain(Consumer(bus, database))
    with database.reading() as session:
        incident = Queries().incident(session, told.opened().incident_id)
    assert incident is not None
    assert (incident.num_spikes, len(incident.events), len(incident.findings)) == (1, 2, 1)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "expected a gradloc message"),
        (b"\xff\xfe not json", "expected a gradloc message"),
        (b'{"type": "rickroll", "secret": "PROMPT"}', "unknown message type"),
        (b'{"type": "step_observed", "run_id": "qwen3-4b-grpo", "ts": 1, "step": -3}', "step"),
        (b"[" * 100_000, "expected a gradloc message"),
    ],
)
def test_poison_is_counted_and_logged_without_its_content(
    kit: Any, told: Any, bus: MemoryBus, database: Database, caplog: pytest.LogCaptureFixture, data: bytes, reason: str
) -> None:
    key = streams.stream(told.run_id, "steps")
    kit.tell(bus, told.started(), told.step(1, 0.4))
    bus.append(key, [data], length_max=10)
    kit.tell(bus, told.step(2, 0.4))
    consumer = Consumer(bus, database)
    with caplog.at_level(logging.WARNING):
        drain(consumer)
    assert steps_of(database, told.run_id) == [1, 2]
    assert consumer.consumption.rejected == {"steps": 1}
    assert key in caplog.text and reason in caplog.text
    assert "PROMPT" not in caplog.text


def test_a_message_that_cannot_be_stored_is_set_aside_alone(
    kit: Any, told: Any, bus: MemoryBus, database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    intruder = kit.Told(run_id="intruder")
    opened = told.opened()
    kit.tell(bus, told.started(), intruder.started(), opened)
    consumer = Consumer(bus, database)
    drain(consumer)
    kit.tell(bus, intruder.step(1, 0.4), intruder.finished(opened.incident_id), intruder.opened(5), told.step(2, 0.4))
    with caplog.at_level(logging.WARNING):
        drain(consumer)
    assert steps_of(database, "intruder") == [1] and steps_of(database, told.run_id) == [2]
    assert consumer.consumption.rejected == {"findings": 1}
    assert "a LocalizationFinished cannot be stored: IncidentOfOtherRun" in caplog.text
    with database.reading() as session:
        hit, own = (Queries().incident(session, each.incident_id) for each in (opened, intruder.opened(5)))
    assert hit is not None and hit.finding is None and own is not None


def test_the_detector_may_give_a_localization_up_in_its_own_stream(
    kit: Any, told: Any, bus: MemoryBus, database: Database
) -> None:
    opened = told.opened()
    failed = told.of(
        m.LocalizationFailed, opened.incident_id, localization_attempt=1, reason="no more", retryable=False
    )
    kit.tell(bus, told.started(), opened)
    bus.append(streams.stream(told.run_id, "incidents"), [encode(failed)], length_max=10)
    consumer = Consumer(bus, database)
    drain(consumer)
    assert not consumer.consumption.rejected
    with database.reading() as session:
        incident = Queries().incident(session, opened.incident_id)
    assert incident is not None and incident.status == "failed"


def test_a_message_in_the_wrong_stream_or_of_another_run_is_rejected(
    kit: Any, told: Any, bus: MemoryBus, database: Database
) -> None:
    steps = streams.stream(told.run_id, "steps")
    forged = told.finished(told.opened().incident_id)
    kit.tell(bus, told.started(), told.opened())
    bus.append(steps, [encode(forged), encode(kit.Told(run_id="other").step(1, 0.4))], length_max=10)
    bus.append(streams.REGISTRY, [encode(told.step(3, 0.4))], length_max=10)
    consumer = Consumer(bus, database)
    drain(consumer)
    assert consumer.consumption.rejected == {"steps": 3}
    with database.reading() as session:
        incident = Queries().incident(session, told.opened().incident_id)
    assert incident is not None and incident.finding is None


def test_a_cursor_beyond_the_streams_end_reads_from_the_start(
    kit: Any, told: Any, database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    first = MemoryBus()
    kit.tell(first, told.started(), *(told.step(step, 0.4) for step in range(1, 6)))
    drain(Consumer(first, database))
    emptied = MemoryBus()  # as Redis is after losing its data: the same keys, fewer entries
    kit.tell(emptied, told.started(), told.step(6, 0.4))
    consumer = Consumer(emptied, database)
    with caplog.at_level(logging.WARNING):
        drain(consumer)
    assert steps_of(database, told.run_id) == [1, 2, 3, 4, 5, 6]
    assert consumer.consumption.rewound["steps"] >= 1
    assert "data was lost; reading it from the start" in caplog.text


def test_the_keys_of_a_run_that_is_over_may_expire_without_a_word(
    kit: Any, told: Any, database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    first = MemoryBus()
    kit.tell(
        first,
        told.started(),
        told.step(1, 0.4),
        m.RunEnded(run_id=told.run_id, attempt=told.attempt, ts=told.ts, step=1),
    )
    drain(Consumer(first, database))
    consumer = Consumer(MemoryBus(), database)
    with caplog.at_level(logging.WARNING):
        drain(consumer)
    assert consumer.consumption.rewound["steps"] <= 1  # the registry, which never expires
    assert f"{told.run_id}" not in caplog.text


def test_redis_going_away_costs_one_line_and_nothing_else(
    kit: Any, told: Any, redis_server: Any, start: Callable[..., Reporter], caplog: pytest.LogCaptureFixture
) -> None:
    bus = RedisBus(redis_server.url, timeout_s=1.0)
    kit.tell(bus, told.started(), told.step(1, 0.4))
    reporter = start(bus)

    def norm() -> Any:
        return kit.ask(f"{reporter.url}/api/v1/runs/{told.run_id}").json.get("last_step")

    kit.until(norm, lambda step: step == 1, "step 1 is there")
    with caplog.at_level(logging.WARNING):
        redis_server.stop()
        kit.until(lambda: kit.ask(f"{reporter.url}/readyz").status, lambda status: status == 503, "not ready")
        assert kit.ask(f"{reporter.url}/healthz").status == 200
        redis_server.start()
        kit.tell(bus, told.started(), told.step(2, 0.4))
        kit.until(norm, lambda step: step == 2, "step 2 is there")
    kit.until(lambda: kit.ask(f"{reporter.url}/readyz").status, lambda status: status == 200, "ready again")
    lines = [record for record in caplog.records if "going on when it answers" in record.message]
    assert len(lines) == 1
    bus.close()


def test_of_two_reporters_on_one_database_one_gives_way(
    kit: Any, told: Any, bus: MemoryBus, database: Database
) -> None:
    kit.tell(bus, told.started(), told.step(1, 0.4))
    one, two = Consumer(bus, database), Consumer(bus, database)
    drain(one)
    two._cursors = {streams.REGISTRY: START}  # as if it had looked before `one` committed
    with pytest.raises(CursorMoved):
        two.consume_once()
    assert steps_of(database, told.run_id) == [1]


def test_ended_runs_still_get_their_late_findings(kit: Any, told: Any, bus: MemoryBus, database: Database) -> None:
    opened = told.opened()
    consumer = Consumer(bus, database)
    kit.tell(bus, told.started(), opened, m.RunEnded(run_id=told.run_id, ts=1, step=3))
    drain(consumer)
    kit.tell(bus, told.finished(opened.incident_id))
    drain(consumer)
    with database.reading() as session:
        incident = Queries().incident(session, opened.incident_id)
    assert incident is not None and incident.status == "located"


def test_steps_that_are_not_finite_are_kept_as_they_are(
    kit: Any, told: Any, bus: MemoryBus, database: Database
) -> None:
    kit.tell(bus, told.started(), told.step(1, math.nan), told.step(2, math.inf), told.step(3, 0.0))
    drain(Consumer(bus, database))
    with database.reading() as session:
        points = Queries().steps(session, told.run_id, first=0, last=None, max_points=10).points
    assert math.isnan(points[0].grad_norm) and points[1].grad_norm == math.inf and points[2].grad_norm == 0.0
