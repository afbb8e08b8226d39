"""What-if of an incident: the app's lines come through as they are told, and nothing else of it does."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from gradloc_proto import messages as m
from gradloc_proto.memory_bus import MemoryBus
from gradloc_reporter import Reporter

Start = Callable[..., Reporter]
STARTING = {"waited_s": 0.0, "stage": "starting a replica"}
ANSWER = {"waited_s": 4.0, "answer": {"step": 1204, "limit": 1.6, "rows": [{"norm": "NaN"}]}}


class App:
    """Stands in for the what-if app: the real one is run in tests/localizer/whatif_app."""

    def __init__(self) -> None:
        self.status = 200
        self.lines: list[bytes] = [json.dumps(line).encode() for line in (STARTING, ANSWER)]
        self.asked: list[tuple[dict[str, Any], str | None]] = []
        app = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                app.asked.append((body, self.headers.get("Authorization")))
                self.send_response(app.status)
                self.end_headers()
                for line in app.lines:
                    self.wfile.write(line + b"\n" * (app.status == 200))
                    self.wfile.flush()

            def log_message(self, *_: Any) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/whatif"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def app() -> Iterator[App]:
    made = App()
    yield made
    made.close()


@pytest.fixture
def incident(kit: Any, told: Any, bus: MemoryBus, start: Start) -> Callable[..., str]:
    def made(*, snapshots: tuple[int, ...] = (1204,), **settings: Any) -> str:
        url = start(**settings).url
        opened = told.opened()
        known = {"run_id": told.run_id, "attempt": 0, "ts": told.ts, "num_bytes": 9, "manifest_sha256": "0" * 64}
        taken = [m.SnapshotCommitted(**known, step=step, path=f"file:///s/{step}") for step in snapshots]
        kit.tell(bus, told.started(), told.step(1204, 640.0), *taken, opened)
        address = f"{url}/api/v1/incidents/{opened.incident_id}"
        kit.until(
            lambda: kit.ask(address),
            lambda answer: answer.status == 200 and len(answer.json["snapshots"]) == len(snapshots),
            "the incident and its snapshots",
        )
        return address

    return made


def lines(answer: Any) -> list[dict[str, Any]]:
    assert answer.status == 200, answer.text
    assert answer.headers["content-type"].startswith("application/x-ndjson")
    return [json.loads(line) for line in answer.text.splitlines()]


def test_the_apps_lines_come_through_and_name_the_incidents_step(kit: Any, app: App, incident: Any) -> None:
    address = incident(whatif_url=app.url, whatif_token="secret")
    answer = kit.ask(f"{address}/whatif", "POST", {"by": "ada", "token_clip": "0.5:5", "drop": ["3:0:2:358"]})
    assert lines(answer) == [STARTING, ANSWER]
    ((asked, token),) = app.asked
    assert (asked["run"], asked["attempt"], asked["step"]) == ("qwen3-4b-grpo", 0, 1204)
    assert (asked["token_clip"], asked["drop"], token) == ("0.5:5", ["3:0:2:358"], "Bearer secret")
    assert "by" not in asked


@pytest.mark.parametrize(
    "said",
    [
        [STARTING],
        [STARTING, "nonsense"],
        [STARTING, {"waited_s": "soon"}],
        [{"waited_s": 0.0, "stage": "x" * (2 << 20)}],
    ],
)
def test_an_app_that_ends_early_or_talks_nonsense_is_a_problem_in_the_last_line(
    kit: Any, app: App, incident: Any, said: list[Any]
) -> None:
    app.lines = [json.dumps(line).encode() for line in said]
    told = lines(kit.ask(f"{incident(whatif_url=app.url)}/whatif", "POST", {"by": "ada"}))
    assert told[-1]["problem"]["status"] == 503 and "nonsense" not in json.dumps(told)


@pytest.mark.parametrize(
    ("status", "said", "expected", "reason"),
    [
        (422, {"problem": {"status": 422, "title": "t", "detail": "drop is 'x'"}}, 422, "drop is 'x'"),
        (401, {"problem": {"status": 401, "title": "t", "detail": "secret"}}, 503, "status 401"),
        (500, "boom", 503, "status 500"),
    ],
)
def test_a_refusal_is_a_problem(
    kit: Any, app: App, incident: Any, status: int, said: Any, expected: int, reason: str
) -> None:
    app.status, app.lines = status, [json.dumps(said).encode()]
    answer = kit.ask(f"{incident(whatif_url=app.url)}/whatif", "POST", {"by": "ada"})
    assert answer.status == expected and reason in answer.json["detail"] and "secret" not in answer.text
    assert answer.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize("knows_app", [False, True])
def test_without_an_app_or_a_snapshot_or_such_an_incident_it_is_said(
    kit: Any, app: App, incident: Any, knows_app: bool
) -> None:
    address = incident(**({"whatif_url": app.url, "snapshots": ()} if knows_app else {}))
    answer = kit.ask(f"{address}/whatif", "POST", {"by": "ada"})
    assert answer.status == 409 and ("no snapshot" if knows_app else "no what-if app") in answer.json["detail"]
    assert kit.ask(f"{address}x/whatif", "POST", {"by": "ada"}).status == 404
    assert app.asked == []


def test_an_app_that_is_away_is_a_503(kit: Any, app: App, incident: Any) -> None:
    address = incident(whatif_url="http://127.0.0.1:1/whatif")
    answer = kit.ask(f"{address}/whatif", "POST", {"by": "ada"})
    assert answer.status == 503 and "does not answer" in answer.json["detail"]
    for wrong in ({"by": "ada", "limit": -1}, {"by": "ada", "drop": "x"}, {"by": "ada", "path": "file:///etc"}, {}):
        assert kit.ask(f"{address}/whatif", "POST", wrong).status == 422
