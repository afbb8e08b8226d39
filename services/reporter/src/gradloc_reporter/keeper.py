"""Keeps the database small: thins old steps, a stretch at a time, beside everything else."""

import logging
import threading
from collections.abc import Callable

from gradloc_reporter.store import DBAPIError, retention
from gradloc_reporter.store.engine import Database

log = logging.getLogger(__name__)

LOOK_S = 3600.0
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
