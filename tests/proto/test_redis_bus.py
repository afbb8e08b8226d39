"""What only Redis can do to a bus: die, hang, restart, be full, be written to by somebody hostile."""

import os
import signal

import pytest
import redis

from gradloc_proto import streams
from gradloc_proto.bus import START, BusUnavailable, Checkpoint, Commit, CommitResult, Output
from gradloc_proto.redis_bus import RedisBus, display_url

ID_MAX = 2**64 - 1
SECRET = "s3cr3t"


@pytest.fixture
def bus(redis_server):
    bus = RedisBus(redis_server.url)
    yield bus
    bus.close()


@pytest.fixture
def raw(redis_server):
    """What an operator or a hostile trainer can do with a client of their own."""
    client = redis.Redis.from_url(redis_server.url)
    client.flushall()
    yield client
    client.close()


def everything(raw):
    """All keys with their contents, the lease's remaining time left out."""
    found = {}
    for key in sorted(raw.keys()):
        kind = raw.type(key)
        found[key] = raw.xrange(key) if kind == b"stream" else raw.dump(key)
    return found


class TestCommitRefused:
    """Neither Lua nor EXEC rolls back, so a commit that cannot finish must not begin."""

    def commit(self, bus, run="run"):
        outputs = (
            Output(streams.stream(run, "incidents"), b"i", 10),
            Output(streams.stream(run, "limits"), b"l", 10),
        )
        assert bus.acquire_lease(run, "n", ttl_s=60)
        return lambda: bus.commit(Commit(run, "n", "", "1-0", b"state", outputs))

    @pytest.mark.parametrize("name", ["incidents", "limits"])
    def test_an_output_of_another_type(self, bus, raw, name):
        commit = self.commit(bus)
        raw.set(streams.stream("run", name), "a string")
        before = everything(raw)
        assert commit() is CommitResult.REFUSED
        assert everything(raw) == before

    @pytest.mark.parametrize("key", [streams.state("run"), streams.cursor("run")])
    def test_state_or_cursor_of_another_type(self, bus, raw, key):
        commit = self.commit(bus)
        raw.rpush(key, "a list")
        before = everything(raw)
        assert commit() is CommitResult.REFUSED
        assert everything(raw) == before

    def test_a_lease_of_another_type(self, bus, raw):
        commit = self.commit(bus)
        raw.delete(streams.lease("run"))
        raw.rpush(streams.lease("run"), "n")
        before = everything(raw)
        assert commit() is CommitResult.LEASE_LOST
        assert everything(raw) == before

    @pytest.mark.parametrize("left_ms", [7_200_000, None])
    def test_a_dead_owners_lease_ends_though_redis_clock_was_set_back(self, bus, raw, left_ms):
        raw.set(streams.lease("run"), "dead", px=left_ms)
        assert not bus.acquire_lease("run", "mine", ttl_s=15)
        assert 0 < raw.pttl(streams.lease("run")) <= 15_000

    def test_a_lease_is_not_made_longer_by_those_who_wait(self, bus, raw):
        raw.set(streams.lease("run"), "other", px=900)
        assert not bus.acquire_lease("run", "mine", ttl_s=15)
        assert 0 < raw.pttl(streams.lease("run")) <= 900

    @pytest.mark.parametrize("entry_id", [f"{ID_MAX}-{ID_MAX}", f"{ID_MAX}-0", f"{10**15}-0"])
    @pytest.mark.parametrize("name", ["incidents", "limits"])
    def test_an_output_with_an_absurd_last_id(self, bus, raw, name, entry_id):
        commit = self.commit(bus)
        raw.xadd(streams.stream("run", name), {"m": "hostile"}, id=entry_id)
        before = everything(raw)
        assert commit() is CommitResult.REFUSED
        assert everything(raw) == before

    def test_an_absurd_last_id_of_a_stream_trimmed_to_nothing(self, bus, raw):
        commit = self.commit(bus)
        key = streams.stream("run", "limits")
        raw.xadd(key, {"m": "hostile"}, id=f"{ID_MAX}-{ID_MAX}")
        raw.xtrim(key, maxlen=0, approximate=False)
        before = everything(raw)
        assert commit() is CommitResult.REFUSED
        assert everything(raw) == before

    def test_a_last_id_ahead_of_the_clock_still_leaves_room(self, bus, raw):
        commit = self.commit(bus)
        raw.xadd(streams.stream("run", "incidents"), {"m": "clock ran fast"}, id=f"{10**14}-{ID_MAX}")
        assert commit() is CommitResult.DONE
        assert bus.load_checkpoint("run") == Checkpoint("1-0", b"state")

    def test_a_full_redis(self, bus, raw):
        commit = self.commit(bus)
        before = everything(raw)
        raw.config_set("maxmemory", "1")
        try:
            with pytest.raises(BusUnavailable, match=r"(?i)memory"):
                commit()
            assert everything(raw) == before
        finally:
            raw.config_set("maxmemory", "0")
        assert commit() is CommitResult.DONE


