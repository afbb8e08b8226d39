"""One run in the hands of one owner: read, fold, commit. Shell around fold.py; knows the bus, not the service.

Everything it publishes goes through Bus.commit together with the state and the cursor, so a kill at
any moment loses nothing and doubles nothing.
"""

import base64
import json
import logging
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from gradloc_detector import calm_steps
from gradloc_detector.fold import ACCEPTED, fold, loss_noticed
from gradloc_detector.metrics import Metrics
from gradloc_detector.policy import Policy
from gradloc_detector.state import (
    DetectorState,
    Effects,
    Emit,
    Place,
    Rejection,
    StateRejected,
    dump,
    initial_state,
    load,
)
from gradloc_proto import codec, streams
from gradloc_proto.bus import START, Bus, BusUnavailable, Commit, CommitResult, Entry, Output
from gradloc_proto.codec import MessageRejected
from gradloc_proto.messages import Message, StepObserved
from gradloc_proto.streams import StreamName

log = logging.getLogger("gradloc.detector")

# In this order where entries have one time: a wish that was there before a step counts for it.
STREAMS: tuple[StreamName, ...] = ("control", "steps", "findings")
_ENTRY_ID = re.compile(r"^\d{1,20}-\d{1,20}$")
_DEAD_LETTER_BYTES_MAX = 4_096
_LENGTH_TOLERANCE = 1.1  # writers cut streams by whole nodes


@dataclass(slots=True)
class _Held:
    """State in memory, and what has happened to it since the last commit."""

    state: DetectorState
    cursors: dict[StreamName, str]
    committed_cursor: str
    outputs: list[Output]
    num_folded: int = 0
    folded_at: float = 0.0  # of the first message since the last commit


