"""What every bus must do: MemoryBus and RedisBus, on each Redis version at hand."""

import threading
from itertools import pairwise

import pytest

from gradloc_proto import streams
from gradloc_proto.bus import START, Bus, Checkpoint, Commit, CommitResult, Output

MANY = 1_000_000


def data_of(bus: Bus, key: str, cursor: str = START, count: int = 10_000) -> list[bytes]:
    return [entry.data for entry in bus.read({key: cursor}, count=count).get(key, [])]


def commit_of(run: str, nonce: str, expected: str = "", new: str = "1-0", **more: object) -> Commit:
    outputs = more.pop("outputs", ())
    assert not more and isinstance(outputs, tuple)
    return Commit(run, nonce, expected, new, b"state at " + new.encode(), outputs)


class TestStreams:
    def test_entries_come_back_in_the_order_they_went_in(self, rig):
        key = rig.new_name()
        rig.bus.append(key, [b"a", b"b"], length_max=MANY)
        rig.bus.append(key, [b"c"], length_max=MANY)
        assert data_of(rig.other, key) == [b"a", b"b", b"c"]

    def test_any_bytes_survive(self, rig):
        key = rig.new_name()
        items = [b"", bytes(range(256)), b"\r\n*3\r\n", b"x" * 1_000_000]
        rig.bus.append(key, items, length_max=MANY)
        assert data_of(rig.other, key) == items

    def test_a_reader_goes_on_after_its_cursor(self, rig):
        key = rig.new_name()
        rig.bus.append(key, [b"%d" % number for number in range(10)], length_max=MANY)
        first = rig.bus.read({key: START}, count=4)[key]
        assert [entry.data for entry in first] == [b"0", b"1", b"2", b"3"]
        assert data_of(rig.bus, key, first[-1].id) == [b"4", b"5", b"6", b"7", b"8", b"9"]

    def test_ids_grow(self, rig):
        key = rig.new_name()
        rig.bus.append(key, [b"x"] * 50, length_max=MANY)
        ids = [tuple(map(int, entry.id.split("-"))) for entry in rig.bus.read({key: START}, count=50)[key]]
        assert all(earlier < later for earlier, later in pairwise(ids))

    def test_several_keys_are_read_at_once_and_empty_ones_left_out(self, rig):
        one, two, none = rig.new_name(), rig.new_name(), rig.new_name()
        rig.bus.append(one, [b"1"] * 3, length_max=MANY)
        rig.bus.append(two, [b"2"], length_max=MANY)
        found = rig.bus.read({one: START, two: START, none: START}, count=2)
        assert {key: [entry.data for entry in entries] for key, entries in found.items()} == {
            one: [b"1", b"1"],
            two: [b"2"],
        }

    def test_nothing_asked_is_nothing_read(self, rig):
        assert rig.bus.read({}, count=5) == {}
        assert rig.bus.read({rig.new_name(): START}, count=5) == {}

    def test_appending_nothing_makes_no_stream(self, rig):
        key = rig.new_name()
        rig.bus.append(key, [], length_max=5)
        assert rig.bus.length(key) == 0
        assert rig.bus.last_id(key) == START

    def test_the_newest_are_read_oldest_first(self, rig):
        key = rig.new_name()
        assert rig.bus.read_last(key, count=3) == []
        rig.bus.append(key, [b"%d" % number for number in range(10)], length_max=MANY)
        assert [entry.data for entry in rig.bus.read_last(key, count=3)] == [b"7", b"8", b"9"]
        assert len(rig.bus.read_last(key, count=100)) == 10

    def test_a_full_stream_forgets_the_oldest(self, rig):
        key = rig.new_name()
        rig.bus.append(key, [b"%d" % number for number in range(2_000)], length_max=100)
        rest = data_of(rig.bus, key)
        assert 100 <= len(rest) < 400  # the limit is approximate, by the size of Redis's nodes
        assert rest == [b"%d" % number for number in range(2_000 - len(rest), 2_000)]
        assert rig.bus.length(key) == len(rest)

    def test_a_cursor_before_the_oldest_kept_entry_reads_what_is_left(self, rig):
        key = rig.new_name()
        rig.bus.append(key, [b"0"], length_max=MANY)
        old = rig.bus.last_id(key)
        rig.bus.append(key, [b"%d" % number for number in range(1, 1_000)], length_max=100)
        assert data_of(rig.bus, key, old)[-1] == b"999"

    def test_a_stream_is_shortened_whatever_its_writer_did(self, rig):
        key = rig.new_name()
        rig.bus.append(key, [b"%d" % number for number in range(1_000)], length_max=MANY)
        rig.bus.shorten(key, length_max=200)
        kept = data_of(rig.other, key)
        assert 200 <= len(kept) <= 400 and kept[-1] == b"999"  # Redis cuts whole nodes
        rig.bus.shorten(rig.new_name(), length_max=5)

    def test_what_is_kept_of_a_run_vanishes_in_time_and_only_then(self, rig):
        run, other = rig.new_name(), rig.new_name()
        for name in (run, other):
            rig.bus.append(streams.stream(name, "steps"), [b"x"], length_max=MANY)
            rig.bus.append(streams.dead_letters(name), [b"x"], length_max=MANY)
            assert rig.bus.acquire_lease(name, "n", ttl_s=60)
            assert rig.bus.commit(commit_of(name, "n")) is CommitResult.DONE
        rig.bus.expire(run, ttl_s=0.3)
        rig.bus.expire(other, ttl_s=0.3)
        rig.bus.append(streams.stream(other, "steps"), [b"y"], length_max=MANY)
        rig.bus.expire(other, ttl_s=None)
        assert data_of(rig.bus, streams.stream(run, "steps")) == [b"x"]
        rig.wait(0.4)
        assert rig.bus.last_id(streams.stream(run, "steps")) == START
        assert rig.bus.length(streams.dead_letters(run)) == 0
        assert rig.bus.load_checkpoint(run) is None
        assert data_of(rig.bus, streams.stream(other, "steps")) == [b"x", b"y"]
        assert rig.bus.load_checkpoint(other) is not None

    def test_a_stream_whose_last_id_no_clock_made_is_forgotten_and_others_are_kept(self, rig):
        key, other = rig.new_name(), rig.new_name()
        rig.bus.append(key, [b"a", b"b"], length_max=10)
        assert not rig.bus.discard(key, beyond_ms=2**50)
        assert not rig.bus.discard(other, beyond_ms=0)
        assert rig.bus.length(key) == 2
        assert rig.bus.discard(key, beyond_ms=0)
        assert rig.bus.length(key) == 0 and rig.bus.last_id(key) == START
        rig.bus.append(key, [b"c"], length_max=10)
        assert [entry.data for entry in rig.bus.read({key: START}, count=10)[key]] == [b"c"]

    def test_trimming_keeps_everything_from_the_id_on(self, rig):
        key = rig.new_name()
        rig.bus.append(key, [b"%d" % number for number in range(1_000)], length_max=MANY)
        entries = rig.bus.read({key: START}, count=1_000)[key]
        rig.bus.trim(key, before_id=entries[900].id)
        rest = data_of(rig.bus, key)
        assert rest[-100:] == [entry.data for entry in entries[900:]]
        assert len(rest) < 300
        rig.bus.trim(rig.new_name(), before_id="5-0")  # of a stream that is not there: nothing

    def test_the_last_id_outlives_its_entry(self, rig):
        key = rig.new_name()
        rig.bus.append(key, [b"x"] * 300, length_max=MANY)
        last = rig.bus.last_id(key)
        assert rig.bus.read({key: START}, count=300)[key][-1].id == last
        rig.bus.trim(key, before_id="99999999999999-0")
        assert rig.bus.last_id(key) == last

    @pytest.mark.parametrize("cursor", ["18446744073709551615-18446744073709551615", "99999999999999-0"])
    def test_a_cursor_beyond_the_end_reads_nothing_and_harms_no_other_key(self, rig, cursor):
        beyond, other = rig.new_name(), rig.new_name()
        rig.bus.append(beyond, [b"x"], length_max=MANY)
        rig.bus.append(other, [b"y"], length_max=MANY)
        assert list(rig.bus.read({beyond: cursor, other: START}, count=5)) == [other]


