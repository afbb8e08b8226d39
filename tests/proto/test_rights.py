"""Each role's Redis user can do its work, and nothing else (docs/protocol.md, "Rights")."""

import secrets
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from gradloc_proto import rights, streams
from gradloc_proto.bus import START, Bus, BusUnavailable, Commit, CommitResult, Output
from gradloc_proto.redis_bus import RedisBus
from gradloc_proto.streams import StreamName, stream


@pytest.fixture
def server(redis_server) -> Any:
    with redis.Redis(port=redis_server.port) as raw:
        if int(raw.info("server")["redis_version"].split(".")[0]) < 7:
            pytest.skip("rights to read or to write alone came with Redis 7.0")
    return redis_server


@pytest.fixture
def user(server) -> Iterator[Callable[..., tuple[RedisBus, redis.Redis]]]:
    """Makes a user of a role: its bus, and a bare client with the same password, as a villain would have."""
    made: list[Any] = []
    with redis.Redis(port=server.port) as raw:

        def make(role: rights.Role, runs: str = "*") -> tuple[RedisBus, redis.Redis]:
            name, password = f"{role}-{len(made)}", secrets.token_hex(16)
            raw.execute_command("ACL", "SETUSER", name, "reset", "on", f">{password}", *rights.rules(role, runs=runs))
            bus = RedisBus(f"redis://{name}:{password}@127.0.0.1:{server.port}/0")
            made.extend((name, bus, redis.Redis(port=server.port, username=name, password=password)))
            return bus, made[-1]

        yield make
        for one in made:
            if isinstance(one, str):
                raw.acl_deluser(one)
            else:
                one.close()


@pytest.fixture
def new_run() -> Callable[[], str]:
    return lambda: f"run-{secrets.token_hex(4)}"


@pytest.fixture
def everything(server) -> Iterator[Bus]:
    bus = RedisBus(server.url)
    yield bus
    bus.close()


def test_a_trainer_appends_to_its_run_and_reads_what_it_is_told(user, everything, new_run):
    run = new_run()
    trainer, _ = user("trainer", run)
    trainer.append(streams.REGISTRY, [b"started"], length_max=100)
    trainer.append(stream(run, "steps"), [b"step"], length_max=100)
    told: tuple[StreamName, ...] = ("limits", "control")
    for name in told:
        everything.append(stream(run, name), [b"told"], length_max=100)
        assert trainer.read_last(stream(run, name), count=1)[0].data == b"told"
        assert trainer.read({stream(run, name): START}, count=1)
        assert trainer.last_id(stream(run, name)) != START
    assert everything.length(stream(run, "steps")) == 1


def test_a_trainer_touches_nothing_else(user, everything, new_run):
    run, other = new_run(), new_run()
    for name in streams.STREAM_NAMES:
        everything.append(stream(other, name), [b"theirs"], length_max=100)
    trainer, villain = user("trainer", run)
    for name in ("limits", "control", "incidents", "findings"):
        with pytest.raises(BusUnavailable):
            trainer.append(stream(run, name), [b"x"], length_max=100)
    for name in streams.STREAM_NAMES:
        with pytest.raises(BusUnavailable):
            trainer.append(stream(other, name), [b"x"], length_max=100)
        with pytest.raises(BusUnavailable):
            trainer.read({stream(other, name): START}, count=1)
    for key in (streams.state(run), streams.cursor(run), streams.lease(run), stream(run, "steps")):
        refused(villain, "DEL", key)
        refused(villain, "SET", key, "x")
        refused(villain, "PEXPIRE", key, "1")
    refused(villain, "XRANGE", streams.REGISTRY, "-", "+")
    refused(villain, "XREAD", "STREAMS", streams.REGISTRY, "0")
    for command in (
        ("XTRIM", stream(run, "steps"), "MAXLEN", "0"),
        ("XDEL", stream(run, "steps"), "1-1"),
        ("XSETID", stream(run, "steps"), "1-1"),
        ("XGROUP", "CREATE", stream(run, "steps"), "g", "0"),
        ("EVAL", "return redis.call('DEL', KEYS[1])", "1", stream(run, "steps")),
        ("FCALL", "f", "0"),
        ("COPY", stream(run, "steps"), stream(other, "steps")),
        ("RENAME", stream(run, "steps"), stream(other, "steps")),
        *(("KEYS", "*"), ("SCAN", "0"), ("FLUSHALL",), ("CONFIG", "GET", "*"), ("ACL", "LIST"), ("MONITOR",)),
        *(("CLIENT", "LIST"), ("SHUTDOWN",), ("PUBLISH", "c", "x"), ("SUBSCRIBE", "c")),
    ):
        refused(villain, *command)


