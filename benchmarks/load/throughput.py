"""One process folds a backlog as fast as it can, beside a bare loop over the same events."""

import time
from collections.abc import Callable

import orjson
import redis
from load.events import Events

from gradloc_detector.service import DetectorService
from gradloc_proto import streams
from gradloc_proto.redis_bus import RedisBus

NUM_RUNS = 16
READ_COUNT = 256


def fill(client: "redis.Redis[bytes]", events: Events, num_steps: int) -> int:
    """Publish the whole life of NUM_RUNS runs; returns the number of messages in their streams."""
    for run in _runs():
        client.xadd(streams.REGISTRY, {"m": events.started(run)})
        data = [events.started(run), *(events.step(run, n, 1_000.0 + n, shape=7 * n) for n in range(num_steps))]
        for start in range(0, len(data), 500):
            with client.pipeline(transaction=False) as pipeline:
                for item in data[start : start + 500]:
                    pipeline.xadd(streams.stream(run, "steps"), {"m": item})
                pipeline.execute()
    return NUM_RUNS * (num_steps + 1)


def bare(client: "redis.Redis[bytes]") -> int:
    """The floor: redis-py with hiredis, XREAD of 256, orjson, nothing done with it."""
    num_read = 0
    for run in _runs():
        key, cursor = streams.stream(run, "steps"), b"0-0"
        while reply := client.xread({key: cursor}, count=READ_COUNT):
            rows = reply[0][1] if isinstance(reply, list) else next(iter(reply.values()))[0]
            for _, fields in rows:
                orjson.loads(fields[b"m"])
            num_read += len(rows)
            cursor = rows[-1][0]
    return num_read


def detector(url: str, num_messages: int) -> int:
    """Read, fold and commit so many messages or some more, as the service does: leases, incidents, limits,
    checkpoints. Returns how many."""
    bus = RedisBus(url)
    service = DetectorService(bus)
    num_folded = 0
    while num_folded < num_messages:
        num_folded += service.turn()
    service.close()
    bus.close()
    return num_folded


def forget(client: "redis.Redis[bytes]") -> None:
    """Undo what a detector wrote, so that the next one starts at the beginning."""
    for run in _runs():
        client.delete(
            *(streams.stream(run, name) for name in ("incidents", "limits", "control")),
            streams.state(run), streams.cursor(run), streams.lease(run), streams.dead_letters(run),
        )  # fmt: skip


def measure(url: str, *, num_steps: int, num_rounds: int, seed: int) -> dict[str, object]:
    """Best of `num_rounds`, by turns: what else runs on the machine slows rounds, it never speeds one up.

    "young" are the first READ_COUNT messages of each run, whose limits are renewed and published at each step;
    "settled" is the rest, as in a run's second hour; "whole" is both, from a run's first step.
    """
    rounds: list[dict[str, tuple[float, float, int]]] = []
    with redis.Redis.from_url(url) as client:
        num_messages = fill(client, Events(seed), num_steps)
        for _ in range(num_rounds):
            times = {"bare": _timed(lambda: bare(client))}
            times["young"] = _timed(lambda: detector(url, NUM_RUNS * READ_COUNT))
            num_left = num_messages - times["young"][2]
            times["settled"] = _timed(lambda: detector(url, num_left))  # noqa: B023 (called at once)
            times["whole"] = _joined(times["young"], times["settled"])
            rounds.append(times)
            forget(client)
    wall = {name: round(1 / min(times[name][0] for times in rounds)) for name in rounds[0]}
    core = {name: round(1 / min(times[name][1] for times in rounds)) for name in rounds[0]}
    return {
        "num_runs": NUM_RUNS,
        "steps_per_run": num_steps,
        "num_rounds": num_rounds,
        "events_per_s": wall,
        "events_per_core_s": core,
        "ratio": round(wall["settled"] / wall["bare"], 3),
        "ratio_of_core_time": round(core["settled"] / core["bare"], 3),
        "ratio_whole": round(wall["whole"] / wall["bare"], 3),
        "ratio_whole_of_core_time": round(core["whole"] / core["bare"], 3),
        "ratio_of_core_time_each_round": [round(times["bare"][1] / times["settled"][1], 3) for times in rounds],
    }


def _timed(work: Callable[[], int]) -> tuple[float, float, int]:
    """Seconds an event, by the clock and of this process's core; and the number of events."""
    wall, core = time.perf_counter(), time.process_time()
    num = work()
    return (time.perf_counter() - wall) / num, (time.process_time() - core) / num, num


def _joined(one: tuple[float, float, int], other: tuple[float, float, int]) -> tuple[float, float, int]:
    num = one[2] + other[2]
    return (one[0] * one[2] + other[0] * other[2]) / num, (one[1] * one[2] + other[1] * other[2]) / num, num


def _runs() -> list[str]:
    return [f"load-{number:04d}" for number in range(NUM_RUNS)]
