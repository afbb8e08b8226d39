"""The bus over Redis streams (7.0; 6.2 is the floor). The only door to redis-py.

Errors of the client become BusUnavailable without the URL's password. A read asks one command per
run, pipelined, so that keys of different slots work; a read of one key waits in the server, one of
several keys looks again until its time is up.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import resources
from typing import Any, cast

import redis

from gradloc_proto import streams
from gradloc_proto.bus import START, BusUnavailable, Checkpoint, Commit, CommitResult, Entry

_FIELD = b"m"
# What Redis keeps beside the bytes of a message: 1.05 to 1.23 of them for messages of 250 B to 12 kB at its default
# stream-node-max-bytes. So many fewer entries stay, and a stream takes no more than `length_max` such messages do.
_KEPT_OVER_BYTES = 1.25
_POLL_S = 0.05  # between looks at several keys: no single command waits for keys of different slots
_RENEW = (
    "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('PEXPIRE', KEYS[1], ARGV[2]) else return 0 end"
)
# Redis keeps the moment at which a key ends, by its wall clock: one that was set back would keep a dead owner's lease
# for as long as it had been wrong. No lease has more left than its whole time. Who may not ask for that waits longer.
_ACQUIRE = (
    "local owner = redis.call('GET', KEYS[1]) "
    "if owner == false or owner == ARGV[1] then redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2]) return 1 end "
    "local left = redis.pcall('PTTL', KEYS[1]) "
    "if type(left) == 'number' and (left < 0 or left > tonumber(ARGV[2])) then "
    "redis.call('PEXPIRE', KEYS[1], ARGV[2]) end return 0"
)
_RELEASE = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) else return 0 end"
_DISCARD = (
    "if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end "
    "local info = redis.call('XINFO', 'STREAM', KEYS[1]) "
    "for j = 1, #info, 2 do if info[j] == 'last-generated-id' then "
    "if tonumber(string.match(info[j + 1], '^%d+')) > tonumber(ARGV[1]) then return redis.call('DEL', KEYS[1]) end "
    "end end return 0"
)


def display_url(url: str) -> str:
    """`url` without user name, password and query, fit for logs even where the URL is malformed."""
    scheme, _, rest = url.partition("://")
    # A password with an unescaped '/', '#' or '?' would end up in the path: what lies before the last '@' is dropped.
    place = rest.rsplit("@", maxsplit=1)[-1].partition("?")[0]
    return f"{scheme}://{place}" if rest else "(not a URL)"


class RedisBus:
    """`url` is redis:// or rediss://; `timeout_s` bounds every call that does not ask to block."""

    def __init__(self, url: str, *, timeout_s: float = 5.0) -> None:
        self._display_url = display_url(url)
        self._timeout_s = timeout_s
        self._num_connects = 0
        try:
            self._redis = redis.Redis.from_url(
                url,
                socket_timeout=timeout_s,
                socket_connect_timeout=timeout_s,
                decode_responses=False,
                redis_connect_func=self._connected,
            )
        except ValueError:
            # The client's own text may hold a piece of the password.
            raise ValueError(
                f"Redis URL {self._display_url!r} cannot be read; expected redis://[user:password@]host:port/0 or "
                "rediss://...; percent-encode special characters of the password"
            ) from None
        lua = resources.files("gradloc_proto").joinpath("commit.lua").read_text()
        self._commit = self._redis.register_script(lua)
        self._renew = self._redis.register_script(_RENEW)
        self._acquire = self._redis.register_script(_ACQUIRE)
        self._release = self._redis.register_script(_RELEASE)
        self._discard = self._redis.register_script(_DISCARD)

    @property
    def num_connects(self) -> int:
        return self._num_connects

    def _connected(self, connection: Any) -> None:
        # The client connects again, and asks again, by itself: without a word that Redis may have been another one.
        self._num_connects += 1
        connection.on_connect()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (redis.RedisError, OSError, UnicodeError) as error:
            text = str(error).split("\n", maxsplit=1)[0][:200]
            raise BusUnavailable(f"Redis at {self._display_url}: {text}") from None

    def append(self, key: str, data: Sequence[bytes], *, length_max: int) -> None:
        if not data:
            return
        with self._errors(), self._redis.pipeline(transaction=False) as pipeline:
            for item in data:
                pipeline.xadd(key, {_FIELD: item}, maxlen=_num_kept(length_max), approximate=True)
            pipeline.execute()

    def read(self, cursors: Mapping[str, str], *, count: int, block_s: float | None = None) -> dict[str, list[Entry]]:
        if not cursors:
            return {}
        with self._errors():
            if len(cursors) == 1 and block_s:
                return self._read_blocking(cursors, count, block_s)
            found = self._read_now(cursors, count)
            deadline = time.monotonic() + (block_s or 0.0)
            while not found and time.monotonic() < deadline:
                time.sleep(min(_POLL_S, max(0.0, deadline - time.monotonic())))
                found = self._read_now(cursors, count)
            return found

    def _read_blocking(self, cursors: Mapping[str, str], count: int, block_s: float) -> dict[str, list[Entry]]:
        # The server answers within block_s, well before the socket's time-out.
        block_ms = max(1, int(min(block_s, self._timeout_s / 2) * 1000))
        reply: Any = self._redis.xread(cast(Any, dict(cursors)), count=count, block=block_ms)
        return _found(reply)

    def _read_now(self, cursors: Mapping[str, str], count: int) -> dict[str, list[Entry]]:
        # XREAD and not XRANGE: after a hostile entry with the largest id of all, "(id" is an error to XRANGE,
        # and one run's error would hide every other run that is read with it.
        found = {}
        with self._redis.pipeline(transaction=False) as pipeline:
            for group in _by_slot(cursors):
                pipeline.xread(cast(Any, group), count=count)
            for reply in pipeline.execute():
                found.update(_found(reply))
        return found

    def read_last(self, key: str, *, count: int) -> list[Entry]:
        with self._errors():
            rows: Any = self._redis.xrevrange(key, count=count)
        return _entries(reversed(rows))

    def length(self, key: str) -> int:
        with self._errors():
            return int(self._redis.xlen(key))

    def last_id(self, key: str) -> str:
        with self._errors():
            try:
                info: Any = self._redis.xinfo_stream(key)
            except redis.ResponseError as error:
                if "no such key" in str(error):
                    return START
                raise
        return _text(info["last-generated-id"])

    def trim(self, key: str, *, before_id: str) -> None:
        with self._errors():
            self._redis.xtrim(key, minid=before_id, approximate=True)

    def discard(self, key: str, *, beyond_ms: int) -> bool:
        with self._errors():
            return bool(self._discard(keys=[key], args=[beyond_ms]))

    def shorten(self, key: str, *, length_max: int) -> None:
        with self._errors():
            self._redis.xtrim(key, maxlen=_num_kept(length_max), approximate=True)

    def expire(self, run_id: str, *, ttl_s: float | None) -> None:
        with self._errors(), self._redis.pipeline(transaction=False) as pipeline:
            for key in streams.keys_of(run_id):
                if ttl_s is None:
                    pipeline.persist(key)
                else:
                    pipeline.pexpire(key, int(ttl_s * 1000))
            pipeline.execute()

    def acquire_lease(self, run_id: str, nonce: str, *, ttl_s: float) -> bool:
        with self._errors():
            return bool(self._acquire(keys=[streams.lease(run_id)], args=[nonce, int(ttl_s * 1000)]))

    def renew_lease(self, run_id: str, nonce: str, *, ttl_s: float) -> bool:
        with self._errors():
            return bool(self._renew(keys=[streams.lease(run_id)], args=[nonce, int(ttl_s * 1000)]))

    def release_lease(self, run_id: str, nonce: str) -> None:
        with self._errors():
            self._release(keys=[streams.lease(run_id)], args=[nonce])

    def load_checkpoint(self, run_id: str) -> Checkpoint | None:
        with self._errors():
            state, cursor = cast(
                "list[bytes | None]", self._redis.mget([streams.state(run_id), streams.cursor(run_id)])
            )
        return None if cursor is None else Checkpoint(cursor.decode(errors="replace"), state or b"")

    def commit(self, commit: Commit) -> CommitResult:
        keys = [streams.lease(commit.run_id), streams.state(commit.run_id), streams.cursor(commit.run_id)]
        args: list[Any] = [commit.nonce, commit.expected_cursor, commit.new_cursor, commit.state]
        for output in commit.outputs:
            keys.append(output.key)
            args += [_num_kept(output.length_max), output.data]
        with self._errors():
            return CommitResult(_text(self._commit(keys=keys, args=args)))

    def ping(self) -> None:
        with self._errors():
            self._redis.ping()

    def close(self) -> None:
        self._redis.close()


def _num_kept(length_max: int) -> int:
    return max(1, int(length_max / _KEPT_OVER_BYTES))


def _by_slot(cursors: Mapping[str, str]) -> Iterable[dict[str, str]]:
    """Keys that one command may name: those with the same hash tag."""
    groups: dict[str, dict[str, str]] = {}
    for key, cursor in cursors.items():
        tag = key.partition("{")[2].partition("}")[0]
        groups.setdefault(tag or key, {})[key] = cursor
    return groups.values()


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _found(reply: Any) -> dict[str, list[Entry]]:
    return {_text(key): _entries(rows) for key, rows in _pairs(reply) if rows}


def _pairs(reply: Any) -> list[tuple[Any, Any]]:
    if isinstance(reply, dict):  # RESP3: {key: [rows]}
        return [(key, rows[0] if len(rows) == 1 and isinstance(rows[0], list) else rows) for key, rows in reply.items()]
    return [(key, rows) for key, rows in reply or ()]


def _entries(rows: Any) -> list[Entry]:
    # An entry without our field is somebody's mistake: it travels as empty bytes, and the decoder rejects it.
    return [Entry(_text(entry_id), fields.get(_FIELD, b"") if fields else b"") for entry_id, fields in rows]