class TestHostileWriter:
    """A run's own user may append and, by append rights alone, trim and use absurd ids."""

    def test_an_absurd_id_in_one_run_hides_no_other_run(self, bus, raw):
        bad, good = streams.stream("bad", "steps"), streams.stream("good", "steps")
        raw.xadd(bad, {"m": "hostile"}, id=f"{ID_MAX}-{ID_MAX}")
        bus.append(good, [b"fine"], length_max=10)
        cursor = bus.read({bad: START}, count=5)[bad][-1].id
        assert list(bus.read({bad: cursor, good: START}, count=5)) == [good]
        with pytest.raises(BusUnavailable, match="Redis at redis://127"):
            bus.append(bad, [b"no room for an id"], length_max=10)

    def test_entries_without_our_field_arrive_as_bytes_that_no_reader_accepts(self, bus, raw):
        key = streams.stream("run", "steps")
        raw.xadd(key, {"other": "x"})
        raw.xadd(key, {"m": "y", "other": "x"})
        assert [entry.data for entry in bus.read({key: START}, count=5)[key]] == [b"", b"y"]
        assert [entry.data for entry in bus.read_last(key, count=5)] == [b"", b"y"]

    def test_a_stream_deleted_under_the_reader_shows_as_loss(self, bus, raw):
        key = streams.stream("run", "steps")
        bus.append(key, [b"x"], length_max=10)
        cursor = bus.last_id(key)
        raw.delete(key)
        assert bus.last_id(key) == START  # behind the cursor: the reader must start again
        assert bus.read({key: cursor}, count=5) == {}

    def test_a_lost_state_still_has_its_cursor_and_a_lost_cursor_no_state(self, bus, raw):
        assert bus.acquire_lease("run", "n", ttl_s=60)
        assert bus.commit(Commit("run", "n", "", "1-0", b"state")) is CommitResult.DONE
        raw.delete(streams.state("run"))
        assert bus.load_checkpoint("run") == Checkpoint("1-0", b"")
        assert bus.commit(Commit("run", "n", "1-0", "2-0", b"state")) is CommitResult.DONE
        raw.delete(streams.cursor("run"))
        assert bus.load_checkpoint("run") is None
        assert bus.commit(Commit("run", "n", "", "3-0", b"state")) is CommitResult.DONE

    def test_a_key_of_another_type_is_said_not_swallowed(self, bus, raw):
        raw.set("gradloc:string", "x")
        for call in (
            lambda: bus.read({"gradloc:string": START}, count=1),
            lambda: bus.read({"gradloc:string": START}, count=1, block_s=0.1),
            lambda: bus.append("gradloc:string", [b"x"], length_max=1),
            lambda: bus.last_id("gradloc:string"),
        ):
            with pytest.raises(BusUnavailable, match=r"WRONGTYPE|wrong kind"):
                call()


def every_call(bus):
    commit = Commit("run", "n", "", "1-0", b"", (Output("gradloc:{run}:limits", b"x", 1),))
    return {
        "append": lambda: bus.append("k", [b"x"], length_max=5),
        "read": lambda: bus.read({"k": START}, count=1),
        "read several": lambda: bus.read({"k": START, "l": START}, count=1, block_s=0.1),
        "read waiting": lambda: bus.read({"k": START}, count=1, block_s=0.1),
        "read_last": lambda: bus.read_last("k", count=1),
        "length": lambda: bus.length("k"),
        "last_id": lambda: bus.last_id("k"),
        "trim": lambda: bus.trim("k", before_id="1-0"),
        "acquire": lambda: bus.acquire_lease("run", "n", ttl_s=60),
        "renew": lambda: bus.renew_lease("run", "n", ttl_s=60),
        "release": lambda: bus.release_lease("run", "n"),
        "load": lambda: bus.load_checkpoint("run"),
        "commit": lambda: bus.commit(commit),
        "ping": bus.ping,
    }


