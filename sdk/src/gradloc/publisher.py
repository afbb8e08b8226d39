"""The trainer's line to the bus: a bounded queue, a background thread, and nothing that can hurt.

`put` never blocks and never raises; when the queue is full the oldest message goes and is counted.
The same thread polls the run's limits and wishes. Knows nothing of tensors.
"""

import logging
import threading
import time
from collections import deque

from gradloc_proto import codec, streams
from gradloc_proto.bus import START, Bus, BusUnavailable
from gradloc_proto.messages import Limits, LimitsChanged, Message, RunEnded, RunStarted, SnapshotRequested, StepObserved

QUEUE_LENGTH_MAX = 4_096  # more than an hour at one step a second
BATCH_LENGTH_MAX = 256
POLL_INTERVAL_S = 0.2  # between two looks for limits and wishes while messages go; a look costs half a millisecond
IDLE_INTERVAL_S = 1.0  # and while none do
BACKOFF_MAX_S = 5.0
CLOSE_TIMEOUT_S = 5.0
# A detector tells limits at latest every 32 steps: after twice as many without any, nobody watches the run.
UNWATCHED_STEPS = 64
UNWATCHED_S = 20.0
UNWATCHED_MAX_S = 600.0  # between announcements of a run that nobody wants
_log = logging.getLogger("gradloc")