class TestWaiting:
    @pytest.mark.parametrize("num_keys", [1, 3])
    def test_a_waiting_reader_gets_what_is_appended_meanwhile(self, rig, num_keys):
        keys = [rig.new_name() for _ in range(num_keys)]
        found: list[bytes] = []
        started = threading.Event()

        def read() -> None:
            started.set()
            for _ in range(20):  # a bus may come back early with nothing
                for entries in rig.bus.read(dict.fromkeys(keys, START), count=5, block_s=2.0).values():
                    found.extend(entry.data for entry in entries)
                if found:
                    return

        reader = threading.Thread(target=read)
        reader.start()
        started.wait()
        rig.other.append(keys[-1], [b"late"], length_max=MANY)
        reader.join(timeout=60)
        assert found == [b"late"]

    @pytest.mark.parametrize("num_keys", [1, 2])
    def test_waiting_in_vain_ends_with_nothing(self, rig, num_keys):
        keys = [rig.new_name() for _ in range(num_keys)]
        assert rig.bus.read(dict.fromkeys(keys, START), count=5, block_s=0.1) == {}

    def test_what_is_there_already_needs_no_waiting(self, rig):
        key, empty = rig.new_name(), rig.new_name()
        rig.bus.append(key, [b"x"], length_max=MANY)
        assert list(rig.bus.read({key: START, empty: START}, count=5, block_s=600.0)) == [key]