def refused(client: redis.Redis, *command: str) -> None:
    with pytest.raises(redis.exceptions.NoPermissionError):
        client.execute_command(*command)


def test_a_user_of_runs_that_begin_alike_has_all_of_them(user, new_run):
    trainer, _ = user("trainer", "team-a-*")
    trainer.append(stream("team-a-1", "steps"), [b"x"], length_max=100)
    with pytest.raises(BusUnavailable):
        trainer.append(stream("team-b-1", "steps"), [b"x"], length_max=100)


def test_detector_localizer_and_reporter_can_do_their_work(user, everything, new_run):
    run = new_run()
    detector, _ = user("detector")
    everything.append(stream(run, "steps"), [b"step"], length_max=100)
    assert detector.acquire_lease(run, "n", ttl_s=60) and detector.renew_lease(run, "n", ttl_s=60)
    assert detector.load_checkpoint(run) is None
    assert detector.read({stream(run, "steps"): START, streams.REGISTRY: START}, count=10)
    outputs = (Output(stream(run, "incidents"), b"i", 5), Output(stream(run, "limits"), b"l", 5))
    assert detector.commit(Commit(run, "n", "", "1-0", b"state", outputs)) is CommitResult.DONE
    detector.trim(stream(run, "steps"), before_id="1-0")
    detector.shorten(stream(run, "steps"), length_max=10)
    detector.expire(run, ttl_s=600)
    detector.expire(run, ttl_s=None)
    detector.append(stream(run, "control"), [b"tick"], length_max=100)
    assert detector.length(stream(run, "incidents")) == 1
    detector.release_lease(run, "n")
    assert detector.acquire_lease(streams.JOB_POOL, "n", ttl_s=60)
    detector.release_lease(streams.JOB_POOL, "n")

    localizer, _ = user("localizer")
    localizer.append(stream(run, "findings"), [b"finding"], length_max=100)
    reporter, _ = user("reporter")
    reporter.ping()
    assert len(reporter.read({stream(run, name): START for name in streams.STREAM_NAMES}, count=10)) == 5
    assert reporter.last_id(stream(run, "findings")) != START
    reporter.append(stream(run, "control"), [b"wish"], length_max=100)


@pytest.mark.parametrize(
    ("role", "writes"), [("localizer", {"findings"}), ("reporter", {"control"}), ("trainer", {"steps"})]
)
def test_nobody_writes_anothers_facts(user, new_run, role, writes):
    run = new_run()
    bus, villain = user(role)
    for name in streams.STREAM_NAMES:
        if name in writes:
            bus.append(stream(run, name), [b"x"], length_max=100)
        else:
            with pytest.raises(BusUnavailable):
                bus.append(stream(run, name), [b"x"], length_max=100)
    for key in (streams.state(run), streams.cursor(run), streams.lease(run)):
        refused(villain, "SET", key, "x")


@pytest.mark.parametrize("runs", ["", "**", "a*b", "*a", "a b", "{a}", "a?", "[ab]", "a" * 200, "a\n"])
def test_what_names_no_runs_is_refused(runs):
    with pytest.raises(ValueError, match="names no runs"):
        rights.rules("trainer", runs=runs)