class Publisher:
    """Publishes one run's messages; `limits` and `wish` are what came back.

    Redis may lose the announcement of the run: it is announced again after each outage, after each new connection (an
    outage that the client bridged by itself), and when no limits come back for UNWATCHED_STEPS steps and `unwatched_s`
    seconds.
    """

    def __init__(
        self, bus: Bus, run_id: str, *, queue_length_max: int = QUEUE_LENGTH_MAX, unwatched_s: float = UNWATCHED_S
    ) -> None:
        self._bus = bus
        self._run_id = run_id
        self._queue: deque[Message] = deque()
        self._queue_length_max = queue_length_max
        self._changed = threading.Condition()
        self._num_in_flight = 0
        self._closing = False
        self._control_cursor: str | None = None
        self._down = False
        self._announcement: RunStarted | None = None
        self._announce_again = False
        self._num_connects = 0
        self._first_step: int | None = None
        self._num_unwatched = 0  # messages since the last news of limits
        self._news_at = time.monotonic()
        self._unwatched_s = self._patience_s = unwatched_s
        self.num_dropped = 0
        self.limits: Limits | None = None
        self.wish: SnapshotRequested | None = None
        self._thread = threading.Thread(target=self._run, name="gradloc-publisher", daemon=True)
        self._thread.start()

    def put(self, message: Message) -> None:
        """Queue a message; drops the oldest when full."""
        if self._first_step is None and isinstance(message, StepObserved):
            self._first_step = message.step
        with self._changed:
            if len(self._queue) >= self._queue_length_max:
                self._queue.popleft()
                self.num_dropped += 1
            self._queue.append(message)
            self._changed.notify_all()

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Give the thread `timeout_s` to empty the queue; what is left then is counted as dropped."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: (not self._queue and not self._num_in_flight) or self._down,
                timeout=max(0.0, deadline - time.monotonic()),
            )
            self.num_dropped += len(self._queue) + self._num_in_flight
            self._queue.clear()
            self._num_in_flight = 0
        self._thread.join(timeout=max(0.0, min(1.0, deadline - time.monotonic())))

    def _run(self) -> None:
        backoff_s = 0.1
        batch: list[Message] = []
        poll_at = 0.0
        while True:
            with self._changed:
                if not batch and not self._queue and not self._closing:
                    self._changed.wait(timeout=IDLE_INTERVAL_S)
                if self._closing and not self._queue and not batch:
                    return
                while self._queue and len(batch) < BATCH_LENGTH_MAX:
                    batch.append(self._queue.popleft())
                self._num_in_flight = len(batch)
            try:
                self._send(batch)
                with self._changed:
                    batch, self._num_in_flight, self._down = [], 0, False
                    self._changed.notify_all()
                self._greet_another_server()
                if time.monotonic() >= poll_at:
                    self._poll()
                    poll_at = time.monotonic() + POLL_INTERVAL_S
                self._look_for_a_watcher()
                backoff_s = 0.1
            except BusUnavailable as error:
                self._went_down(str(error))
                if self._closing:
                    return
                time.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, BACKOFF_MAX_S)
            except Exception:  # noqa: BLE001 - nothing of ours may end a training run
                _log.exception("gradloc: publishing failed; %d messages dropped", len(batch))
                with self._changed:
                    self.num_dropped += len(batch)
                    batch, self._num_in_flight = [], 0
                    self._changed.notify_all()
                time.sleep(POLL_INTERVAL_S)

    def _went_down(self, reason: str) -> None:
        with self._changed:
            if not self._down:
                _log.warning("gradloc: %s; training goes on, telemetry waits", reason)
            self._down = True
            self._announce_again = True
            self._changed.notify_all()

    def _send(self, batch: list[Message]) -> None:
        started = [message for message in batch if isinstance(message, RunStarted)]
        if started:
            self._announcement = started[-1]
        elif self._announce_again and self._announcement is not None:
            # With its first step, so that what was lost before the first that arrives is noticed.
            started = [self._announcement.model_copy(update={"first_step": self._first_step})]
            batch = [*started, *batch]
        if not batch:
            return
        data = [codec.encode(self._with_count(message)) for message in batch]
        # The registry comes first: a run that nobody knows is watched by nobody.
        known = [codec.encode(message) for message in started]
        self._bus.append(streams.REGISTRY, known, length_max=streams.REGISTRY_LENGTH_MAX)
        if known:
            self._num_connects = self._bus.num_connects
        key = streams.stream(self._run_id, "steps")
        self._bus.append(key, data, length_max=streams.STREAM_LENGTH_MAX["steps"])
        self._announce_again = False
        self._num_unwatched += len(batch)

    def _greet_another_server(self) -> None:
        if self._announcement is not None and self._bus.num_connects > self._num_connects:
            self._announce_again = True
            self._send([])

    def _look_for_a_watcher(self) -> None:
        """Ask for the run to be announced again where nobody seems to know it, ever more rarely."""
        silent_s = time.monotonic() - self._news_at
        if self._num_unwatched >= UNWATCHED_STEPS and silent_s >= self._patience_s:
            self._announce_again = True
            self._num_unwatched, self._news_at = 0, time.monotonic()
            self._patience_s = min(2 * self._patience_s, UNWATCHED_MAX_S)

    def _with_count(self, message: Message) -> Message:
        # The last message tells what was lost until the very end.
        if isinstance(message, RunEnded):
            return message.model_copy(update={"num_events_dropped": self.num_dropped})
        return message

    def _poll(self) -> None:
        for entry in self._bus.read_last(streams.stream(self._run_id, "limits"), count=1):
            message = _readable(entry.data)
            if isinstance(message, LimitsChanged):
                if self.limits is None or message.limits.version != self.limits.version:
                    self._num_unwatched, self._news_at, self._patience_s = 0, time.monotonic(), self._unwatched_s
                self.limits = message.limits
        control = streams.stream(self._run_id, "control")
        if self._control_cursor is None:  # wishes of before this process are not for it
            self._control_cursor = self._bus.last_id(control)
        found = self._bus.read({control: self._control_cursor or START}, count=BATCH_LENGTH_MAX)
        for entry in found.get(control, []):
            self._control_cursor = entry.id
            message = _readable(entry.data)
            if isinstance(message, SnapshotRequested):
                self.wish = message


def _readable(data: bytes) -> Message | None:
    try:
        return codec.decode(data)
    except codec.MessageRejected:
        return None  # the detector counts and reports what does not parse