class OwnedRun:
    """A run of the registry. Owned between `take` and the loss or release of its lease."""

    def __init__(self, run_id: str, policy: Policy, metrics: Metrics) -> None:
        self.run_id = run_id
        self._policy, self._metrics = policy, metrics
        self._keys: dict[StreamName, str] = {name: streams.stream(run_id, name) for name in STREAMS}
        self._nonce = ""
        self._held: _Held | None = None
        self._committed: tuple[dict[StreamName, str], Place | None] | None = None  # cursors and last step
        self.lag_s = 0.0

    @property
    def is_owned(self) -> bool:
        return self._held is not None

    @property
    def state(self) -> DetectorState:
        assert self._held is not None, "only an owned run has a state"
        return self._held.state

    # --- ownership ---

    def take(self, bus: Bus, *, ttl_s: float) -> bool:
        """Take the lease under a fresh nonce and load the checkpoint; False when another owns the run."""
        nonce = secrets.token_hex(16)
        if not bus.acquire_lease(self.run_id, nonce, ttl_s=ttl_s):
            return False
        self._nonce = nonce
        self._load(bus)
        return True

    def renew(self, bus: Bus, *, ttl_s: float) -> bool:
        """Prolong the lease; False when it is gone, and with it everything not committed."""
        if bus.renew_lease(self.run_id, self._nonce, ttl_s=ttl_s):
            return True
        self._lose()
        return False

    def release(self, bus: Bus) -> None:
        self._held = None
        bus.release_lease(self.run_id, self._nonce)

    def _lose(self) -> None:
        self._held = None
        self._metrics.leases_lost.inc()
        log.warning("run %s: the lease is not ours any more; what was not committed is another's to fold", self.run_id)

    def _load(self, bus: Bus) -> None:
        checkpoint = bus.load_checkpoint(self.run_id)
        state, cursors = initial_state(self.run_id, self._policy.sensitivity), dict.fromkeys(STREAMS, START)
        lost = None
        if checkpoint is not None:
            try:
                state, cursors = load(checkpoint.state), _cursors(checkpoint.cursor)
            except StateRejected as error:
                log.error("run %s: %s", self.run_id, error)
                lost = "the detector's state; what the streams still hold is folded again"
        elif self._committed is not None:
            lost = "the detector's checkpoint; what the streams still hold is folded again"
        known, place = self._committed or ({}, None)
        if lost is None and any(_order(cursors[name]) < _order(cursor) for name, cursor in known.items()):
            lost = (
                "the last commits, as a replica does that was promoted without them; folded again from the one before"
            )
        self._held = _Held(state, cursors, checkpoint.cursor if checkpoint else "", [])
        if lost is not None:
            log.error("run %s: Redis lost %s", self.run_id, lost)
            self._metrics.losses.inc()
            self._committed = None  # told once
            place = place if place is not None else _newest_step(bus, self._keys["steps"])
            self._absorb_effects("steps", *loss_noticed(state, lost, place))
        elif checkpoint is not None:
            self._committed = dict(cursors), _last_step(state)

    # --- folding ---

    def read_cursors(self) -> dict[str, str]:
        assert self._held is not None
        return {self._keys[name]: cursor for name, cursor in self._held.cursors.items()}

    def absorb(self, found: Mapping[str, list[Entry]], now: float) -> int:
        """Fold entries, in the order of their ids over all streams; returns how many there were."""
        assert self._held is not None
        self.lag_s = 0.0
        entries = [(entry, name) for name in STREAMS for entry in found.get(self._keys[name], ())]
        if len(found.keys() & self._keys.values()) > 1:
            entries.sort(key=lambda pair: _order(pair[0].id))
        stretch, start, asked_again_at = calm_steps.Stretch(()), 0, 0
        while start < len(entries):
            num = 0
            if start >= asked_again_at and calm_steps.is_possible(self.state, self._policy):
                if stretch.names != self.state.baselines.layer_names:
                    stretch = calm_steps.Stretch(self.state.baselines.layer_names)
                _gather(stretch, entries, start)
                num = self._absorb_stretch(stretch, now)
                # A run in trouble is not asked at each step whether it is calm again.
                asked_again_at = start + calm_steps.STRETCH_MIN if num == 0 else 0
            if num == 0:
                self._absorb_entry(*entries[start], now)
                num = 1
            stretch.drop(num)
            start += num
            entry, name = entries[start - 1]
            self._held.cursors[name] = entry.id
        if entries and self._held.num_folded == 0:
            self._held.folded_at = now
        self._held.num_folded += len(entries)
        return len(entries)

    def _absorb_stretch(self, stretch: calm_steps.Stretch, now: float) -> int:
        """Fold the calm steps at the beginning of `stretch` at once; returns how many those were."""
        if len(stretch) < calm_steps.STRETCH_MIN:
            return 0
        try:
            num, state, effects = calm_steps.folded(self.state, stretch, self._policy)
        except Exception:
            self._metrics.failures.inc()
            log.exception("run %s: folding a stretch of steps failed; they are folded one by one", self.run_id)
            return 0
        if num:
            self.lag_s = max(0.0, now - stretch.steps[num - 1].ts)
            self._metrics.messages.labels("steps").inc(num)
            self._absorb_effects("steps", state, effects)
        return num

    def _absorb_entry(self, entry: Entry, name: StreamName, now: float) -> None:
        try:
            message = codec.decode(entry.data)
        except MessageRejected as error:
            self._set_aside(name, entry, str(error))
            return
        if not isinstance(message, ACCEPTED[name]):
            self._set_aside(name, entry, f"a {type(message).__name__} does not belong in stream {name!r}")
            return
        if isinstance(message, StepObserved):
            self.lag_s = max(0.0, now - message.ts)
        self._metrics.messages.labels(name).inc()
        try:
            state, effects = fold(self.state, message, self._policy)
        except Exception as error:
            self._metrics.failures.inc()
            log.exception("run %s: folding a %s failed; it is set aside", self.run_id, type(message).__name__)
            self._set_aside(name, entry, f"internal error: {type(error).__name__}")
            return
        self._absorb_effects(name, state, effects, entry)

    def _absorb_effects(
        self, name: StreamName, state: DetectorState, effects: Effects, entry: Entry | None = None
    ) -> None:
        assert self._held is not None
        self._held.state = state
        for effect in effects:
            match effect:
                case Emit(stream, message):
                    self._held.outputs.append(_output(self.run_id, stream, message))
                    self._metrics.emitted.labels(str(getattr(message, "type", ""))).inc()
                case Rejection(reason):
                    self._set_aside(name, entry, reason)

    def _set_aside(self, name: StreamName, entry: Entry | None, reason: str) -> None:
        assert self._held is not None
        self._metrics.rejected.labels(name).inc()
        log.warning("run %s: rejected a message in %s: %s", self.run_id, name, reason)
        data = entry.data if entry is not None else b""
        letter = {
            "stream": name,
            "id": entry.id if entry is not None else "",
            "reason": reason,
            "num_bytes": len(data),
            "data_base64": base64.b64encode(data[:_DEAD_LETTER_BYTES_MAX]).decode(),
        }
        self._held.outputs.append(
            Output(streams.dead_letters(self.run_id), json.dumps(letter).encode(), streams.DEAD_LETTERS_LENGTH_MAX)
        )

    # --- committing ---

    def is_commit_due(self, now: float, *, every: int, every_s: float) -> bool:
        held = self._held
        if held is None:
            return False
        is_old = held.num_folded > 0 and now > held.folded_at + every_s
        return bool(held.outputs) or held.num_folded >= every or is_old

    def commit(self, bus: Bus) -> CommitResult:
        """Write outputs, state and cursor, or lose the claim to the run. May raise BusUnavailable.

        Trying again after an error is safe: had the first try been done, the cursor has moved.
        """
        held = self._held
        assert held is not None
        new_cursor = json.dumps(held.cursors, sort_keys=True, separators=(",", ":"))
        result = bus.commit(
            Commit(
                run_id=self.run_id,
                nonce=self._nonce,
                expected_cursor=held.committed_cursor,
                new_cursor=new_cursor,
                state=dump(held.state),
                outputs=tuple(held.outputs),
            )
        )
        self._metrics.commits.labels(result.value).inc()
        match result:
            case CommitResult.DONE:
                held.committed_cursor, held.outputs, held.num_folded = new_cursor, [], 0
                self._committed = dict(held.cursors), _last_step(held.state)
            case CommitResult.LEASE_LOST:
                self._lose()
            case CommitResult.CURSOR_MOVED:
                log.warning("run %s: its checkpoint has moved under us; loading it again", self.run_id)
                self._load(bus)
            case CommitResult.REFUSED:
                self._load(bus)
                raise BusUnavailable(f"run {self.run_id}: one of its keys holds a foreign type or an absurd id")
        return result

    # --- loss, growth, rest ---

    def check_loss(self, bus: Bus) -> None:
        """Read a stream again from its start when it ends before our cursor: Redis lost its end."""
        held = self._held
        if held is None:
            return
        for name in STREAMS:
            if _order(held.cursors[name]) <= _order(bus.last_id(self._keys[name])):
                continue
            self._metrics.losses.inc()
            log.error("run %s: stream %s ends before what was read of it; reading it again", self.run_id, name)
            held.cursors[name] = START
            held.num_folded += 1
            what = f"the end of stream {name!r}, which had been read further than it now reaches; it is read again"
            self._absorb_effects(name, *loss_noticed(held.state, what))

    def shorten(self, bus: Bus) -> None:
        """Cut streams whose writers did not, where nothing in them is still to be read."""
        held = self._held
        if held is None:
            return
        for name in STREAMS:
            key, length_max = self._keys[name], streams.STREAM_LENGTH_MAX[name]
            if bus.length(key) > _LENGTH_TOLERANCE * length_max and held.cursors[name] == bus.last_id(key):
                log.warning("run %s: stream %s is longer than agreed; cut to %d entries", self.run_id, name, length_max)
                bus.shorten(key, length_max=length_max)


