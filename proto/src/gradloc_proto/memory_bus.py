"""The bus in one process: inline mode, tests, and the demo of a laptop without Redis.

Same behaviour as RedisBus, checked by the same test-suite; leases expire by the clock given.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import islice

from gradloc_proto import streams
from gradloc_proto.bus import START, Checkpoint, Commit, CommitResult, Entry


class MemoryBus:
    """Thread-safe; `clock` returns seconds and never goes back."""

    num_connects = 0

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._streams: dict[str, deque[Entry]] = {}
        self._last: dict[str, int] = {}
        self._leases: dict[str, tuple[str, float]] = {}
        self._checkpoints: dict[str, Checkpoint] = {}
        self._expires: dict[str, float] = {}  # by run

    def append(self, key: str, data: Sequence[bytes], *, length_max: int) -> None:
        with self._changed:
            self._forget_expired()
            for item in data:
                self._append_one(key, item, length_max)
            self._changed.notify_all()

    def _append_one(self, key: str, item: bytes, length_max: int) -> None:
        number = self._last.get(key, 0) + 1
        self._last[key] = number
        entries = self._streams.setdefault(key, deque())
        entries.append(Entry(f"{number}-0", bytes(item)))
        while len(entries) > length_max:
            entries.popleft()

    def read(self, cursors: Mapping[str, str], *, count: int, block_s: float | None = None) -> dict[str, list[Entry]]:
        with self._changed:
            found = self._read_now(cursors, count)
            if not found and block_s:
                self._changed.wait_for(lambda: bool(self._read_now(cursors, count)), timeout=block_s)
                found = self._read_now(cursors, count)
            return found

    def _read_now(self, cursors: Mapping[str, str], count: int) -> dict[str, list[Entry]]:
        self._forget_expired()
        found = {}
        for key, cursor in cursors.items():
            entries = self._streams.get(key)
            if not entries:
                continue
            # Ids within a stream have no holes, so the place of the next entry is known.
            skip = max(0, _number(cursor) + 1 - _number(entries[0].id))
            if skip < len(entries):
                found[key] = list(islice(entries, skip, skip + count))
        return found

    def read_last(self, key: str, *, count: int) -> list[Entry]:
        with self._changed:
            self._forget_expired()
            return list(self._streams.get(key, ()))[-count:]

    def length(self, key: str) -> int:
        with self._changed:
            self._forget_expired()
            return len(self._streams.get(key, ()))

    def last_id(self, key: str) -> str:
        with self._changed:
            self._forget_expired()
            return f"{self._last[key]}-0" if key in self._last else START

    def trim(self, key: str, *, before_id: str) -> None:
        with self._changed:
            entries = self._streams.get(key, deque())
            while entries and _number(entries[0].id) < _number(before_id):
                entries.popleft()

    def discard(self, key: str, *, beyond_ms: int) -> bool:
        with self._changed:
            if self._last.get(key, 0) <= beyond_ms:
                return False
            del self._last[key]
            self._streams.pop(key, None)
            return True

    def shorten(self, key: str, *, length_max: int) -> None:
        with self._changed:
            entries = self._streams.get(key, deque())
            while len(entries) > length_max:
                entries.popleft()

    def expire(self, run_id: str, *, ttl_s: float | None) -> None:
        with self._changed:
            self._forget_expired()
            if ttl_s is None:
                self._expires.pop(run_id, None)
            else:
                self._expires[run_id] = self._clock() + ttl_s

    def _forget_expired(self) -> None:
        for run_id in [run_id for run_id, at in self._expires.items() if self._clock() >= at]:
            del self._expires[run_id]
            self._checkpoints.pop(run_id, None)
            for key in streams.keys_of(run_id):
                self._streams.pop(key, None)
                self._last.pop(key, None)

    def acquire_lease(self, run_id: str, nonce: str, *, ttl_s: float) -> bool:
        with self._changed:
            owner = self._owner(run_id)
            if owner not in (None, nonce):
                return False
            self._leases[run_id] = (nonce, self._clock() + ttl_s)
            return True

    def renew_lease(self, run_id: str, nonce: str, *, ttl_s: float) -> bool:
        with self._changed:
            if self._owner(run_id) != nonce:
                return False
            self._leases[run_id] = (nonce, self._clock() + ttl_s)
            return True

    def release_lease(self, run_id: str, nonce: str) -> None:
        with self._changed:
            if self._owner(run_id) == nonce:
                del self._leases[run_id]

    def _owner(self, run_id: str) -> str | None:
        nonce, expires = self._leases.get(run_id, (None, 0.0))
        return nonce if self._clock() < expires else None

    def load_checkpoint(self, run_id: str) -> Checkpoint | None:
        with self._changed:
            self._forget_expired()
            return self._checkpoints.get(run_id)

    def commit(self, commit: Commit) -> CommitResult:
        with self._changed:
            if self._owner(commit.run_id) != commit.nonce:
                return CommitResult.LEASE_LOST
            checkpoint = self._checkpoints.get(commit.run_id)
            if (checkpoint.cursor if checkpoint else "") != commit.expected_cursor:
                return CommitResult.CURSOR_MOVED
            for output in commit.outputs:
                self._append_one(output.key, output.data, output.length_max)
            self._checkpoints[commit.run_id] = Checkpoint(commit.new_cursor, commit.state)
            self._changed.notify_all()
            return CommitResult.DONE

    def ping(self) -> None:
        return

    def close(self) -> None:
        return


def _number(entry_id: str) -> int:
    return int(entry_id.split("-", maxsplit=1)[0])
