"""Notices as JSON over HTTP: the generic webhook, and what Alertmanager's API needs. The only door to httpx."""

import re
from collections import Counter
from html import escape  # Grafana shows the text of an annotation as HTML
from typing import Any

import httpx
import orjson

from gradloc_reporter.notices.door import Notice, RateLimited, Refused, Stage, Unreachable
from gradloc_reporter.rendering import plain

TIMEOUT_S = 10.0
TIME_MAX_S = 1e11  # a trainer's clock may say anything
RETRY_AFTER_DEFAULT_S, RETRY_AFTER_MAX_S = 5.0, 300.0


def post_json(url: str, body: bytes, *, what: str, counts: Counter[str], headers: dict[str, str]) -> None:
    """Raises RateLimited, Refused or Unreachable; none of them names the address, which may hold a secret."""
    try:
        answer = httpx.post(
            url,
            content=body,
            headers={"Content-Type": "application/json", **headers},
            timeout=TIMEOUT_S,
            follow_redirects=False,
        )
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        counts["unreachable"] += 1
        raise Unreachable(f"{what}: {type(error).__name__}") from None
    if answer.status_code == 429:
        counts["rate_limited"] += 1
        raise RateLimited(_retry_after(answer.headers.get("retry-after", "")))
    if answer.status_code >= 500:
        counts["unreachable"] += 1
        raise Unreachable(f"{what}: status {answer.status_code}")
    if answer.status_code >= 300:
        counts["refused"] += 1
        raise Refused(f"{what}: status {answer.status_code}; check its address")
    counts["ok"] += 1


def _retry_after(value: str) -> float:
    if not re.fullmatch(r"[0-9]{1,9}", value.strip()):
        return RETRY_AFTER_DEFAULT_S
    return min(float(value), RETRY_AFTER_MAX_S)


class Webhook:
    """One POST a stage: {"event", "text", "incident"}; the same Idempotency-Key for the same fact."""

    stages: tuple[Stage, ...] = ("opened", "located", "resolved")

    def __init__(self, name: str, url: str) -> None:
        self.name = name
        self.counts: Counter[str] = Counter()
        self._url = url

    def post(self, notice: Notice) -> None:
        body: dict[str, Any] = {
            "version": 1,
            "event": notice.stage,
            "text": plain(notice.telling),
            "incident": orjson.Fragment(notice.incident_json),
        }
        key = {"Idempotency-Key": f"{notice.incident_id}-{notice.stage}"}
        post_json(self._url, orjson.dumps(body), what=f"webhook {self.name}", counts=self.counts, headers=key)


class GrafanaAnnotations:
    """A mark on Grafana's time axis where the spike was, with the culprit; tags gradloc and run:NAME.

    One POST is all that is needed: grafana-client, the maintained client, brings an HTTP stack that replaces
    urllib3 for the whole environment.
    """

    stages: tuple[Stage, ...] = ("located",)

    def __init__(self, name: str, url: str, token: str) -> None:
        self.name = name
        self.counts: Counter[str] = Counter()
        self._url, self._token = url.rstrip("/") + "/api/annotations", token

    def post(self, notice: Notice) -> None:
        body: dict[str, Any] = {"tags": ["gradloc", f"run:{notice.run_id}"], "text": escape(plain(notice.telling))}
        if notice.at is not None and abs(notice.at) < TIME_MAX_S:
            body["time"] = round(1000 * notice.at)
        headers = {"Authorization": f"Bearer {self._token}"}
        post_json(self._url, orjson.dumps(body), what=f"Grafana {self.name}", counts=self.counts, headers=headers)
