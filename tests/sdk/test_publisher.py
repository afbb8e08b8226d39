"""The publisher: bounded, silent, and honest about what it lost; with a real Redis that dies."""

import subprocess
import time
from collections.abc import Callable

import pytest
import redis

from gradloc.publisher import Publisher
from gradloc_proto import codec, streams
from gradloc_proto.bus import Bus, BusUnavailable
from gradloc_proto.memory_bus import MemoryBus
from gradloc_proto.messages import Limits, LimitsChanged, RunEnded, RunStarted, StepObserved
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


def announced(bus: Bus) -> int:
    return sum(isinstance(codec.decode(entry.data), RunStarted) for entry in bus.read_last(streams.REGISTRY, count=100))


def test_a_run_is_announced_again_after_redis_lost_everything(
    redis_process: tuple[str, subprocess.Popen[bytes]],
) -> None:
    url, process = redis_process
    publisher = Publisher(RedisBus(url, timeout_s=1.0), "r")
    publisher.put(RunStarted(run_id="r", ts=0.0))
    reader = RedisBus(url)
    # Both streams: with the second refused, the announcement would come back as it was, not as one that is made again.
    wait_for(lambda: announced(reader) == 1 and reader.length(streams.stream("r", "steps")) == 1)
    process.kill()
    process.wait()
    publisher.put(step(0))
    wait_for(lambda: publisher._down)
    again = subprocess.Popen(process.args, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: _answers(reader))
        publisher.put(step(1))
        wait_for(lambda: announced(reader) == 1)
        found = [codec.decode(entry.data) for entry in reader.read_last(streams.stream("r", "steps"), count=9)]
        assert isinstance(found[0], RunStarted) and found[0].first_step == 0  # before the steps that follow
        publisher.close()
    finally:
        again.kill()
        again.wait()


def test_a_run_is_announced_again_after_an_outage_that_nobody_felt(
    redis_process: tuple[str, subprocess.Popen[bytes]],
) -> None:
    url, _ = redis_process
    publisher = Publisher(RedisBus(url), "r")
    publisher.put(RunStarted(run_id="r", ts=0.0))
    publisher.put(step(7))
    reader = RedisBus(url)
    wait_for(lambda: reader.length(streams.stream("r", "steps")) == 2)
    with redis.Redis.from_url(url) as client:  # another one at the same address, which the client finds by itself
        client.flushall()
        client.client_kill_filter(_type="normal", skipme=True)
    publisher.put(step(8))
    wait_for(lambda: announced(reader) == 1)
    again = codec.decode(reader.read_last(streams.REGISTRY, count=1)[0].data)
    assert isinstance(again, RunStarted) and again.first_step == 7
    publisher.close()
    assert publisher.num_dropped == 0


def _answers(bus: RedisBus) -> bool:
    try:
        bus.ping()
    except BusUnavailable:
        return False
    return True


def test_a_run_that_nobody_watches_announces_itself_again_but_ever_more_rarely() -> None:
    bus = MemoryBus()
    publisher = Publisher(bus, "r", unwatched_s=0.2)
    publisher.put(RunStarted(run_id="r", ts=0.0))
    started = time.monotonic()
    while time.monotonic() - started < 2.0:
        for number in range(100):
            publisher.put(step(number))
        time.sleep(0.05)
    publisher.close()
    assert 2 <= announced(bus) <= 5  # at .2, .6 and 1.4 s


def test_a_run_that_is_watched_is_announced_once() -> None:
    bus = MemoryBus()
    publisher = Publisher(bus, "r", unwatched_s=0.2)
    publisher.put(RunStarted(run_id="r", ts=0.0))
    for version in range(20):
        limits = LimitsChanged(run_id="r", ts=0.0, step=version, limits=Limits(version=version))
        bus.append(streams.stream("r", "limits"), [codec.encode(limits)], length_max=10)
        for number in range(100):
            publisher.put(step(number))
        time.sleep(0.05)
    publisher.close()
    assert announced(bus) == 1


def test_a_slow_trainer_is_not_taken_for_one_that_nobody_watches() -> None:
    bus = MemoryBus()
    publisher = Publisher(bus, "r", unwatched_s=0.1)
    publisher.put(RunStarted(run_id="r", ts=0.0))
    for number in range(5):
        publisher.put(step(number))
        time.sleep(0.1)
    publisher.close()
    assert announced(bus) == 1


def wait_for(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
