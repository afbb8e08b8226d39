"""The publisher: bounded, silent, and honest about what it lost; with a real Redis that dies."""

import subprocess
import time

import pytest

from gradloc.publisher import Publisher
from gradloc_proto import codec, streams
from gradloc_proto.bus import BusUnavailable
from gradloc_proto.memory_bus import MemoryBus
from gradloc_proto.messages import RunEnded, StepObserved
from gradloc_proto.redis_bus import RedisBus


def step(number: int) -> StepObserved:
    return StepObserved(run_id="r", ts=0.0, step=number, grad_norm=1.0)


def test_everything_arrives_in_order() -> None:
    bus = MemoryBus()
    publisher = Publisher(bus, "r")
    for number in range(1_000):
        publisher.put(step(number))
    publisher.close()
    found = [codec.decode(entry.data) for entry in bus.read_last(streams.stream("r", "steps"), count=2_000)]
    assert [message.step for message in found if isinstance(message, StepObserved)] == list(range(1_000))
    assert publisher.num_dropped == 0


def test_without_redis_the_queue_stays_bounded_and_losses_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    publisher = Publisher(RedisBus("redis://127.0.0.1:1"), "r", queue_length_max=10)
    for number in range(500):
        publisher.put(step(number))
    assert len(publisher._queue) <= 10
    publisher.close()
    assert publisher.num_dropped == 500
    assert len([record for record in caplog.records if "telemetry waits" in record.message]) == 1


def test_a_redis_that_dies_costs_only_what_it_held(redis_process: tuple[str, subprocess.Popen[bytes]]) -> None:
    url, process = redis_process
    publisher = Publisher(RedisBus(url, timeout_s=1.0), "r")
    publisher.put(step(0))
    reader = RedisBus(url)
    deadline = time.monotonic() + 10
    while not reader.length(streams.stream("r", "steps")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.kill()
    process.wait()
    with pytest.raises(BusUnavailable):
        reader.ping()
    reader.close()
    for number in range(1, 21):
        publisher.put(step(number))
    publisher.close()
    assert publisher.num_dropped == 20


def test_the_last_message_says_what_was_lost() -> None:
    bus = MemoryBus()
    publisher = Publisher(bus, "r")
    publisher.num_dropped = 7
    publisher.put(RunEnded(run_id="r", ts=0.0, step=3))
    publisher.close()
    (entry,) = bus.read_last(streams.stream("r", "steps"), count=5)
    ended = codec.decode(entry.data)
    assert isinstance(ended, RunEnded) and ended.num_events_dropped == 7
