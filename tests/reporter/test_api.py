"""REST as programs see it: over HTTP, parsed strictly."""

import math
from collections.abc import Callable
from typing import Any

import pytest

from gradloc_proto import messages as m
from gradloc_proto import streams
from gradloc_proto.codec import decode
from gradloc_proto.memory_bus import MemoryBus
from gradloc_reporter import Reporter

Start = Callable[..., Reporter]


@pytest.fixture
def api(start: Start) -> str:
    return start().url + "/api/v1"


def incident_there(kit: Any, api: str, incident: str, wanted: Callable[[Any], bool] = bool) -> Any:
    def found() -> Any:
        answer = kit.ask(f"{api}/incidents/{incident}")
        return answer.json if answer.status == 200 else None

    return kit.until(found, lambda known: bool(known) and wanted(known), f"incident {incident}")


def test_an_incident_from_spike_to_resolved(kit: Any, told: Any, bus: MemoryBus, api: str) -> None:
    opened = told.opened()
    incident = opened.incident_id
    kit.tell(bus, told.started(), told.step(1204, 640.0), opened)
    known = incident_there(kit, api, incident)
    assert (known["status"], known["grad_norm"], known["healthy_norm"], known["limit"]) == ("open", 640, 0.41, 1.64)
    kit.tell(bus, told.of(m.LocalizationProgressed, incident, localization_attempt=1, stage="verify", fraction=0.5))
    known = incident_there(kit, api, incident, lambda known: known["status"] == "localizing")
    assert known["findings"][0]["stage"] == "verify"
    kit.tell(bus, told.finished(incident))
    known = incident_there(kit, api, incident, lambda known: known["status"] == "located")
    assert known["finding"]["culprits"][0]["token_text"] == "<th"
    assert 'token 358 "<th" (id 13708)' in known["text"]
    kit.tell(bus, told.of(m.IncidentResolved, incident, step=1300, reason="calm"))
    known = incident_there(kit, api, incident, lambda known: known["status"] == "resolved")
    assert [event["kind"] for event in known["events"]] == [
        "incident_opened",
        "incident_resolved",
        "localization_finished",
    ]


def test_numbers_that_are_not_finite_are_strings(kit: Any, told: Any, bus: MemoryBus, api: str) -> None:
    opened = told.opened(7, math.nan)
    odd = kit.a_finding(
        verdict="non-finite", share=math.inf, checksum=-math.inf, culprits=(kit.a_culprit(share=math.nan),)
    )
    finished = told.of(m.LocalizationFinished, opened.incident_id, localization_attempt=1, finding=odd)
    kit.tell(bus, told.started(), told.step(6, math.inf), told.step(7, math.nan), opened, finished)
    known = incident_there(kit, api, opened.incident_id, lambda known: known["finding"] is not None)
    assert known["grad_norm"] == "NaN"
    assert known["spikes"][0]["spike"]["flags"][0]["score"] == "Infinity"
    assert (known["finding"]["share"], known["finding"]["checksum"]) == ("Infinity", "-Infinity")
    assert known["finding"]["culprits"][0]["share"] == "NaN"
    norms = [point["grad_norm"] for point in kit.ask(f"{api}/runs/{told.run_id}/steps").json["points"]]
    assert norms == ["Infinity", "NaN"]
    assert kit.ask(f"{api}/runs/{told.run_id}").json["grad_norm"] == "NaN"
    assert kit.ask(f"{api}/incidents").json["incidents"][0]["grad_norm"] == "NaN"


def test_a_finding_without_parts_is_answered(kit: Any, told: Any, bus: MemoryBus, api: str) -> None:
    full = kit.a_finding()
    bare = m.Finding(
        verdict="inconclusive", strategy="bisect", step=3, summary="", fidelity=full.fidelity, cost=full.cost
    )
    opened = told.opened()
    kit.tell(
        bus,
        told.started(),
        opened,
        told.of(m.LocalizationFinished, opened.incident_id, localization_attempt=1, finding=bare),
    )
    known = incident_there(kit, api, opened.incident_id, lambda known: known["finding"] is not None)
    assert known["finding"]["culprits"] == []


def test_the_series_is_thinned_but_keeps_its_spike(kit: Any, told: Any, bus: MemoryBus, api: str) -> None:
    norms = [0.4 + 0.001 * (step % 7) for step in range(3000)]
    norms[1204] = 640.0
    kit.tell(bus, told.started(), *(told.step(step, norm) for step, norm in enumerate(norms)))
    answer = kit.until(
        lambda: kit.ask(f"{api}/runs/{told.run_id}/steps?max_points=50").json,
        lambda answer: answer.get("num_steps") == 3000,
        "3,000 steps",
    )
    steps = [point["step"] for point in answer["points"]]
    assert answer["downsampled"] and len(steps) <= 50
    assert {0, 1204, 2999} <= set(steps) and steps == sorted(steps)
    window = kit.ask(f"{api}/runs/{told.run_id}/steps?from_step=10&to_step=12").json
    assert [point["step"] for point in window["points"]] == [10, 11, 12] and not window["downsampled"]


