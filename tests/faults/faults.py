"""What may strike: each fault does harm, and says how to heal it and after how many seconds.

Names are those of issue lists and logs. All randomness comes from the schedule's dice.
"""

import contextlib
import random
import shutil
import signal
import sqlite3
from collections.abc import Callable

import redis
from world import Child, World

from gradloc_proto import streams

Heal = Callable[[], None]
Fault = Callable[[World, random.Random], tuple[float, Heal]]


def _nothing() -> None:
    return


def _paused(child: Child, seconds: float) -> tuple[float, Heal]:
    child.send(signal.SIGSTOP)
    return seconds, lambda: child.send(signal.SIGCONT)


def _killed(child: Child, seconds: float) -> tuple[float, Heal]:
    child.kill()
    return seconds, child.start


def kill_detector(world: World, dice: random.Random) -> tuple[float, Heal]:
    return _killed(dice.choice(world.detectors), dice.uniform(0, 3))


def kill_both_detectors(world: World, dice: random.Random) -> tuple[float, Heal]:
    for child in world.detectors:
        child.kill()
    return dice.uniform(0, 6), lambda: [child.start() for child in world.detectors if not child.alive] and None


def pause_detector(world: World, dice: random.Random) -> tuple[float, Heal]:
    return _paused(dice.choice(world.detectors), dice.uniform(3, 20))


def kill_reporter(world: World, dice: random.Random) -> tuple[float, Heal]:
    return _killed(world.reporter, dice.uniform(0, 3))


def pause_reporter(world: World, dice: random.Random) -> tuple[float, Heal]:
    return _paused(world.reporter, dice.uniform(3, 15))


def _start_redis(world: World) -> Heal:
    def start() -> None:
        world.redis.start()
        world.wait_for_redis()

    return start


def restart_redis(world: World, dice: random.Random) -> tuple[float, Heal]:
    world.redis.kill()
    return dice.uniform(0, 4), _start_redis(world)


def pause_redis(world: World, dice: random.Random) -> tuple[float, Heal]:
    return _paused(world.redis, dice.uniform(2, 8))


def empty_redis(world: World, dice: random.Random) -> tuple[float, Heal]:
    """Restarted with nothing: a disk was lost."""
    world.redis.kill()
    shutil.rmtree(world.folder / "redis" / "appendonlydir", ignore_errors=True)
    return dice.uniform(0, 3), _start_redis(world)


def old_redis(world: World, dice: random.Random) -> tuple[float, Heal]:
    """Back at what it was some seconds ago: a replica without the last writes was promoted."""
    files, copy = world.folder / "redis" / "appendonlydir", world.folder / "old"
    shutil.rmtree(copy, ignore_errors=True)
    with contextlib.suppress(OSError, shutil.Error):
        shutil.copytree(files, copy)

    def back() -> None:
        if copy.exists():
            world.redis.kill()
            shutil.rmtree(files, ignore_errors=True)
            shutil.copytree(copy, files)
            _start_redis(world)()

    return dice.uniform(1, 6), back


def full_redis(world: World, dice: random.Random) -> tuple[float, Heal]:
    with contextlib.suppress(redis.RedisError), world.client() as client:
        client.config_set("maxmemory", 1_000_000)
    return dice.uniform(2, 8), lambda: _configure(world, "maxmemory", 0)


def _configure(world: World, name: str, value: object) -> None:
    with contextlib.suppress(redis.RedisError), world.client() as client:
        client.config_set(name, value)


def read_only_redis(world: World, dice: random.Random) -> tuple[float, Heal]:
    """It becomes a replica of nobody: reads go on, writes are refused."""
    with contextlib.suppress(redis.RedisError), world.client() as client:
        client.replicaof("127.0.0.1", "1")

    def back() -> None:
        with contextlib.suppress(redis.RedisError), world.client() as client:
            client.replicaof("NO", "ONE")

    return dice.uniform(2, 8), back


def kill_trainer(world: World, dice: random.Random) -> tuple[float, Heal]:
    run = dice.choice(world.runs)
    world.trainers[run].kill()
    return dice.uniform(0, 3), lambda: world.restart_trainer(run)


def pause_trainer(world: World, dice: random.Random) -> tuple[float, Heal]:
    return _paused(world.trainers[dice.choice(world.runs)], dice.uniform(2, 10))


def break_slack(world: World, dice: random.Random) -> tuple[float, Heal]:
    world.channel.broken = True
    return dice.uniform(2, 10), lambda: setattr(world.channel, "broken", False)


def lock_database(world: World, dice: random.Random) -> tuple[float, Heal]:
    """Somebody else holds the database's write lock."""
    connection = sqlite3.connect(world.database, timeout=5, isolation_level=None, check_same_thread=False)
    with contextlib.suppress(sqlite3.OperationalError):
        connection.execute("BEGIN IMMEDIATE")
    return dice.uniform(2, 8), connection.close


def _append(world: World, run: str, entries: list[bytes]) -> tuple[float, Heal]:
    with contextlib.suppress(redis.RedisError), world.client() as client:
        for entry in entries:
            client.xadd(streams.stream(run, "steps"), {"m": entry})
    return 0.0, _nothing


def repeat_messages(world: World, dice: random.Random) -> tuple[float, Heal]:
    """The last messages of a run once more, in another order."""
    run = dice.choice(world.runs)
    entries: list[bytes] = []
    with contextlib.suppress(redis.RedisError), world.client() as client:
        entries = [fields[b"m"] for _, fields in client.xrevrange(streams.stream(run, "steps"), count=60)]
    dice.shuffle(entries)
    return _append(world, run, entries)


def corrupt_messages(world: World, dice: random.Random) -> tuple[float, Heal]:
    """Noise, halves of messages, another run's, huge ones, and those of versions to come."""
    run = dice.choice(world.runs)
    with contextlib.suppress(redis.RedisError), world.client() as client:
        found = client.xrevrange(streams.stream(run, "steps"), count=1)
        whole = found[0][1][b"m"] if found else b"{}"
        bad = [
            dice.randbytes(200),
            whole[: len(whole) // 2],
            whole.replace(run.encode(), b"somebody-else"),
            whole.replace(b'"schema_version":"1.0"', b'"schema_version":"2.0"'),
            whole.replace(b'"schema_version":"1.0"', b'"schema_version":"1.9","from_the_future":1'),
            b'{"type":"step_observed","pad":"' + b"x" * 2_000_000 + b'"}',
            b"",
        ]
        return _append(world, run, bad)
    return 0.0, _nothing


FAULTS: dict[str, Fault] = {
    one.__name__.replace("_", "-"): one
    for one in (
        kill_detector, kill_both_detectors, pause_detector, kill_reporter, pause_reporter, restart_redis, pause_redis,
        empty_redis, old_redis, full_redis, read_only_redis, kill_trainer, pause_trainer, break_slack, lock_database,
        repeat_messages, corrupt_messages,
    )
}  # fmt: skip
# One at a time: what one of them heals must not be another's harm.
EXCLUSIVE = {name: name.split("-")[-1].rstrip("s") for name in FAULTS}
