"""Keeps database and store small, beside everything else: thins old steps, removes snapshots that nobody needs."""

import logging
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from gradloc_reporter.settings import SnapshotSettings
from gradloc_reporter.snapshot_rules import Place, plan
from gradloc_reporter.snapshot_store import SnapshotStore, StoreUnavailable, place_of
from gradloc_reporter.store import DBAPIError, retention, snapshot_records
from gradloc_reporter.store.engine import Database
from gradloc_reporter.store.tables import SnapshotRow

log = logging.getLogger(__name__)

LOOK_S = 3600.0
READY_S = 0.5  # how often it is asked whether the streams were read whole
PAUSE_S = 0.2  # between stretches: the consumer wants to write, too
RUNS_AT_ONCE = 100
DAY_S = 86_400.0


class Keeper:
    def __init__(self, database: Database, *, keep_steps_days: float, clock: Callable[[], float]) -> None:
        self._database, self._keep_s, self._clock = database, keep_steps_days * DAY_S, clock
        self._stopping = threading.Event()

    def stop(self) -> None:
        self._stopping.set()

    def run(self) -> None:
        while not self._stopping.is_set():
            try:
                removed = self.thin_once()
            except DBAPIError as error:
                log.warning("old steps were not thinned: %s; trying again", type(error).__name__)
                removed = 0
            if removed:
                log.info("thinned old steps: %d removed", removed)
            self._stopping.wait(LOOK_S)

    def thin_once(self) -> int:
        """Thin all that is old; says how many steps went."""
        before = self._clock() - self._keep_s
        total = 0
        with self._database.reading() as session:
            runs = retention.runs_with_old_steps(session, before=before, limit=RUNS_AT_ONCE)
        for run_id in runs:
            while not self._stopping.is_set():
                with self._database.writing() as session:
                    removed = retention.thin(session, run_id, before=before)
                total += removed
                if not removed:
                    break
                self._stopping.wait(PAUSE_S)
        return total


@dataclass(slots=True)
class SnapshotCounts:
    """Since this process started; `num_bytes` is what the store held after the newest pass, None before it."""

    removed: Counter[str] = field(default_factory=Counter)  # by reason
    num_bytes: int | None = None
    num_failures: int = 0


class SnapshotKeeper:
    """`run` until `stop`. Raises ValueError when the store's URL cannot be one."""

    def __init__(
        self,
        database: Database,
        settings: SnapshotSettings,
        *,
        clock: Callable[[], float],
        ready: Callable[[], bool] = lambda: True,
    ) -> None:
        """`ready` says whether the database knows all that was told: before that everything would seem an orphan."""
        self._database, self._settings, self._clock, self._ready = database, settings, clock, ready
        self._store = SnapshotStore(settings.url)
        self._stopping = threading.Event()
        self.counts = SnapshotCounts()

    def stop(self) -> None:
        self._stopping.set()

    def run(self) -> None:
        while not self._stopping.is_set():
            if not self._ready():
                self._stopping.wait(READY_S)
                continue
            try:
                removed = self.sweep_once()
            except (DBAPIError, StoreUnavailable) as error:
                self.counts.num_failures += 1
                why = str(error) if isinstance(error, StoreUnavailable) else "the database does not answer"
                log.warning("snapshots were not swept: %s; trying again in an hour", why)
                removed = 0
            if removed:
                log.info("removed %d snapshots that nobody needs", removed)
            self._stopping.wait(LOOK_S)

    def sweep_once(self) -> int:
        """Remove what the rules say; how many went. A removal that was cut short is done again by the next pass."""
        found = self._store.found()
        with self._database.reading() as session:  # after the look: what was told meanwhile is known
            known = snapshot_records.known(session, _place)
            known_runs = snapshot_records.known_runs(session)
        going = plan(
            found,
            known,
            known_runs=known_runs,
            now=self._clock(),
            keep_s=self._settings.keep_days * DAY_S,
            quota_bytes=self._settings.quota_bytes,
        )
        self.counts.num_bytes = sum(each.num_bytes for each in found)
        removed = 0
        for each in going:
            if self._stopping.is_set():
                break
            if self._is_held(each.place):
                continue
            self._store.remove(each.place)
            with self._database.writing() as session:
                snapshot_records.removed(session, each.place, each.reason, place_of=_place, now=self._clock())
            self.counts.removed[each.reason] += 1
            self.counts.num_bytes -= each.num_bytes
            removed += 1
        return removed

    def _is_held(self, place: Place) -> bool:
        """Whether somebody pinned or opened it again since the plan was made: a pass may take long."""
        with self._database.reading() as session:
            now = snapshot_records.known(session, _place, run_id=place.run_id).get(place)
        return now is not None and now.held


def _place(row: SnapshotRow) -> Place | None:
    return place_of(row.path or "", run_id=row.run_id, attempt=row.attempt)