@pytest.mark.parametrize("limit", [1, 3, 7, 200])
def test_paging_gives_every_incident_once_even_while_new_ones_come(
    kit: Any, told: Any, bus: MemoryBus, api: str, limit: int
) -> None:
    kit.tell(bus, told.started(), *(told.opened(step, 10.0) for step in range(20)))
    kit.until(lambda: len(kit.ask(f"{api}/incidents?limit=200").json["incidents"]), lambda n: n == 20, "20 incidents")
    seen: list[str] = []
    cursor = ""
    for page in range(100):
        answer = kit.ask(f"{api}/incidents?limit={limit}{cursor}").json
        assert len(answer["incidents"]) <= limit
        seen += [incident["incident_id"] for incident in answer["incidents"]]
        if page == 0:
            kit.tell(bus, told.opened(100, 10.0))
        if answer["next_cursor"] is None:
            break
        cursor = f"&cursor={answer['next_cursor']}"
    assert len(seen) == len(set(seen)) == 20


def test_runs_are_paged_by_name(kit: Any, bus: MemoryBus, api: str) -> None:
    names = [f"run-{index:02}" for index in range(7)]
    kit.tell(bus, *(kit.Told(run_id=name).started() for name in reversed(names)))
    kit.until(lambda: len(kit.ask(f"{api}/runs").json["runs"]), lambda n: n == 7, "7 runs")
    first = kit.ask(f"{api}/runs?limit=4").json
    second = kit.ask(f"{api}/runs?limit=4&cursor={first['next_cursor']}").json
    assert [run["run_id"] for run in first["runs"] + second["runs"]] == names
    assert second["next_cursor"] is None


def test_filters_by_run_status_and_verdict(kit: Any, bus: MemoryBus, api: str) -> None:
    one, two = kit.Told(run_id="one"), kit.Told(run_id="two")
    located = one.opened(5)
    kit.tell(bus, one.started(), two.started(), located, one.opened(9), two.opened(5))
    kit.tell(bus, one.finished(located.incident_id))
    incident_there(kit, api, located.incident_id, lambda known: known["finding"] is not None)

    def count(query: str) -> int:
        return len(kit.ask(f"{api}/incidents?{query}").json["incidents"])

    kit.until(lambda: count(""), lambda n: n == 3, "3 incidents")
    expected = {"run=one": 2, "run=two": 1, "run=three": 0, "status=open": 2, "status=located": 1, "verdict=token": 1}
    assert {query: count(query) for query in expected} == expected
    assert count("run=one&status=open&verdict=token") == 0


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "says"),
    [
        ("GET", "/runs/nobody", None, 404, "GET /api/v1/runs lists"),
        ("GET", "/incidents/nothing", None, 404, "GET /api/v1/incidents lists"),
        ("GET", "/runs/nobody/steps", None, 404, "GET /api/v1/runs lists"),
        ("GET", "/nowhere", None, 404, "Check the address"),
        ("DELETE", "/runs", None, 405, "the Allow header"),
        ("GET", "/incidents?status=sleepy", None, 422, "query.status"),
        ("GET", "/incidents?verdict=moon", None, 422, "query.verdict"),
        ("GET", "/incidents?cursor=AAAA", None, 422, "query.cursor"),
        ("GET", "/incidents?cursor=%C3%A9", None, 422, "query.cursor"),
        ("GET", "/runs?cursor=%20", None, 422, "query.cursor"),
        ("GET", "/incidents?limit=0", None, 422, "query.limit"),
        ("GET", "/incidents?limit=9999999", None, 422, "query.limit"),
        ("GET", "/incidents?run=%00", None, 422, "query.run"),
        ("GET", "/incidents/a%00b", None, 422, "path.incident"),
        ("GET", "/runs/x/steps?max_points=1", None, 422, "query.max_points"),
        ("GET", "/runs/x/steps?from_step=99999999999999999999999", None, 422, "query.from_step"),
        ("POST", "/incidents/nothing/relocalize", {"by": "ada"}, 404, "GET /api/v1/incidents lists"),
        ("POST", "/incidents/nothing/relocalize", {}, 422, "body.by"),
        ("POST", "/incidents/nothing/relocalize", b"{not json", 422, "body"),
        ("POST", "/incidents/nothing/acknowledge", {"by": "  "}, 422, "body.by"),
        ("POST", "/incidents/nothing/comments", {"by": "ada", "text": ""}, 422, "body.text"),
    ],
)
def test_every_error_is_a_problem_that_says_what_to_do(
    kit: Any, api: str, method: str, path: str, body: Any, status: int, says: str
) -> None:
    answer = kit.ask(api + path, method, body)
    assert answer.status == status
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json
    assert set(problem) == {"type", "title", "status", "detail", "what_to_do"} and problem["status"] == status
    assert says in problem["what_to_do"] or says in problem["detail"]


