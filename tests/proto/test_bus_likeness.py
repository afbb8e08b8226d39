"""MemoryBus and RedisBus cannot be told apart by any sequence of calls (lengths below Redis's node size)."""

from itertools import count

from hypothesis import given, settings
from hypothesis import strategies as st

from gradloc_proto import streams
from gradloc_proto.bus import START, Commit, Output
from gradloc_proto.memory_bus import MemoryBus
from gradloc_proto.redis_bus import RedisBus

LENGTH_MAX = 1_000
_numbers = count()

nonces = st.sampled_from(["a", "b"])
names = st.sampled_from(["incidents", "limits"])
data = st.binary(max_size=4)
calls = st.one_of(
    st.tuples(st.just("append"), names, st.lists(data, max_size=3)),
    st.tuples(st.just("read"), names, st.integers(1, 4), st.integers(0, 6)),
    st.tuples(st.just("read_last"), names, st.integers(1, 4)),
    st.tuples(st.just("length"), names),
    st.tuples(st.just("acquire"), nonces),
    st.tuples(st.just("renew"), nonces),
    st.tuples(st.just("release"), nonces),
    st.tuples(st.just("load")),
    st.tuples(
        st.just("commit"), nonces, st.integers(0, 3), st.integers(1, 3), st.lists(st.tuples(names, data), max_size=3)
    ),
)


class Observer:
    """Makes calls on one bus and says what came back; entry ids, which differ, are replaced by their places."""

    def __init__(self, bus, run):
        self.bus, self.run = bus, run

    def do(self, call):
        name, *arguments = call
        return getattr(self, name)(*arguments)

    def append(self, name, items):
        self.bus.append(streams.stream(self.run, name), items, length_max=LENGTH_MAX)

    def read(self, name, limit, place):
        """From the cursor after the `place`-th entry that was ever seen in the stream."""
        key = streams.stream(self.run, name)
        ids = [entry.id for entry in self.bus.read({key: START}, count=LENGTH_MAX).get(key, [])]
        cursor = ([START, *ids])[min(place, len(ids))]
        return [entry.data for entry in self.bus.read({key: cursor}, count=limit).get(key, [])]

    def read_last(self, name, limit):
        return [entry.data for entry in self.bus.read_last(streams.stream(self.run, name), count=limit)]

    def length(self, name):
        return self.bus.length(streams.stream(self.run, name))

    def acquire(self, nonce):
        return self.bus.acquire_lease(self.run, nonce, ttl_s=600)

    def renew(self, nonce):
        return self.bus.renew_lease(self.run, nonce, ttl_s=600)

    def release(self, nonce):
        self.bus.release_lease(self.run, nonce)

    def load(self):
        return self.bus.load_checkpoint(self.run)

    def commit(self, nonce, expected, new, outputs):
        return self.bus.commit(
            Commit(
                self.run,
                nonce,
                f"{expected}-0" if expected else "",
                f"{new}-0",
                f"state {new}".encode(),
                tuple(Output(streams.stream(self.run, name), item, LENGTH_MAX) for name, item in outputs),
            )
        )


@settings(max_examples=200, deadline=None)
@given(st.lists(calls, min_size=10, max_size=50))
def test_every_call_gives_the_same_answer(redis_url, sequence):
    run = f"likeness-{next(_numbers)}"
    redis_bus = RedisBus(redis_url)
    try:
        memory, redis = Observer(MemoryBus(), run), Observer(redis_bus, run)
        for call in sequence:
            assert memory.do(call) == redis.do(call), call
    finally:
        redis_bus.close()
