"""The reporter as a library: wires database, consumer, Slack and HTTP together, and starts them.

    with Reporter(bus, Settings(database="sqlite:///f.sqlite", port=0)) as reporter:
        ...  # reporter.url answers

Owns the threads (consumer, Slack, HTTP) and nothing else: signals and exit codes are `command`'s.
"""

import logging
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Self
from urllib.parse import quote

import uvicorn

from gradloc_proto.bus import Bus
from gradloc_reporter.consumer import Consumer
from gradloc_reporter.keeper import Keeper, SnapshotKeeper
from gradloc_reporter.matching import matches
from gradloc_reporter.metrics import ReporterMetrics
from gradloc_reporter.notices.alertmanager import Alertmanager, post_test_alert
from gradloc_reporter.notices.door import OUTCOMES, Door, Notice, RateLimited, Refused, Unreachable
from gradloc_reporter.notices.mail import Mail, MailServer
from gradloc_reporter.notices.web import GrafanaAnnotations, Webhook
from gradloc_reporter.routes import Receiver
from gradloc_reporter.settings import Settings, SlackSettings
from gradloc_reporter.slack.announcer import Announcer
from gradloc_reporter.slack.blocks import blocks_of, text_of
from gradloc_reporter.slack.client import SlackChannel, SlackMessage, SlackWebhook
from gradloc_reporter.store import DBAPIError
from gradloc_reporter.store.engine import Database
from gradloc_reporter.store.queries import Queries
from gradloc_reporter.text import Telling
from gradloc_reporter.web.application import application
from gradloc_reporter.web.backend import Backend
from gradloc_reporter.web.live import Live
from gradloc_reporter.web.whatif import WhatIfApp

log = logging.getLogger(__name__)

START_S = 15.0  # uvicorn listens within a second; more means that something is wrong
STOP_S = 10.0  # each thread ends after its present call
READY_LAG_S = 60.0  # a reporter that has not read for this long is not ready: the promised minute


class AddressTaken(ValueError):
    """Host and port cannot be listened on; the text says what to do."""


class Reporter:
    """Raises DatabaseUnusable, AddressTaken or ValueError when it cannot be made."""

    def __init__(self, bus: Bus, settings: Settings, *, clock: Callable[[], float] = time.time) -> None:
        self._socket = _listen(settings.host, settings.port)
        try:
            self._database = Database(settings.database)
            snapshots = self._snapshot_keeper(settings, clock)
        except ValueError:
            self._socket.close()
            raise
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        self.url = f"http://{host}:{self._socket.getsockname()[1]}"
        self._public_url = (settings.public_url or self.url).rstrip("/")
        queries = Queries(page_url=self._page_url, hide_text=settings.redact_tokens)
        self._consumer = Consumer(bus, self._database, on_commit=self._notice, clock=clock)
        self._announcers = announcers(self._database, queries, settings, clock)
        self._keeper = (
            Keeper(self._database, keep_steps_days=settings.keep_steps_days, clock=clock)
            if settings.keep_steps_days
            else None
        )
        self._snapshots = snapshots
        self._metrics = ReporterMetrics(
            self._database,
            self._consumer.consumption,
            clock=clock,
            receiver_counts=self._receiver_counts,
            snapshots=None if snapshots is None else snapshots.counts,
            quota_bytes=None if settings.snapshots is None else settings.snapshots.quota_bytes,
        )
        self._started_at = time.monotonic()
        backend = Backend(
            database=self._database,
            bus=bus,
            queries=queries,
            tokens=settings.tokens,
            secure=self._public_url.startswith("https://"),
            clock=clock,
            trouble=self.trouble,
            metrics=self._metrics.exposition,
            on_change=self._notice,
            rate_limit_per_s=settings.rate_limit_per_s,
        )
        self._live = Live(backend)
        whatif = None if settings.whatif_url is None else WhatIfApp(settings.whatif_url, settings.whatif_token)
        self._server = uvicorn.Server(
            uvicorn.Config(
                application(backend, self._live, whatif),
                log_config=None,
                access_log=False,
                server_header=False,
                lifespan="off",
                timeout_graceful_shutdown=3,
            )
        )
        self._failed = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self) -> Self:
        """Start all threads; returns when HTTP answers."""
        self._spawn("http", lambda: self._server.run(sockets=[self._socket]))
        self._spawn("consumer", self._consumer.run)
        for name, keeper in (("keeper", self._keeper), ("snapshot-keeper", self._snapshots)):
            if keeper is not None:
                self._spawn(name, keeper.run)
        for number, (_, _, each) in enumerate(self._announcers):
            self._spawn(f"receiver-{number}", each.run)
        deadline = time.monotonic() + START_S
        while not self._server.started and not self._failed.is_set() and time.monotonic() < deadline:
            time.sleep(0.01)
        if not self._server.started:
            self.stop()
            raise RuntimeError(f"the reporter's HTTP server did not start on {self.url} within {START_S:g} s")
        return self

    def stop(self) -> None:
        """End all threads after their present work; idempotent."""
        self._consumer.stop()
        for keeper in (self._keeper, self._snapshots):
            if keeper is not None:
                keeper.stop()
        for _, _, each in self._announcers:
            each.stop()
        self._live.close()
        self._server.should_exit = True
        for thread in self._threads:
            thread.join(STOP_S)
        self._threads = []
        self._socket.close()
        self._database.close()

    def wait_failed(self, timeout_s: float) -> bool:
        """True as soon as one of the threads has ended by an error (it is in the log)."""
        return self._failed.wait(timeout_s)

    def trouble(self) -> str | None:
        """Why the reporter is not ready, in one line; None when it is."""
        if self._failed.is_set():
            return "a part of the reporter has failed"
        try:
            self._database.ping()
        except DBAPIError:
            return "the database does not answer"
        if not self._consumer.consumption.bus_answers:
            return "Redis does not answer"
        lag_s = self._lag_s()
        return f"the streams were last read whole {lag_s:.0f} s ago" if lag_s > READY_LAG_S else None

    def _snapshot_keeper(self, settings: Settings, clock: Callable[[], float]) -> SnapshotKeeper | None:
        if settings.snapshots is None:
            return None
        return SnapshotKeeper(self._database, settings.snapshots, clock=clock, ready=self._is_caught_up)

    def _lag_s(self) -> float:
        caught_up_at = self._consumer.consumption.caught_up_at
        return time.monotonic() - (self._started_at if caught_up_at is None else caught_up_at)

    def _is_caught_up(self) -> bool:
        consumption = self._consumer.consumption
        return consumption.bus_answers and consumption.caught_up_at is not None and self._lag_s() < READY_LAG_S

    def _page_url(self, incident_id: str) -> str:
        return f"{self._public_url}/incidents/{quote(incident_id, safe='')}"

    def _notice(self) -> None:
        self._live.poke()
        for _, _, each in self._announcers:
            each.notice()

    def _receiver_counts(self) -> dict[tuple[str, str, str], int]:
        """Calls by receiver, its kind and outcome. What has not happened yet is 0, so that the first one is a rise."""
        found: dict[tuple[str, str, str], int] = {}
        for name, kind, each in self._announcers:
            counts = each.counts
            for outcome in sorted({*OUTCOMES, *counts}):
                found[name, kind, outcome] = counts[outcome]
        return found

    def _spawn(self, name: str, work: Callable[[], None]) -> None:
        def watched() -> None:
            try:
                work()
            except Exception:
                log.exception("the reporter's %s thread failed", name)
                self._failed.set()

        thread = threading.Thread(target=watched, name=f"gradloc-reporter-{name}", daemon=True)
        thread.start()
        self._threads.append(thread)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()


