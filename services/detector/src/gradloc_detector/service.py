"""The detector as a process: finds runs, takes them by lease, folds and commits them in turns.

A library: `command.py` owns signals and exit codes. One thread turns; dispatching has its own
(dispatch.py), and so has /metrics (metrics.py). A run whose keys are unusable is set aside with
backoff; only a bus that does not answer a ping stops the turn, and then everything waits together.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from gradloc_detector.dispatch import Dispatcher
from gradloc_detector.metrics import Metrics
from gradloc_detector.owned_run import STREAMS, OwnedRun
from gradloc_detector.plan import Plan, needs_clock, plan
from gradloc_detector.policy import DEFAULT_POLICY, Policy
from gradloc_detector.state import SETTLED, Book
from gradloc_proto import codec, streams
from gradloc_proto.bus import START, Bus, BusUnavailable, Entry
from gradloc_proto.codec import MessageRejected
from gradloc_proto.messages import RunStarted, Tick

log = logging.getLogger("gradloc.detector")

_CLOCK_AHEAD_S = 86_400.0  # an id of a later time than that was made by no clock
_CLOCK_MIN_S = 1e9  # entry ids below are no time: they were not made by a clock


@dataclass(frozen=True, slots=True)
class Settings:
    """How the shell turns. Times in seconds."""

    jobs_max: int = 4
    lease_ttl_s: float = streams.LEASE_TTL_S
    tick_s: float = 2.0
    registry_s: float = 0.5
    plan_s: float = 0.2  # looking through all runs for jobs takes milliseconds
    loss_check_s: float = 30.0  # with the gap's grace this keeps the promised minute
    rest_after_silence_s: float = streams.REST_AFTER_SILENCE_S
    rest_ttl_s: float = streams.REST_TTL_S
    read_count: int = 256
    read_runs: int = 64  # runs per pipelined read ...
    read_runs_behind: int = 2  # ... and of those with a backlog: what is read at once must fit the cache
    turn_s: float = 1.0  # of reading and folding, before the other duties have their turn
    commit_every: int = 64
    commit_every_s: float = 5.0  # of a checkpoint; what is to be told is committed at once
    poll_s: float = 0.05
    poll_idle_max_s: float = 0.5  # of a run that has been silent for a while
    poll_ended_s: float = 5.0  # a run that is over may still get wishes and findings
    backoff_max_s: float = 10.0
    set_aside_max_s: float = 30.0


@dataclass(slots=True)
class _Watch:
    """A known run, and when each of its duties is next due (seconds of the given clock)."""

    run: OwnedRun
    announced: bytes  # what the registry said
    lease_at: float = 0.0
    read_at: float = 0.0
    loss_check_at: float = 0.0
    poll_s: float = 0.0
    aside_s: float = 0.0
    aside_until: float = 0.0
    is_behind: bool = True  # until a read was not full
    heard_at: float = 0.0
    forget_at: float | None = None  # its keys are about to expire; None: they are kept


class DetectorService:
    """`turn` does all that is due once; `run` turns until told to stop."""

    def __init__(
        self,
        bus: Bus,
        *,
        dispatcher: Dispatcher | None = None,
        metrics: Metrics | None = None,
        policy: Policy = DEFAULT_POLICY,
        settings: Settings | None = None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bus, self._dispatcher, self._policy = bus, dispatcher, policy
        self.metrics = metrics if metrics is not None else Metrics()
        self._settings = settings if settings is not None else Settings()
        self._clock, self._monotonic = clock, monotonic
        self._watches: dict[str, _Watch] = {}
        self._registry_cursor = START
        self._registry_at = self._registry_check_at = self._tick_at = self._plan_at = 0.0
        self._plan = Plan()
        self._backoff_s = 0.0
        self._is_bus_up = True
        self.metrics.bus_up.set(1)
        self.metrics.ray_up.set(1)

    # --- the loop ---

    def run(self, stop: threading.Event) -> None:
        """Turn until `stop` is set, through outages of the bus; then give the runs back."""
        while not stop.is_set():
            self.metrics.beat = time.monotonic()
            try:
                num_read = self.turn()
            except BusUnavailable as error:
                stop.wait(self._outage(error))
                continue
            if not self._is_bus_up:
                self._recovered()
            if num_read == 0:
                stop.wait(self._settings.poll_s)
        self.close()

    def close(self) -> None:
        """Commit what is folded and release the leases, as far as the bus lets us."""
        if self._dispatcher is not None:
            self._dispatcher.close()
        try:
            for watch in self._owned():
                if watch.run.is_commit_due(self._clock(), every=1, every_s=0.0):
                    watch.run.commit(self._bus)
                if watch.run.is_owned:
                    watch.run.release(self._bus)
        except BusUnavailable as error:
            log.warning("%s; leases expire by themselves", error)

    def turn(self) -> int:
        """Do what is due once; returns the number of messages folded. Raises BusUnavailable."""
        now = self._monotonic()
        self._discover(now)
        for watch in list(self._watches.values()):
            if now >= watch.lease_at and now >= watch.aside_until:
                self._guarded(watch, now, partial(self._lease, watch, now))
        num_read = self._read(now)
        self._tick(now)
        if now >= self._plan_at:
            self._plan_at = now + self._settings.plan_s
            self._plan_jobs()
        return num_read

    def _outage(self, error: BusUnavailable) -> float:
        if self._is_bus_up:
            log.warning("%s; waiting with backoff, nothing is lost that Redis keeps", error)
        self._is_bus_up = False
        self.metrics.bus_up.set(0)
        self._backoff_s = min(max(0.1, 2 * self._backoff_s), self._settings.backoff_max_s)
        return self._backoff_s

    def _recovered(self) -> None:
        log.info("Redis answers again")
        self._is_bus_up, self._backoff_s = True, 0.0
        self.metrics.bus_up.set(1)
        self._registry_check_at = 0.0
        for watch in self._watches.values():
            # What came back may be older than what was there.
            watch.loss_check_at = watch.lease_at = 0.0

    # --- runs ---

    def _discover(self, now: float) -> None:
        if now < self._registry_at:
            return
        self._registry_at = now + self._settings.registry_s
        if now >= self._registry_check_at:
            self._registry_check_at = now + self._settings.loss_check_s
            self._check_registry()
        while entries := self._bus.read({streams.REGISTRY: self._registry_cursor}, count=500).get(streams.REGISTRY):
            for entry in entries:
                self._registry_cursor = entry.id
                try:
                    message = codec.decode(entry.data)
                except MessageRejected as error:
                    self.metrics.rejected.labels("registry").inc()
                    log.warning("registry: rejected an entry: %s", error)
                    continue
                is_known = not isinstance(message, RunStarted) or message.run_id in self._watches
                if is_known or self._is_expired(message.run_id, entry.id):
                    continue
                if isinstance(message, RunStarted):
                    log.info("run %s", message.run_id)
                    self._watches[message.run_id] = _Watch(
                        OwnedRun(message.run_id, self._policy, self.metrics), entry.data
                    )

    def _check_registry(self) -> None:
        """Redis may have lost its end; a run's user, who may append to it, may have trimmed or ended it for all."""
        is_ended = self._bus.discard(streams.REGISTRY, beyond_ms=int((self._clock() + _CLOCK_AHEAD_S) * 1000))
        is_lost = _number(self._registry_cursor) > _number(self._bus.last_id(streams.REGISTRY))
        is_cut = self._bus.length(streams.REGISTRY) < min(len(self._watches), streams.REGISTRY_LENGTH_MAX // 2)
        if not (is_ended or is_lost or is_cut):
            return
        what = "had an id after which none fits" if is_ended else "lost its end" if is_lost else "was trimmed"
        log.error("the registry of runs %s; announcing %d known runs again", what, len(self._watches))
        self.metrics.losses.inc()
        # A detector that starts now must find them. Whoever knows a run passes over a further announcement.
        known = [watch.announced for watch in self._watches.values()]
        self._bus.append(streams.REGISTRY, known, length_max=streams.REGISTRY_LENGTH_MAX)
        self._registry_cursor = START

    def _is_expired(self, run_id: str, entry_id: str) -> bool:
        """Whether an old announcement is of a run of which nothing is left."""
        announced_s = _number(entry_id)[0] / 1000.0
        is_old = _CLOCK_MIN_S < announced_s < self._clock() - self._settings.rest_ttl_s
        return is_old and all(self._bus.last_id(streams.stream(run_id, name)) == START for name in STREAMS)

    def _lease(self, watch: _Watch, now: float) -> None:
        ttl_s = self._settings.lease_ttl_s
        watch.lease_at = now + ttl_s / 3
        if watch.run.is_owned and watch.run.renew(self._bus, ttl_s=ttl_s):
            return
        if watch.run.take(self._bus, ttl_s=ttl_s):
            watch.read_at = watch.loss_check_at = 0.0
            watch.heard_at = now
            self._keep(watch)  # whoever had it may have let it rest

    def _owned(self) -> Iterator[_Watch]:
        return (watch for watch in list(self._watches.values()) if watch.run.is_owned)

    # --- folding ---

    def _read(self, now: float) -> int:
        due = [watch for watch in self._owned() if now >= watch.read_at and now >= watch.aside_until]
        num_read, lag_s = 0, 0.0
        deadline = self._monotonic() + self._settings.turn_s
        for batch in self._batches(due):
            if self._monotonic() > deadline:
                break  # leases, ticks and jobs are due as well; who was not read is first in the next turn
            for watch in batch:
                self._guarded(watch, now, partial(self._check, watch, now))
            batch = [watch for watch in batch if watch.run.is_owned and now >= watch.aside_until]
            cursors = {key: cursor for watch in batch for key, cursor in watch.run.read_cursors().items()}
            try:
                found = self._bus.read(cursors, count=self._settings.read_count)
            except BusUnavailable:
                self._bus.ping()
                # Redis is well, so one run's stream is not: read each alone, and set that one aside.
                found = {}
                for watch in batch:
                    self._guarded(watch, now, partial(self._read_alone, watch, found))
            for watch in batch:
                if watch.run.is_owned and now >= watch.aside_until:
                    num_read += self._guarded(watch, now, partial(self._absorb, watch, found, now))
                    lag_s = max(lag_s, watch.run.lag_s)
        self.metrics.lag_s.set(lag_s)
        return num_read

    def _batches(self, due: list[_Watch]) -> list[list[_Watch]]:
        """Runs to be read together; who has waited longest comes first."""
        due.sort(key=lambda watch: watch.read_at)
        behind = [watch for watch in due if watch.is_behind]
        level = [watch for watch in due if not watch.is_behind]
        batches = []
        for watches, size in ((level, self._settings.read_runs), (behind, self._settings.read_runs_behind)):
            batches += [watches[start : start + size] for start in range(0, len(watches), size)]
        return sorted(batches, key=lambda batch: batch[0].read_at)

    def _check(self, watch: _Watch, now: float) -> None:
        if now >= watch.loss_check_at:
            watch.loss_check_at = now + self._settings.loss_check_s
            self._rest(watch, now)  # first: keys that have expired are no loss
            watch.run.check_loss(self._bus)
            watch.run.shorten(self._bus)

    def _rest(self, watch: _Watch, now: float) -> None:
        """Let the keys of a run expire that is over or silent, and forget it just before they do."""
        settings = self._settings
        is_at_rest = _is_over(watch.run.state.book) or now - watch.heard_at >= settings.rest_after_silence_s
        if watch.forget_at is None and is_at_rest and not watch.is_behind:
            self._bus.expire(watch.run.run_id, ttl_s=settings.rest_ttl_s)
            watch.forget_at = now + settings.rest_ttl_s - 2 * settings.loss_check_s
        if watch.forget_at is not None and now >= watch.forget_at:
            log.info("run %s is over and forgotten", watch.run.run_id)
            watch.run.release(self._bus)
            del self._watches[watch.run.run_id]

    def _keep(self, watch: _Watch) -> None:
        self._bus.expire(watch.run.run_id, ttl_s=None)
        watch.forget_at = None

    def _read_alone(self, watch: _Watch, found: dict[str, list[Entry]]) -> None:
        found.update(self._bus.read(watch.run.read_cursors(), count=self._settings.read_count))

    def _absorb(self, watch: _Watch, found: dict[str, list[Entry]], now: float) -> int:
        settings, run = self._settings, watch.run
        num_read = run.absorb(found, self._clock())
        watch.is_behind = num_read >= settings.read_count
        if num_read:
            watch.heard_at = now
            if watch.forget_at is not None:
                self._keep(watch)
        if num_read:
            watch.poll_s = 0.0 if watch.is_behind else settings.poll_s
        else:
            longest_s = settings.poll_ended_s if _is_over(run.state.book) else settings.poll_idle_max_s
            watch.poll_s = min(max(settings.poll_s, watch.poll_s * 1.5), longest_s)
        watch.read_at = now + watch.poll_s
        if run.is_commit_due(self._clock(), every=settings.commit_every, every_s=settings.commit_every_s):
            run.commit(self._bus)
            if not run.is_owned:
                watch.lease_at = now + settings.lease_ttl_s / 3
        watch.aside_s = 0.0
        return num_read

    def _guarded(self, watch: _Watch, now: float, work: Callable[[], int | None]) -> int:
        """Do `work` for one run; when it fails although the bus answers, that run alone waits."""
        try:
            return work() or 0
        except BusUnavailable as error:
            self._bus.ping()
            if watch.aside_s == 0.0:
                log.error("run %s is set aside: %s", watch.run.run_id, error)
            watch.aside_s = min(max(1.0, 2 * watch.aside_s), self._settings.set_aside_max_s)
            watch.aside_until = now + watch.aside_s
            return 0

    # --- clock and jobs ---

    def _tick(self, now: float) -> None:
        """The clock goes into the streams of the runs that wait for something; the rest need none."""
        if now < self._tick_at:
            return
        self._tick_at = now + self._settings.tick_s
        length_max = streams.STREAM_LENGTH_MAX["control"]
        num_aside = 0
        for watch in self._owned():
            if now < watch.aside_until:
                num_aside += 1
                continue
            book = watch.run.state.book
            if needs_clock(book):
                tick = codec.encode(Tick(run_id=book.run_id, attempt=book.attempt, ts=self._clock()))
                key = streams.stream(book.run_id, "control")
                self._guarded(watch, now, partial(self._bus.append, key, [tick], length_max=length_max))
                watch.read_at = min(watch.read_at, now + self._settings.poll_s)
        self.metrics.runs_set_aside.set(num_aside)

    def _plan_jobs(self) -> None:
        books = [watch.run.state.book for watch in self._owned()]
        self.metrics.runs.set(len(books))
        wanted = plan(books, jobs_max=self._settings.jobs_max, policy=self._policy)
        self.metrics.jobs_ready.set(len(wanted.ready))
        self.metrics.jobs_in_flight.set(len(wanted.watch))
        if self._dispatcher is None:
            return
        self.metrics.ray_up.set(self._dispatcher.is_ray_up)
        self.metrics.jobs_submitted.set(self._dispatcher.num_submitted)
        if wanted != self._plan:
            self._plan = wanted
            self._dispatcher.put(wanted)


def _is_over(book: Book) -> bool:
    return book.ended and all(incident.localization.phase in SETTLED for incident in book.incidents)


def _number(entry_id: str) -> tuple[int, ...]:
    return tuple(int(part) for part in entry_id.split("-"))
