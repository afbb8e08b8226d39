"""What a bus does, whoever implements it: append, read, lease, commit.

Two implementations pass one test-suite (tests/proto/test_bus.py): RedisBus for services and
MemoryBus for inline mode and tests. A bus moves bytes; it never decodes them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Protocol

START = "0-0"  # the cursor before the first entry


class BusUnavailable(ConnectionError):
    """The bus cannot be reached or refuses work now; what was asked did not happen or is unknown."""


class Entry(NamedTuple):
    """One stream entry. `id` orders entries within a stream and is never an identity."""

    id: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Output:
    """Bytes to append to a stream key as part of a commit."""

    key: str
    data: bytes
    length_max: int

    def __post_init__(self) -> None:
        # Half-way through a commit is too late to find out: nothing rolls back.
        assert self.length_max >= 1, f"length_max {self.length_max}, expected at least 1"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """State of a run's owner and the cursor up to which its streams are folded into it.

    `state` is empty where only the cursor survived: a commit must still expect that cursor.
    """

    cursor: str
    state: bytes


@dataclass(frozen=True, slots=True)
class Commit:
    """One atomic write of a run's owner: only if the lease holds `nonce` and the cursor is `expected_cursor`.

    Outputs are written first, then state, then the cursor, so that a reader who sees the cursor sees the rest.
    """

    run_id: str
    nonce: str
    expected_cursor: str
    new_cursor: str
    state: bytes
    outputs: tuple[Output, ...] = field(default=())


class CommitResult(StrEnum):
    DONE = "done"
    LEASE_LOST = "lease-lost"
    CURSOR_MOVED = "cursor-moved"
    REFUSED = "refused"  # a key holds another type: nothing was written


class Bus(Protocol):
    """Append-only streams, leases and the owner's commit. Every call may raise BusUnavailable."""

    @property
    def num_connects(self) -> int:
        """How often a connection was made. One more: whoever answers now need not be who answered before."""

    def append(self, key: str, data: Sequence[bytes], *, length_max: int) -> None:
        """Append entries in order; the stream is cut, oldest first, to about the memory of `length_max` entries."""

    def read(self, cursors: Mapping[str, str], *, count: int, block_s: float | None = None) -> dict[str, list[Entry]]:
        """Entries after each key's cursor, at most `count` a key; waits up to `block_s` for the first."""

    def read_last(self, key: str, *, count: int) -> list[Entry]:
        """The newest `count` (at least 1) entries, oldest first."""

    def length(self, key: str) -> int:
        """Number of entries now."""

    def last_id(self, key: str) -> str:
        """Id of the newest entry ever appended, START for none: a cursor beyond it means loss."""

    def trim(self, key: str, *, before_id: str) -> None:
        """Forget entries older than `before_id`."""

    def discard(self, key: str, *, beyond_ms: int) -> bool:
        """Forget a stream, with its last id, whose last id lies beyond that time; says whether it did.

        Such an id was made by no clock, and hardly an id fits after it.
        """

    def shorten(self, key: str, *, length_max: int) -> None:
        """Cut a stream to about `length_max`, oldest first, whatever its writer did."""

    def expire(self, run_id: str, *, ttl_s: float | None) -> None:
        """Let all that is kept of a run vanish after `ttl_s`; None: keep it after all."""

    def acquire_lease(self, run_id: str, nonce: str, *, ttl_s: float) -> bool:
        """Take the run's lease if it is free or already ours."""

    def renew_lease(self, run_id: str, nonce: str, *, ttl_s: float) -> bool:
        """Prolong our lease; False when it is not ours any more."""

    def release_lease(self, run_id: str, nonce: str) -> None:
        """Give the lease back if it is ours."""

    def load_checkpoint(self, run_id: str) -> Checkpoint | None:
        """Last committed state and cursor."""

    def commit(self, commit: Commit) -> CommitResult:
        """Write outputs, state and cursor together, or nothing."""

    def ping(self) -> None:
        """Raise BusUnavailable when the bus does not answer."""

    def close(self) -> None:
        """Free connections; idempotent."""
