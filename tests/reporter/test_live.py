"""Live views: server-sent events, as a browser and as a program hear them."""

import http.client
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from gradloc_proto.memory_bus import MemoryBus
from gradloc_reporter import Reporter
from gradloc_reporter.access import Tokens, Viewer, digest
from gradloc_reporter.web.pace import Buckets

Start = Callable[..., Reporter]
TOKENS = Tokens(
    {
        digest("all"): Viewer("oncall", "operate"),
        digest("vision"): Viewer("vision", "read", frozenset({"vision"})),
    }
)


class Listener:
    """Reads a stream in its own thread; `events` are (kind, data) so far."""

    def __init__(self, url: str, headers: dict[str, str]) -> None:
        parts = urlsplit(url)
        self._connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30)
        self._connection.request("GET", f"{parts.path}?{parts.query}", headers=headers)
        self._answer = self._connection.getresponse()
        self.status, self.kind = self._answer.status, self._answer.headers["content-type"]
        self.events: list[tuple[str, Any]] = []
        self.ended = threading.Event()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        kind = ""
        try:
            while raw := self._answer.readline():
                line = raw.decode().strip()
                if line.startswith("event: "):
                    kind = line.removeprefix("event: ")
                elif line.startswith("data: "):
                    self.events.append((kind, json.loads(line.removeprefix("data: "))))
        except (OSError, ValueError, http.client.HTTPException):
            pass
        self.ended.set()

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.events]

    def join(self) -> None:
        self._thread.join(20)
        self._connection.close()


@pytest.fixture
def listen() -> Iterator[Callable[..., Listener]]:
    made: list[Listener] = []

    def listening(url: str, token: str | None = None) -> Listener:
        made.append(Listener(url, {} if token is None else {"Authorization": f"Bearer {token}"}))
        return made[-1]

    yield listening
    for each in made:
        each.join()


def test_a_listener_hears_of_steps_and_incidents_and_the_end(
    kit: Any, told: Any, bus: MemoryBus, start: Start, listen: Callable[..., Listener]
) -> None:
    reporter = start()
    heard = listen(f"{reporter.url}/api/v1/live")
    assert (heard.status, heard.kind.split(";")[0]) == (200, "text/event-stream")
    kit.until(heard.kinds, lambda kinds: kinds == ["hello"], "greeted")
    opened = told.opened()
    kit.tell(bus, told.started(), told.step(7, 0.4), opened)
    kit.until(heard.kinds, lambda kinds: {"step", "incident"} <= set(kinds), "both")
    kit.tell(bus, told.finished(opened.incident_id))
    newest = kit.until(
        lambda: [data for kind, data in heard.events if kind == "incident"][-1],
        lambda data: data["status"] == "located",
        "the finding",
    )
    assert newest == kit.ask(f"{reporter.url}/api/v1/incidents").json["incidents"][0], "as in the list"
    (step,) = [data for kind, data in heard.events if kind == "step"][-1:]
    assert (step["run_id"], step["step"], step["grad_norm"]) == (told.run_id, 7, 0.4)
    reporter.stop()
    assert heard.ended.wait(20), "a reporter that ends lets its listeners go"


def test_a_team_hears_of_its_runs_only(kit: Any, bus: MemoryBus, start: Start, listen: Callable[..., Listener]) -> None:
    reporter = start(tokens=TOKENS)
    url = f"{reporter.url}/api/v1/live"
    assert kit.ask(url).status == 401
    everything, vision = listen(url, "all"), listen(url, "vision")
    mine, other = kit.Told(run_id="mine"), kit.Told(run_id="other")
    for told, team in ((other, "rl"), (mine, "vision")):
        kit.tell(bus, told.started(labels={"team": team}), told.step(1, 0.4), told.opened())
    kit.until(everything.kinds, lambda kinds: kinds.count("incident") == 2, "all of it")
    kit.until(vision.kinds, lambda kinds: "incident" in kinds, "its own")
    assert {data["run_id"] for _, data in vision.events if data} == {"mine"}
    reporter.stop()


def test_what_has_not_changed_is_not_sent_again(kit: Any, told: Any, bus: MemoryBus, start: Start) -> None:
    url = start().url
    opened = told.opened()
    kit.tell(bus, told.started(), told.step(1, 0.4), opened)
    address = f"{url}/api/v1/incidents/{opened.incident_id}"
    kit.until(lambda: kit.ask(address).status, lambda status: status == 200, "incident")
    for path in ("incidents", "runs", f"runs/{told.run_id}", f"incidents/{opened.incident_id}"):
        first = kit.ask(f"{url}/api/v1/{path}")
        again = kit.ask(f"{url}/api/v1/{path}", headers={"If-None-Match": first.headers["etag"]})
        assert (first.status, again.status, again.body) == (200, 304, b"")
    tag = kit.ask(address).headers["etag"]
    kit.ask(f"{address}/comments", "POST", {"by": "ada", "text": "seen"})
    changed = kit.ask(address, headers={"If-None-Match": tag})
    assert changed.status == 200 and changed.headers["etag"] != tag


def test_who_asks_too_often_is_told_when_to_ask_again(kit: Any, start: Start) -> None:
    url = start(rate_limit_per_s=0.5).url
    answers = [kit.ask(f"{url}/api/v1/runs")]
    while answers[-1].status == 200 and len(answers) < 100:  # on a slow machine the bucket fills meanwhile
        answers.append(kit.ask(f"{url}/api/v1/runs"))
    assert [answer.status for answer in answers[:5]] == [200] * 5 and answers[-1].status == 429
    assert int(answers[-1].headers["retry-after"]) >= 1 and "live" in answers[-1].json["what_to_do"]
    assert kit.ask(f"{url}/healthz").status == kit.ask(f"{url}/metrics").status == 200


def test_a_bucket_fills_again() -> None:
    now = 0.0
    buckets = Buckets(2.0, 4, monotonic=lambda: now)
    assert [buckets.wait_s("a") for _ in range(5)] == [0, 0, 0, 0, 0.5]
    assert buckets.wait_s("b") == 0
    now = 1.0
    assert [buckets.wait_s("a") for _ in range(3)] == [0, 0, 0.5]