class TestLeases:
    def test_a_free_lease_is_taken_by_one(self, rig):
        run = rig.new_name()
        assert rig.bus.acquire_lease(run, "mine", ttl_s=60)
        assert not rig.other.acquire_lease(run, "theirs", ttl_s=60)
        assert rig.bus.acquire_lease(run, "mine", ttl_s=60)  # ours already

    def test_leases_of_two_runs_are_apart(self, rig):
        assert rig.bus.acquire_lease(rig.new_name(), "mine", ttl_s=60)
        assert rig.other.acquire_lease(rig.new_name(), "theirs", ttl_s=60)

    def test_an_expired_lease_can_be_stolen_and_its_old_owner_notices(self, rig):
        run = rig.new_name()
        assert rig.bus.acquire_lease(run, "old", ttl_s=0.05)
        rig.wait(0.2)
        assert rig.other.acquire_lease(run, "new", ttl_s=60)
        assert not rig.bus.renew_lease(run, "old", ttl_s=60)
        assert not rig.bus.acquire_lease(run, "old", ttl_s=60)
        assert rig.bus.commit(commit_of(run, "old")) is CommitResult.LEASE_LOST

    def test_an_expired_lease_cannot_be_renewed(self, rig):
        run = rig.new_name()
        assert rig.bus.acquire_lease(run, "mine", ttl_s=0.05)
        rig.wait(0.2)
        assert not rig.bus.renew_lease(run, "mine", ttl_s=60)

    def test_a_renewed_lease_lives_longer(self, rig):
        run = rig.new_name()
        assert rig.bus.acquire_lease(run, "mine", ttl_s=0.5)
        assert rig.bus.renew_lease(run, "mine", ttl_s=600)
        rig.wait(0.7)
        assert not rig.other.acquire_lease(run, "theirs", ttl_s=60)

    def test_release_by_another_nonce_changes_nothing(self, rig):
        run = rig.new_name()
        assert rig.bus.acquire_lease(run, "mine", ttl_s=60)
        rig.other.release_lease(run, "theirs")
        assert not rig.other.acquire_lease(run, "theirs", ttl_s=60)
        rig.bus.release_lease(run, "mine")
        assert rig.other.acquire_lease(run, "theirs", ttl_s=60)

    def test_releasing_what_was_never_taken_is_fine(self, rig):
        rig.bus.release_lease(rig.new_name(), "mine")


