"""Reads every run's streams and commits their rows together with the cursors.

    read (registry and five streams a run) -> decode -> one transaction: rows + cursors -> say so

A message that cannot be read or stored is counted and logged with the reason, never the content.
A bus that does not answer costs one log line and patience. Knows nothing of Slack, HTTP or tables.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from gradloc_proto import streams
from gradloc_proto.bus import START, Bus, BusUnavailable, Entry
from gradloc_proto.codec import MessageRejected, decode
from gradloc_proto.messages import Message, RunStarted
from gradloc_reporter.store import DBAPIError, OperationalError, StatementError
from gradloc_reporter.store.cursors import CursorMoved, is_over, load_cursors, move_cursors, runs_to_read
from gradloc_reporter.store.engine import Database
from gradloc_reporter.store.fold import ALLOWED, Fold

log = logging.getLogger(__name__)

_Place = tuple[str | None, streams.StreamName]  # the run and name of a stream; the registry has no run
_Placed = tuple[str, streams.StreamName, Message]  # stream key, stream name, message

READ_COUNT = 512  # entries a stream and read, of few runs: a transaction stays well under a second
READ_TOTAL = 4_096  # of steps that many runs' streams together are read at a time: what waits does not fill the memory
POLL_S = 0.2  # new facts are seen this soon
REST_S = 5.0  # runs that have ended and wait for nothing are looked at this often
REWIND_CHECK_S = 30.0  # a cursor beyond its stream's end is noticed within the promised minute
BACKOFF_MIN_S, BACKOFF_MAX_S = 0.5, 10.0
REASONS_LOGGED_MAX = 100  # lines of rejections; the rest is only counted


@dataclass(slots=True)
class Consumption:
    """Counts since this process started, and when the reporter last knew that it had read everything."""

    consumed: Counter[str] = field(default_factory=Counter)  # by stream
    rejected: Counter[str] = field(default_factory=Counter)  # by stream
    rewound: Counter[str] = field(default_factory=Counter)  # by stream
    caught_up_at: float | None = None
    bus_answers: bool = False


class Consumer:
    """`run` until `stop`; `on_commit` is called after each transaction that changed something."""

    def __init__(
        self,
        bus: Bus,
        database: Database,
        *,
        on_commit: Callable[[], None] = lambda: None,
        monotonic: Callable[[], float] = time.monotonic,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        self._bus = bus
        self._database = database
        self._on_commit = on_commit
        self._monotonic = monotonic
        self._stopping = threading.Event()
        self._cursors: dict[str, str] | None = None
        self._rested_at = -REST_S
        self._checked_at = -REWIND_CHECK_S
        self.consumption = Consumption()

    def run(self) -> None:
        backoff_s = 0.0
        while not self._stopping.is_set():
            try:
                busy = self.consume_once()
            except BusUnavailable as error:
                self.consumption.bus_answers = False
                backoff_s = self._trouble(backoff_s, f"{error}; going on when it answers")
            except CursorMoved:  # another replica was faster; that is how they share the work
                self._cursors = None
            except DBAPIError as error:
                self._cursors = None
                backoff_s = self._trouble(backoff_s, f"database: {_one_line(error)}; nothing is lost, trying again")
            else:
                if backoff_s:
                    log.info("reading again")
                    self._checked_at = -REWIND_CHECK_S
                backoff_s = 0.0
                if not busy:
                    self._stopping.wait(POLL_S)

    def stop(self) -> None:
        self._stopping.set()

    def _trouble(self, backoff_s: float, text: str) -> float:
        if not backoff_s:
            log.warning(text)
        backoff_s = min(max(2 * backoff_s, BACKOFF_MIN_S), BACKOFF_MAX_S)
        self._stopping.wait(backoff_s)
        return backoff_s

    def consume_once(self) -> bool:
        """Read what is new and commit it; says whether there was anything. Raises BusUnavailable."""
        if self._cursors is None:
            with self._database.reading() as session:
                self._cursors = load_cursors(session)
        keys = self._keys()
        now = self._monotonic()
        if now - self._checked_at >= REWIND_CHECK_S:
            self._rewind(keys)
            self._checked_at = now
        num_runs = len(keys) // len(streams.STREAM_NAMES)
        count = max(1, min(READ_COUNT, READ_TOTAL // max(1, num_runs)))
        batches = self._bus.read({key: self._cursors.get(key, START) for key in keys}, count=count)
        self.consumption.bus_answers = True
        if batches:
            self._commit(batches, keys)
            self._on_commit()
        if all(len(entries) < count for entries in batches.values()):
            self.consumption.caught_up_at = self._monotonic()
        return bool(batches)

    def _keys(self) -> dict[str, _Place]:
        """Stream keys to read now, each with its run and name; the registry has no run."""
        now = self._monotonic()
        resting = now - self._rested_at >= REST_S
        if resting:
            self._rested_at = now
        with self._database.reading() as session:
            runs = runs_to_read(session, with_ended=resting)
        keys: dict[str, _Place] = {streams.REGISTRY: (None, "steps")}
        for run_id in runs:
            keys |= {streams.stream(run_id, name): (run_id, name) for name in streams.STREAM_NAMES}
        return keys

    def _rewind(self, keys: dict[str, _Place]) -> None:
        """A cursor beyond its stream's end means that Redis lost data: read from the start again."""
        assert self._cursors is not None
        for key, (run_id, name) in keys.items():
            cursor = self._cursors.get(key, START)
            if cursor == START:
                continue
            last_id = self._bus.last_id(key)
            if last_id == START and run_id is not None and (self._is_over(run_id) or self._is_silent(run_id)):
                continue  # its keys have expired, as those of all runs do that are over or silent
            if _order(cursor) > _order(last_id):
                log.warning("stream %s ends before what was read of it: data was lost; reading it from the start", key)
                self.consumption.rewound[name] += 1
                with self._database.writing() as session:
                    move_cursors(session, {key: (cursor, START)})
                self._cursors[key] = START

    def _is_over(self, run_id: str) -> bool:
        with self._database.reading() as session:
            return is_over(session, run_id)

    def _is_silent(self, run_id: str) -> bool:
        """Whether everything of the run is gone and the newest of it was old enough for that."""
        assert self._cursors is not None
        keys = [streams.stream(run_id, name) for name in streams.STREAM_NAMES]
        newest_s = max(_order(self._cursors.get(key, START))[0] for key in keys) / 1000
        silent = self._clock() - newest_s > streams.REST_AFTER_SILENCE_S
        return silent and all(self._bus.last_id(key) == START for key in keys)

    def _commit(self, batches: dict[str, list[Entry]], keys: dict[str, _Place]) -> None:
        assert self._cursors is not None
        moves = {key: (self._cursors.get(key, START), entries[-1].id) for key, entries in batches.items()}
        messages = [
            (key, name, message)
            for key, entries in batches.items()
            for run_id, name in (keys[key],)
            for message in self._decoded(key, run_id, name, entries)
        ]
        try:
            self._write(moves, messages)
        except OperationalError:  # the database is busy, full or gone: not the messages' fault
            raise
        except (StatementError, OverflowError, ValueError):
            self._write_singly(moves, messages)
        self._cursors |= {key: new for key, (_, new) in moves.items()}
        for key, entries in batches.items():
            self.consumption.consumed[keys[key][1]] += len(entries)

    def _decoded(self, key: str, run_id: str | None, name: streams.StreamName, entries: list[Entry]) -> list[Message]:
        messages = []
        for entry in entries:
            try:
                message = decode(entry.data)
                _check_place(message, run_id, name)
            except MessageRejected as error:
                self._reject(key, name, f"entry {entry.id}: {error}")
            else:
                messages.append(message)
        return messages

    def _write(self, moves: dict[str, tuple[str, str]], messages: list[_Placed]) -> None:
        with self._database.writing() as session:
            move_cursors(session, moves)
            fold = Fold(session, clock=self._clock)
            fold.apply_all([message for _, _, message in messages])
            fold.finish()

    def _write_singly(self, moves: dict[str, tuple[str, str]], messages: list[_Placed]) -> None:
        """One of these messages cannot be stored: find it, so that the others are."""
        with self._database.writing() as session:
            move_cursors(session, moves)
            for key, name, message in messages:
                try:
                    with session.begin_nested():
                        fold = Fold(session, clock=self._clock)
                        fold.apply(message)
                        fold.finish()
                except OperationalError:
                    raise
                except (StatementError, OverflowError, ValueError) as error:
                    self._reject(key, name, f"a {type(message).__name__} cannot be stored: {_one_line(error)}")

    def _reject(self, key: str, name: streams.StreamName, reason: str) -> None:
        self.consumption.rejected[name] += 1
        total = self.consumption.rejected.total()
        if total <= REASONS_LOGGED_MAX:
            log.warning("message rejected: stream %s, %s", key, reason)
        if total == REASONS_LOGGED_MAX:
            log.warning("further rejected messages are only counted: gradloc_messages_rejected_total")


def _check_place(message: Message, run_id: str | None, name: streams.StreamName) -> None:
    allowed: tuple[type[Message], ...] = (RunStarted,) if run_id is None else ALLOWED[name]
    if not isinstance(message, allowed):
        expected = ", ".join(kind.__name__ for kind in allowed)
        raise MessageRejected(f"a {type(message).__name__} in the wrong stream; expected one of {expected}")
    if run_id is not None and message.run_id != run_id:
        raise MessageRejected("its run_id is another run's; expected the run whose stream this is")


def _order(entry_id: str) -> tuple[int, int]:
    milliseconds, _, sequence = entry_id.partition("-")
    return int(milliseconds), int(sequence or 0)


def _one_line(error: Exception) -> str:
    # Never str(StatementError): it prints the parameters, which may hold prompts.
    cause = getattr(error, "orig", None) or error
    if isinstance(cause, OverflowError):
        return "a number is larger than a database holds"
    return f"{type(cause).__name__}: {str(cause).splitlines()[0][:160]}" if str(cause) else type(cause).__name__
