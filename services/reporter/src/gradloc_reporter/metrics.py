"""/metrics for Prometheus: the only door to prometheus_client.

Facts are counted in the database at each scrape, so that they survive a restart; what this process
did is counted in it. Labels are few and bounded: run, verdict, cause, stream, state, and receiver (at
most fifty, named by whoever runs the reporter). Never a token, a step or a text.
"""

import re
import time
from collections.abc import Callable, Iterable, Iterator
from typing import get_args

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from gradloc_reporter.consumer import Consumption
from gradloc_reporter.keeper import SnapshotCounts
from gradloc_reporter.snapshot_rules import Reason
from gradloc_reporter.store.engine import Database
from gradloc_reporter.store.totals import RunTotals, finding_counts, localization_counts, run_totals

CAUSES_MAX = 32  # distinct causes told apart; a cause comes from outside
_CAUSE = re.compile(r"^[a-z][a-z0-9_-]{0,39}$")


class ReporterMetrics(Collector):
    """Collects from the database and from the counts of this process."""

    def __init__(
        self,
        database: Database,
        consumption: Consumption,
        *,
        clock: Callable[[], float],
        receiver_counts: Callable[[], dict[tuple[str, str, str], int]],
        snapshots: SnapshotCounts | None = None,
        quota_bytes: int | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._snapshots, self._quota_bytes = snapshots, quota_bytes
        self._database = database
        self._consumption = consumption
        self._clock = clock
        self._monotonic = monotonic
        self._started_at = monotonic()
        self._receiver_counts = receiver_counts
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def exposition(self) -> tuple[bytes, str]:
        """Body and content type of an answer to a scrape."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST

    def describe(self) -> Iterable[Metric]:
        return ()  # registering must not read the database

    def collect(self) -> Iterator[Metric]:
        with self._database.reading() as session:
            runs = run_totals(session, self._clock())
            findings = finding_counts(session)
            localizations = localization_counts(session)
        yield from _of_runs(runs)
        yield _of_findings(findings)
        yield _counter(
            "gradloc_localizations", "Localization attempts by state", "state", list(localizations.items()), gauge=True
        )
        yield from self._of_this_process()

    def _of_this_process(self) -> Iterator[Metric]:
        told = self._consumption
        streams = sorted({*told.consumed, *told.rejected, *told.rewound} | {"steps", "incidents", "findings"})
        for name, text, counts in (
            ("gradloc_messages_read", "Stream entries read by this reporter since it started", told.consumed),
            ("gradloc_messages_rejected", "Messages that could not be read or stored", told.rejected),
            ("gradloc_streams_rewound", "Streams read from the start again because Redis lost data", told.rewound),
        ):
            yield _counter(name, text, "stream", [(stream, counts[stream]) for stream in streams])
        caught_up_at = self._started_at if told.caught_up_at is None else told.caught_up_at
        yield GaugeMetricFamily(
            "gradloc_reporter_lag_seconds",
            "Time since the reporter last knew that it had read everything",
            value=max(0.0, self._monotonic() - caught_up_at),
        )
        yield GaugeMetricFamily(
            "gradloc_reporter_bus_up", "1 while Redis answers the reporter", value=float(told.bus_answers)
        )
        calls = CounterMetricFamily(
            "gradloc_receiver_calls", "Calls to receivers by outcome", labels=["receiver", "kind", "outcome"]
        )
        for labels, count in sorted(self._receiver_counts().items()):
            calls.add_metric(labels, count)
        yield calls
        yield from self._of_snapshots()

    def _of_snapshots(self) -> Iterator[Metric]:
        """Without a store to keep small the families are there, empty."""
        told = self._snapshots
        removed = [] if told is None else [(reason, told.removed[reason]) for reason in get_args(Reason)]
        yield _counter("gradloc_snapshots_removed", "Snapshots removed by the reporter", "reason", removed)
        for name, text, value in (
            (
                "gradloc_snapshots_bytes",
                "Bytes of all snapshots in the store",
                None if told is None else told.num_bytes,
            ),
            (
                "gradloc_snapshots_quota_bytes",
                "Bytes that snapshots may take",
                None if told is None else self._quota_bytes,
            ),
        ):
            yield GaugeMetricFamily(name, text, value=value)
        yield CounterMetricFamily(
            "gradloc_snapshot_sweeps_failed",
            "Passes over the store that failed",
            value=None if told is None else told.num_failures,
        )


def _of_runs(runs: list[RunTotals]) -> Iterator[Metric]:
    gauges: tuple[tuple[str, str, Callable[[RunTotals], float | None]], ...] = (
        ("gradloc_grad_norm", "Gradient norm of the newest step, before clipping", lambda run: run.grad_norm),
        ("gradloc_grad_norm_limit", "Norm above which a step is a spike", lambda run: run.limit),
        ("gradloc_grad_norm_healthy", "Median of the norms the limit was learnt from", lambda run: run.healthy_norm),
        ("gradloc_step", "Newest step", lambda run: run.step),
        ("gradloc_incidents_open", "Incidents that are not resolved", lambda run: run.num_incidents_open),
    )
    counters: tuple[tuple[str, str, Callable[[RunTotals], float]], ...] = (
        ("gradloc_incidents", "Incidents opened", lambda run: run.num_incidents),
        ("gradloc_spikes", "Abnormal steps", lambda run: run.num_spikes),
        ("gradloc_events_dropped", "Events the trainer could not send", lambda run: run.num_events_dropped),
    )
    for name, text, value_of in gauges:
        gauge = GaugeMetricFamily(name, text, labels=["run"])
        for run in runs:
            value = value_of(run)
            if value is not None:
                gauge.add_metric([run.run_id], value)
        yield gauge
    for name, text, count_of in counters:
        counter = CounterMetricFamily(name, text, labels=["run"])
        for run in runs:
            counter.add_metric([run.run_id], count_of(run))
        yield counter


def _of_findings(findings: list[tuple[str, str | None, int]]) -> Metric:
    """By verdict and cause; causes that do not look like a name, or are too many, count as "other"."""
    counts: dict[tuple[str, str], int] = {}
    causes: set[str] = set()
    for verdict, cause, count in sorted(findings, key=lambda item: -item[2]):
        label = "none" if cause is None else cause
        if not _CAUSE.match(label) or (label not in causes and len(causes) >= CAUSES_MAX):
            label = "other"
        causes.add(label)
        counts[verdict, label] = counts.get((verdict, label), 0) + count
    counter = CounterMetricFamily(
        "gradloc_findings", "Incidents explained, by verdict and cause", labels=["verdict", "cause"]
    )
    for (verdict, label), count in counts.items():
        counter.add_metric([verdict, label], count)
    return counter


def _counter(name: str, text: str, label: str, values: list[tuple[str, int]], *, gauge: bool = False) -> Metric:
    family: CounterMetricFamily | GaugeMetricFamily = (
        GaugeMetricFamily(name, text, labels=[label]) if gauge else CounterMetricFamily(name, text, labels=[label])
    )
    for value, count in values:
        family.add_metric([value], count)
    return family