def announcers(
    database: Database, queries: Queries, settings: Settings, clock: Callable[[], float]
) -> list[tuple[str, str, Announcer | Alertmanager]]:
    """Name, kind and announcer of each receiver: those of the options, and those of the file."""
    found: list[tuple[str, str, Announcer | Alertmanager]] = []
    slack = settings.slack
    interval_s = SlackSettings().interval_s if slack is None else slack.interval_s
    if slack is not None and (slack.channel is not None or slack.webhook is not None):
        kind = "slack-webhook" if slack.channel is None else "slack"
        door: SlackChannel | Door = (
            SlackWebhook("webhook", slack.webhook or "") if slack.channel is None else _channel(slack, slack.channel)
        )
        found.append((kind, kind, Announcer(database, queries, door, clock=clock, interval_s=interval_s)))
    for receiver in settings.receivers:
        if receiver.kind == "alertmanager":
            alerts = Alertmanager(
                database, queries, receiver.options["url"], name=receiver.name, clock=clock, when=receiver.when
            )
            found.append((receiver.name, receiver.kind, alerts))
            continue
        wanted = partial(matches, receiver.when)
        door = door_of(receiver, slack)
        announcer = Announcer(database, queries, door, wanted=wanted, clock=clock, interval_s=interval_s)
        found.append((receiver.name, receiver.kind, announcer))
    return found


def door_of(receiver: Receiver, slack: SlackSettings | None) -> SlackChannel | Door:
    """Where notices of this receiver go."""
    options = receiver.options
    if receiver.kind == "slack":
        assert slack is not None, "checked by Settings"
        return _channel(slack, options["channel"])
    if receiver.kind == "slack-webhook":
        return SlackWebhook(receiver.name, receiver.secret or "")
    if receiver.kind == "grafana":
        return GrafanaAnnotations(receiver.name, options["url"], receiver.secret or "")
    if receiver.kind == "webhook":
        return Webhook(receiver.name, receiver.secret or "")
    server = MailServer(
        host=options["host"],
        port=options.get("port", 587),
        starttls=options.get("starttls", True),
        user=options.get("user"),
        password=receiver.secret,
    )
    to = options["to"]
    return Mail(receiver.name, server, sender=options["from"], to=tuple(to) if isinstance(to, list) else (to,))


def notified(receiver: Receiver, slack: SlackSettings | None) -> str | None:
    """Send a test notice; None when it was taken, else why not, in one line."""
    headline = "Test · gradloc notify-test"
    telling = Telling(headline, "nothing has happened", (), "This receiver hears of incidents.", None)
    notice = Notice("test", "opened", telling, b"null")
    try:
        if receiver.kind == "alertmanager":
            post_test_alert(receiver.options["url"], time.time())
            return None
        door = door_of(receiver, slack)
        if isinstance(door, SlackChannel):
            door.post("test", SlackMessage(text_of(telling), blocks_of(telling)))
        else:
            door.post(notice)
    except (RateLimited, Refused, Unreachable) as error:
        return str(error)
    return None


def _channel(slack: SlackSettings, channel: str) -> SlackChannel:
    assert slack.token is not None, "checked by Settings"
    return SlackChannel(token=slack.token, channel=channel, base_url=slack.base_url)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(128)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise AddressTaken(
            f"cannot listen on {host}:{port}: {error.strerror or error}; choose another --host or --port"
        ) from None
    return listener
