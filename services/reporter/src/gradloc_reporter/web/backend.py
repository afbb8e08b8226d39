"""What the HTTP side needs of the rest of the reporter, in one frozen bundle."""

from collections.abc import Callable
from dataclasses import dataclass

from gradloc_proto.bus import Bus
from gradloc_reporter.access import Tokens
from gradloc_reporter.store.engine import Database
from gradloc_reporter.store.queries import Queries


@dataclass(frozen=True, slots=True)
class Backend:
    """`trouble` says in one line why the reporter is not ready, or None; `metrics` is Prometheus' text.

    `tokens` None lets everybody in; `secure` says that people come by https.
    """

    database: Database
    bus: Bus
    queries: Queries
    tokens: Tokens | None
    secure: bool
    clock: Callable[[], float]
    trouble: Callable[[], str | None]
    metrics: Callable[[], tuple[bytes, str]]
    on_change: Callable[[], None]
    rate_limit_per_s: float | None = None