class TestOutage:
    def test_every_call_to_a_dead_redis_says_so_without_the_password(self, own_server):
        own_server.start()
        bus = RedisBus(f"redis://someone:{SECRET}@127.0.0.1:{own_server.port}/0", timeout_s=1.0)
        own_server.stop()
        for name, call in every_call(bus).items():
            with pytest.raises(BusUnavailable) as caught:
                call()
            assert SECRET not in str(caught.value), name
            assert f"redis://127.0.0.1:{own_server.port}/0" in str(caught.value), name
            assert "\n" not in str(caught.value), name
            assert caught.value.__cause__ is None, name  # the client's error may hold more than ours
        bus.close()

    def test_a_wrong_password_is_unavailable_without_telling_it(self, own_server):
        own_server.arguments = ("--requirepass", "right")
        own_server.start()
        bus = RedisBus(f"redis://:{SECRET}@127.0.0.1:{own_server.port}/0")
        with pytest.raises(BusUnavailable) as caught:
            bus.ping()
        assert SECRET not in str(caught.value)
        bus.close()

    def test_a_redis_that_hangs_is_unavailable_and_then_back(self, own_server):
        own_server.start()
        bus = RedisBus(own_server.url, timeout_s=0.3)
        bus.append("k", [b"before"], length_max=5)
        assert own_server.process is not None
        os.kill(own_server.process.pid, signal.SIGSTOP)
        try:
            with pytest.raises(BusUnavailable):
                bus.length("k")
        finally:
            os.kill(own_server.process.pid, signal.SIGCONT)
        assert bus.length("k") == 1
        bus.close()

    def test_after_a_restart_every_call_works_again(self, own_server):
        own_server.start()
        bus = RedisBus(own_server.url)
        for call in every_call(bus).values():
            call()
        own_server.stop()
        with pytest.raises(BusUnavailable):
            bus.ping()
        own_server.start()  # empty: streams, scripts and leases are gone
        for call in every_call(bus).values():
            call()
        bus.close()

    def test_data_lost_in_a_restart_is_seen_by_the_cursor(self, own_server):
        own_server.start()
        bus = RedisBus(own_server.url)
        bus.append("k", [b"x"], length_max=5)
        cursor = bus.last_id("k")
        own_server.stop()
        own_server.start()
        assert bus.last_id("k") == START < cursor
        bus.close()

    def test_data_kept_in_a_restart_goes_on_from_the_cursor(self, own_server):
        own_server.arguments = ("--appendonly", "yes", "--appendfsync", "always")
        own_server.start()
        bus = RedisBus(own_server.url)
        assert bus.acquire_lease("run", "n", ttl_s=600)
        output = (Output(streams.stream("run", "incidents"), b"i", 5),)
        assert bus.commit(Commit("run", "n", "", "1-0", b"state", output)) is CommitResult.DONE
        own_server.stop()
        own_server.start()
        assert bus.load_checkpoint("run") == Checkpoint("1-0", b"state")
        assert bus.commit(Commit("run", "n", "1-0", "2-0", b"more", output)) is CommitResult.DONE
        assert bus.length(streams.stream("run", "incidents")) == 2
        bus.close()


class TestUrl:
    @pytest.mark.parametrize(
        "url",
        [
            f"redis://user:{SECRET}@127.0.0.1:6379/0",
            f"redis://:{SECRET}/x@127.0.0.1:6379/0",
            f"redis://:{SECRET}#x@127.0.0.1:6379/0",
            f"redis://:{SECRET}?x@127.0.0.1:6379/0",
            f"redis://:a@{SECRET}@127.0.0.1:6379/0",
            f"rediss://127.0.0.1:6379/0?password={SECRET}",
            f"http://user:{SECRET}@127.0.0.1/",
            f"redis://:{SECRET}@host:port/0",
            SECRET,
            "",
        ],
    )
    def test_whatever_the_url_its_secret_is_never_shown(self, url):
        assert SECRET not in display_url(url)
        try:
            RedisBus(url).close()
        except ValueError as error:
            assert SECRET not in str(error)
            assert "expected redis://" in str(error)

    @pytest.mark.parametrize(
        "url", ["", "localhost:6379", "http://127.0.0.1:6379", "redis://h:port/0", "redis://h:99999"]
    )
    def test_what_is_no_redis_url_is_refused_with_what_was_expected(self, url):
        with pytest.raises(ValueError, match="expected redis://"):
            RedisBus(url)

    def test_a_host_that_cannot_be_is_unavailable(self):
        bus = RedisBus("redis://a..b:6379/0")
        with pytest.raises(BusUnavailable):
            bus.ping()
        bus.close()

    def test_a_display_url_keeps_what_helps(self):
        assert display_url("rediss://u:p@redis.example:6380/2") == "rediss://redis.example:6380/2"


class TestMemory:
    """A bound of entries is one of memory: what Redis keeps beside the messages comes out of it."""

    @pytest.mark.parametrize("num_bytes", [250, 1_500, 2_842, 12_000])
    def test_a_full_stream_takes_no_more_than_its_bound_of_messages(self, bus, raw, num_bytes):
        key, length_max = streams.stream("run", "steps"), 1_000
        bus.append(key, [os.urandom(num_bytes) for _ in range(1_500)], length_max=length_max)
        assert 0.7 * length_max < bus.length(key) < length_max
        assert raw.memory_usage(key, samples=0) <= length_max * num_bytes

    def test_so_does_one_filled_by_commits(self, bus, raw):
        key = streams.stream("run", "incidents")
        assert bus.acquire_lease("run", "n", ttl_s=60)
        outputs = tuple(Output(key, os.urandom(2_000), 200) for _ in range(500))
        assert bus.commit(Commit("run", "n", "", "1-0", b"state", outputs)) is CommitResult.DONE
        assert raw.memory_usage(key, samples=0) <= 200 * 2_000