def _gather(stretch: calm_steps.Stretch, entries: list[tuple[Entry, StreamName]], start: int) -> None:
    """Let `stretch`, which begins with the entry at `start`, take in what follows as long as it is ordinary."""
    end = min(start + calm_steps.STRETCH_MAX, len(entries))
    for place in range(start + len(stretch), end):
        entry, name = entries[place]
        if name != "steps" or not stretch.add(entry.data):
            break


def _output(run_id: str, stream: StreamName, message: Message) -> Output:
    return Output(streams.stream(run_id, stream), codec.encode(message), streams.STREAM_LENGTH_MAX[stream])


def _last_step(state: DetectorState) -> Place | None:
    book = state.book
    return None if book.last_step is None else Place(attempt=book.attempt, step=book.last_step)


def _newest_step(bus: Bus, key: str) -> Place | None:
    """The newest step that a stream holds, as far as a look at its end tells."""
    for entry in reversed(bus.read_last(key, count=8)):
        try:
            message = codec.decode(entry.data)
        except MessageRejected:
            continue
        if isinstance(message, StepObserved):
            return Place(attempt=message.attempt, step=message.step)
    return None


def _cursors(text: str) -> dict[StreamName, str]:
    """Stream -> entry id of a cursor we wrote. Raises StateRejected."""
    try:
        document = json.loads(text)
        cursors: dict[StreamName, str] = {name: str(document[name]) for name in STREAMS}
    except (ValueError, KeyError, TypeError):
        raise StateRejected("the cursor is not one of the detector; expected stream -> entry id") from None
    if not all(_ENTRY_ID.match(entry_id) for entry_id in cursors.values()):
        raise StateRejected("the cursor holds something that is no entry id")
    return cursors


def _order(entry_id: str) -> tuple[int, int]:
    milliseconds, _, number = entry_id.partition("-")
    return int(milliseconds), int(number or 0)
