"""Incidents as alerts of Alertmanager (API v2), firing ones posted again and again so that they do not expire.

Labels name the alert, so they must not change while it fires: alertname, run, incident, the run's
labels, and the severity it was first posted with. One that grows worse ends, and the worse one begins.
"""

import logging
import re
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import orjson

from gradloc_reporter.answers import Matcher
from gradloc_reporter.notices.door import RateLimited, Refused, Unreachable
from gradloc_reporter.notices.web import post_json
from gradloc_reporter.rendering import plain
from gradloc_reporter.store import DBAPIError, alerts
from gradloc_reporter.store.engine import Database
from gradloc_reporter.store.queries import Queries
from gradloc_reporter.text import tell

log = logging.getLogger(__name__)

REPOST_S = 60.0
EXPIRE_S = 300.0  # a reporter that is gone for so long no longer knows whether the alert fires
ALERTS_MAX = 500  # a storm of runs is told by those that fire already and the newest besides
_LABEL = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*$")


class Alertmanager:
    """`run` until `stop`; `notice` says that something may have changed."""

    def __init__(
        self,
        database: Database,
        queries: Queries,
        url: str,
        *,
        name: str,
        clock: Callable[[], float],
        when: Sequence[Matcher] = (),
        repost_s: float = REPOST_S,
        expire_s: float = EXPIRE_S,
    ) -> None:
        self._database, self._queries, self._clock = database, queries, clock
        self._name, self._repost_s, self._expire_s = name, repost_s, expire_s
        self._when = when
        self._url = url.rstrip("/") + "/api/v2/alerts"
        self.counts: Counter[str] = Counter()
        self._news = threading.Event()
        self._stopping = threading.Event()
        self._complained = ""

    def notice(self) -> None:
        self._news.set()

    def stop(self) -> None:
        self._stopping.set()
        self._news.set()

    def run(self) -> None:
        while not self._stopping.is_set():
            self._news.clear()
            wait_s = self._repost_s
            try:
                self.post_once()
                self._complained = ""
            except RateLimited as error:
                wait_s = error.retry_after_s
            except (Refused, Unreachable, DBAPIError) as error:
                text = str(error) if not isinstance(error, DBAPIError) else "the database does not answer"
                if text != self._complained:
                    log.warning("Alertmanager was not told: %s; trying again", text)
                self._complained = text
                wait_s = min(wait_s, 10.0)
                self._stopping.wait(wait_s)
                continue
            self._news.wait(wait_s)
            self._stopping.wait(0.5)  # what changes together is posted together

    def post_once(self) -> int:
        """Post every alert as it stands now; says how many."""
        now = self._clock()
        with self._database.reading() as session:
            found = alerts.standing(session, receiver=self._name, now=now, limit=ALERTS_MAX, when=self._when)
            bodies = [body for each in found for body in self._bodies(session, each, now)]
        if not bodies:
            return 0
        with self._database.writing() as session:  # before: a crash after the post must still end what was begun
            alerts.intend(session, found, receiver=self._name, now=now)
        post_json(self._url, orjson.dumps(bodies), what="Alertmanager", counts=self.counts, headers={})
        with self._database.writing() as session:
            alerts.posted(session, found, receiver=self._name)
        return len(bodies)

    def _bodies(self, session: Any, alert: alerts.Alert, now: float) -> list[dict[str, Any]]:
        story = self._queries.story(session, alert.incident_id)
        assert story is not None
        telling = tell(story, with_link=False)
        labels = {name: value for name, value in alert.labels.items() if _LABEL.match(name)}
        labels |= {"alertname": "GradlocIncident", "run": alert.run_id, "incident": alert.incident_id}
        body: dict[str, Any] = {
            "annotations": {"summary": f"{telling.headline} · {telling.figures}", "description": plain(telling)},
            "startsAt": _rfc3339(alert.opened_at if alert.opened_at is not None else now),
        }
        if story.url:
            body["generatorURL"] = story.url
        bodies = []
        if alert.severity_before is not None and (alert.is_over or alert.severity_before != alert.severity):
            ended = {"labels": labels | {"severity": alert.severity_before}, "endsAt": _rfc3339(now)}
            bodies.append(body | ended)
        if not alert.is_over:
            fires = {"labels": labels | {"severity": alert.severity}, "endsAt": _rfc3339(now + self._expire_s)}
            bodies.append(body | fires)
        return bodies


def post_test_alert(url: str, now: float) -> None:
    """One alert that ends by itself after a minute. Raises RateLimited, Refused or Unreachable."""
    alert = {
        "labels": {"alertname": "GradlocTest", "severity": "none"},
        "annotations": {"summary": "gradloc notify-test: nothing has happened"},
        "startsAt": _rfc3339(now),
        "endsAt": _rfc3339(now + 60),
    }
    address = url.rstrip("/") + "/api/v2/alerts"
    post_json(address, orjson.dumps([alert]), what="Alertmanager", counts=Counter(), headers={})


def _rfc3339(ts: float) -> str:
    try:
        return datetime.fromtimestamp(ts, UTC).isoformat()
    except (ValueError, OverflowError, OSError):  # a trainer's clock may say anything
        return datetime.fromtimestamp(0, UTC).isoformat()
