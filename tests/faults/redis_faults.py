"""Faults of Redis: gone, slow, full, read-only, empty, old, failed over to a replica that lags; and bad messages."""

import contextlib
import random
import shutil
import signal
import threading
import time

import redis
from fault import Heal, nothing
from world import World

from gradloc.workstation.processes import free_port
from gradloc_proto import streams


def _start_redis(world: World) -> Heal:
    def start() -> None:
        world.redis.start()
        world.wait_for_redis()

    return start


def restart_redis(world: World, dice: random.Random) -> tuple[float, Heal]:
    world.redis.kill()
    return dice.uniform(0, 4), _start_redis(world)


def pause_redis(world: World, dice: random.Random) -> tuple[float, Heal]:
    world.redis.send(signal.SIGSTOP)
    return dice.uniform(2, 8), lambda: world.redis.send(signal.SIGCONT)


def slow_redis(world: World, dice: random.Random) -> tuple[float, Heal]:
    """It answers, a large part of a second late each time."""
    over = threading.Event()
    child, stopped_s = world.redis, dice.uniform(0.2, 0.8)

    def slow() -> None:
        while not over.is_set():
            child.send(signal.SIGSTOP)
            time.sleep(stopped_s)
            child.send(signal.SIGCONT)
            over.wait(0.05)

    thread = threading.Thread(target=slow, daemon=True)
    thread.start()

    def heal() -> None:
        over.set()
        thread.join(timeout=5)

    return dice.uniform(3, 12), heal


def empty_redis(world: World, dice: random.Random) -> tuple[float, Heal]:
    """Restarted with nothing: a disk was lost."""
    world.redis.kill()
    shutil.rmtree(world.redis_folder / "appendonlydir", ignore_errors=True)
    return dice.uniform(0, 3), _start_redis(world)


def old_redis(world: World, dice: random.Random) -> tuple[float, Heal]:
    """Back at what it was some seconds ago: an older file was restored."""
    files, copy = world.redis_folder / "appendonlydir", world.folder / "old"
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


def fail_over_redis(world: World, dice: random.Random) -> tuple[float, Heal]:
    """A real replica that has not heard the last seconds takes the master's place and address."""
    port = free_port()
    folder = world.folder / f"replica-{world.num_redis}"
    heir = world.new_redis(folder, port, "--replicaof", "127.0.0.1", str(world.redis_port))
    heir.start()
    with contextlib.suppress(redis.RedisError, AssertionError):
        world.wait_for_redis(port)
        deadline = time.monotonic() + 5
        with world.client(port) as client:
            while client.info("replication")["master_link_status"] != "up" and time.monotonic() < deadline:
                time.sleep(0.05)
            client.replicaof("NO", "ONE")  # from here on it hears nothing

    def promote() -> None:
        world.redis.kill()
        heir.kill()
        # Started anew under the old address; its own file says all that it had heard.
        world.redis = world.new_redis(folder, world.redis_port)
        world.redis_folder = folder
        _start_redis(world)()

    return dice.uniform(1, 6), promote


def full_redis(world: World, dice: random.Random) -> tuple[float, Heal]:
    _configure(world, "maxmemory", 1_000_000)
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


def _append(world: World, run: str, entries: list[bytes]) -> tuple[float, Heal]:
    with contextlib.suppress(redis.RedisError), world.client() as client:
        for entry in entries:
            client.xadd(streams.stream(run, "steps"), {"m": entry})
    return 0.0, nothing


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
    return 0.0, nothing