def test_relocalize_goes_out_as_a_control_message_once_a_request(kit: Any, told: Any, bus: MemoryBus, api: str) -> None:
    opened = told.opened()
    kit.tell(bus, told.started(), opened)
    incident_there(kit, api, opened.incident_id)
    wish = {"by": "ada", "request_id": "r-1"}
    answers = [kit.ask(f"{api}/incidents/{opened.incident_id}/relocalize", "POST", wish) for _ in range(2)]
    assert [answer.status for answer in answers] == [202, 202]
    sent = [decode(entry.data) for entry in bus.read_last(streams.stream(told.run_id, "control"), count=10)]
    assert all(isinstance(each, m.RelocalizeRequested) and each.incident_id == opened.incident_id for each in sent)
    assert len({each.key() for each in sent}) == 1, "the same request twice is one wish"
    known = incident_there(kit, api, opened.incident_id, lambda known: len(known["events"]) > 1)
    texts = [event["text"] for event in known["events"]]
    assert texts.count("ada asked for another localization") == 1 and len(texts) == 2


def test_a_wish_without_redis_says_so(kit: Any, told: Any, redis_server: Any, start: Start) -> None:
    from gradloc_proto.redis_bus import RedisBus

    redis = RedisBus(redis_server.url, timeout_s=1.0)
    opened = told.opened()
    kit.tell(redis, told.started(), opened)
    api = start(redis).url + "/api/v1"
    incident_there(kit, api, opened.incident_id)
    redis_server.stop()
    answer = kit.ask(f"{api}/incidents/{opened.incident_id}/relocalize", "POST", {"by": "ada"})
    assert answer.status == 503 and answer.headers["retry-after"] == "5"
    assert "Redis does not answer" in answer.json["detail"]
    redis.close()


def test_acknowledging_and_commenting_are_logged(kit: Any, told: Any, bus: MemoryBus, api: str) -> None:
    opened = told.opened()
    kit.tell(bus, told.started(), opened)
    incident_there(kit, api, opened.incident_id)
    where = f"{api}/incidents/{opened.incident_id}"
    assert kit.ask(f"{where}/acknowledge", "POST", {"by": "ada"}).status == 200
    assert kit.ask(f"{where}/acknowledge", "POST", {"by": "bob"}).status == 200
    events = kit.ask(f"{where}/comments", "POST", {"by": "bob", "text": "bad rollout host"}).json["events"]
    texts = [event["text"] for event in events]
    assert {"Acknowledged by ada", "bob: bad rollout host"} < set(texts) and len(texts) == 3
    assert kit.ask(where).json["acknowledged_by"] == "ada", "the first one counts"


def test_openapi_describes_every_route_and_the_strings_for_numbers(kit: Any, api: str) -> None:
    schema = kit.ask(f"{api}/openapi.json").json
    incident = ["acknowledge", "attribution", "comments", "pin", "relocalize", "reopen", "resolve", "similar", "whatif"]
    assert set(schema["paths"]) == {
        "/api/v1/audit",
        "/api/v1/runs",
        "/api/v1/runs/{run}",
        "/api/v1/runs/{run}/overrides",
        "/api/v1/runs/{run}/series",
        "/api/v1/runs/{run}/steps",
        "/api/v1/incidents",
        "/api/v1/incidents/{incident}",
        *(f"/api/v1/incidents/{{incident}}/{name}" for name in incident),
        "/api/v1/silences",
        "/api/v1/silences/{silence_id}",
    }
    share = schema["components"]["schemas"]["Culprit"]["properties"]["share"]
    assert {"type": "string", "enum": ["NaN", "Infinity", "-Infinity"]} in share["anyOf"]
    assert "Problem" in schema["components"]["schemas"]


def test_health_and_readiness(kit: Any, start: Start) -> None:
    url = start().url
    assert kit.ask(f"{url}/healthz").status == 200
    kit.until(lambda: kit.ask(f"{url}/readyz").status, lambda status: status == 200, "ready")