class TestCommit:
    def test_outputs_state_and_cursor_are_written_together(self, rig):
        run = rig.new_name()
        incidents, limits = streams.stream(run, "incidents"), streams.stream(run, "limits")
        assert rig.bus.load_checkpoint(run) is None
        assert rig.bus.acquire_lease(run, "n", ttl_s=60)
        outputs = (Output(incidents, b"i1", 10), Output(limits, b"l1", 10), Output(incidents, b"i2", 10))
        assert rig.bus.commit(commit_of(run, "n", outputs=outputs)) is CommitResult.DONE
        assert rig.other.load_checkpoint(run) == Checkpoint("1-0", b"state at 1-0")
        assert data_of(rig.other, incidents) == [b"i1", b"i2"]
        assert data_of(rig.other, limits) == [b"l1"]

    def test_the_next_commit_goes_on_from_the_cursor(self, rig):
        run = rig.new_name()
        assert rig.bus.acquire_lease(run, "n", ttl_s=60)
        assert rig.bus.commit(commit_of(run, "n")) is CommitResult.DONE
        assert rig.bus.commit(commit_of(run, "n", "1-0", "2-0")) is CommitResult.DONE
        assert rig.bus.load_checkpoint(run) == Checkpoint("2-0", b"state at 2-0")

    @pytest.mark.parametrize("owner", [None, "somebody else"])
    def test_without_the_lease_nothing_is_written(self, rig, owner):
        run = rig.new_name()
        key = streams.stream(run, "incidents")
        if owner is not None:
            assert rig.other.acquire_lease(run, owner, ttl_s=60)
        commit = commit_of(run, "n", outputs=(Output(key, b"x", 10),))
        assert rig.bus.commit(commit) is CommitResult.LEASE_LOST
        assert rig.bus.load_checkpoint(run) is None
        assert rig.bus.length(key) == 0

    @pytest.mark.parametrize("expected", ["", "0-9"])
    def test_after_the_cursor_has_moved_nothing_is_written(self, rig, expected):
        run = rig.new_name()
        key = streams.stream(run, "incidents")
        assert rig.bus.acquire_lease(run, "n", ttl_s=60)
        assert rig.bus.commit(commit_of(run, "n")) is CommitResult.DONE
        late = commit_of(run, "n", expected, "2-0", outputs=(Output(key, b"x", 10),))
        assert rig.bus.commit(late) is CommitResult.CURSOR_MOVED
        assert rig.bus.load_checkpoint(run) == Checkpoint("1-0", b"state at 1-0")
        assert rig.bus.length(key) == 0

    def test_the_same_commit_twice_counts_once(self, rig):
        run = rig.new_name()
        key = streams.stream(run, "incidents")
        assert rig.bus.acquire_lease(run, "n", ttl_s=60)
        commit = commit_of(run, "n", outputs=(Output(key, b"x", 10),))
        assert rig.bus.commit(commit) is CommitResult.DONE
        assert rig.bus.commit(commit) is CommitResult.CURSOR_MOVED
        assert data_of(rig.bus, key) == [b"x"]

    def test_of_many_owners_at_once_one_wins(self, rig):
        run = rig.new_name()
        key = streams.stream(run, "incidents")
        assert rig.bus.acquire_lease(run, "n", ttl_s=60)
        results: list[CommitResult] = []

        def go(bus: Bus, number: int) -> None:
            output = (Output(key, b"%d" % number, 100),)
            results.append(bus.commit(commit_of(run, "n", new=f"{number}-0", outputs=output)))

        threads = [
            threading.Thread(target=go, args=(bus, number))
            for number, bus in enumerate([rig.bus, rig.other] * 4, start=1)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=30)
        assert sorted(results) == [CommitResult.CURSOR_MOVED] * 7 + [CommitResult.DONE]
        checkpoint = rig.bus.load_checkpoint(run)
        assert checkpoint is not None
        assert data_of(rig.bus, key) == [checkpoint.cursor.removesuffix("-0").encode()]

    def test_outputs_obey_their_length(self, rig):
        run = rig.new_name()
        key = streams.stream(run, "limits")
        assert rig.bus.acquire_lease(run, "n", ttl_s=60)
        outputs = tuple(Output(key, b"%d" % number, 64) for number in range(1_000))
        assert rig.bus.commit(commit_of(run, "n", outputs=outputs)) is CommitResult.DONE
        assert 64 <= rig.bus.length(key) < 300
        assert rig.bus.read_last(key, count=1)[0].data == b"999"

    def test_empty_state_and_odd_bytes_are_states_too(self, rig):
        run = rig.new_name()
        assert rig.bus.acquire_lease(run, "n", ttl_s=60)
        assert rig.bus.commit(Commit(run, "n", "", "1-0", b"")) is CommitResult.DONE
        assert rig.bus.load_checkpoint(run) == Checkpoint("1-0", b"")
        assert rig.bus.commit(Commit(run, "n", "1-0", "2-0", bytes(range(256)))) is CommitResult.DONE
        assert rig.bus.load_checkpoint(run) == Checkpoint("2-0", bytes(range(256)))

    @pytest.mark.parametrize("length_max", [0, -1])
    def test_an_output_without_room_is_refused_before_anything_is_sent(self, length_max):
        with pytest.raises(AssertionError, match="length_max"):
            Output("key", b"x", length_max)


def test_ping_and_close_are_harmless(rig):
    rig.bus.ping()
    rig.bus.close()
    rig.bus.close()
