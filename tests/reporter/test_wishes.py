"""What people do: resolve, reopen, silence, pin, override; and what comes back."""

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradloc_proto import messages as m
from gradloc_proto import streams
from gradloc_proto.codec import decode
from gradloc_proto.memory_bus import MemoryBus
from gradloc_reporter import Reporter
from gradloc_reporter.access import Tokens, Viewer, digest
from gradloc_reporter.answers import Matcher
from gradloc_reporter.matching import matches, severity_of
from gradloc_reporter.store.engine import Database
from gradloc_reporter.store.fold import Fold
from gradloc_reporter.store.queries import Queries
from gradloc_reporter.store.wishes import close, reopen

Start = Callable[..., Reporter]


@pytest.fixture
def api(start: Start) -> str:
    return start().url + "/api/v1"


def of(kit: Any, address: str, wanted: Callable[[Any], bool] = bool) -> Any:
    def found() -> Any:
        answer = kit.ask(address)
        return answer.json if answer.status == 200 else None

    return kit.until(found, lambda known: bool(known) and wanted(known), address)


def test_a_person_resolves_and_a_later_spike_opens_again(kit: Any, told: Any, bus: MemoryBus, api: str) -> None:
    opened = told.opened()
    incident = f"{api}/incidents/{opened.incident_id}"
    kit.tell(bus, told.started(), opened)
    of(kit, incident)
    assert kit.ask(f"{incident}/resolve", "POST", {"by": "ada", "reason": "row removed"}).status == 200
    known = of(kit, incident)
    assert (known["status"], known["status_text"]) == ("resolved", "Resolved by ada")
    assert "Resolved by ada: row removed" in [each["text"] for each in known["events"]]
    assert kit.ask(f"{api}/incidents?status=open").json["incidents"] == []
    kit.ask(f"{incident}/resolve", "POST", {"by": "bob"})  # it is over already: nothing happens
    assert [each["kind"] for each in of(kit, incident)["events"]].count("closed") == 1
    kit.ask(f"{incident}/reopen", "POST", {"by": "bob"})
    assert of(kit, incident)["status"] == "open"
    kit.ask(f"{incident}/resolve", "POST", {"by": "ada"})
    later = told.of(m.IncidentJoined, opened.incident_id, spike=told.spike(1300), ts=told.ts + 9_999)
    kit.tell(bus, later)
    of(kit, incident, lambda known: known["status"] == "open")


@given(order=st.permutations(range(4)))
def test_who_is_right_about_the_end_depends_on_times_alone(kit: Any, tmp_path: Any, order: list[int]) -> None:
    """Opened at 1, closed at 10, spike at 20, closed at 30: over; whatever comes in first."""
    told = kit.Told(ts=0.0)
    opened = told.opened()
    name = opened.incident_id
    database = Database(f"sqlite:///{tmp_path}/{next(kit.numbers)}.sqlite")

    def spiked(session: Any) -> None:
        fold = Fold(session)
        fold.apply(told.of(m.IncidentJoined, name, spike=told.spike(1300), ts=20.0))
        fold.finish()

    deeds = [
        lambda session: Fold(session).apply(opened),
        lambda session: close(session, name, by="a", reason="", ts=10.0),
        spiked,
        lambda session: close(session, name, by="a", reason="", ts=30.0),
    ]
    with database.writing() as session:
        fold = Fold(session)
        fold.apply(opened)
        fold.finish()
    for index in order:
        with database.writing() as session:
            deeds[index](session)
    with database.reading() as session:
        known = Queries().incident(session, name)
    database.close()
    assert known is not None and known.status == "resolved", order


def test_what_the_detector_resolved_can_be_opened_again(kit: Any, told: Any, bus: MemoryBus, api: str) -> None:
    opened = told.opened()
    incident = f"{api}/incidents/{opened.incident_id}"
    kit.tell(bus, told.started(), opened, told.of(m.IncidentResolved, opened.incident_id, step=9, reason="calm"))
    of(kit, incident, lambda known: known["status"] == "resolved")
    kit.ask(f"{incident}/reopen", "POST", {"by": "ada", "reason": "it is back"})
    assert of(kit, incident)["status"] == "open"


def test_an_override_goes_out_as_a_message(kit: Any, told: Any, bus: MemoryBus, api: str) -> None:
    kit.tell(bus, told.started())
    of(kit, f"{api}/runs/{told.run_id}")
    for value, status in ((2.0, 202), (None, 202), (0.0, 422), (math.inf, 422), ("2", 422)):
        body = {"by": "ada", "name": "sensitivity", "value": "Infinity" if value == math.inf else value}
        assert kit.ask(f"{api}/runs/{told.run_id}/overrides", "POST", body).status == status
    sent = [
        decode(each.data)
        for each in bus.read({streams.stream(told.run_id, "control"): "0"}, count=9)[
            streams.stream(told.run_id, "control")
        ]
    ]
    assert [(each.name, each.value) for each in sent] == [("sensitivity", 2.0), ("sensitivity", None)]
    audit = of(kit, f"{api}/audit", lambda known: len(known["entries"]) == 2)
    assert [each["text"] for each in audit["entries"]] == [
        "ada set sensitivity back to its default",
        "ada set sensitivity to 2.0",
    ]


def test_what_comes_back_is_counted_over_runs(kit: Any, bus: MemoryBus, api: str) -> None:
    """The same token in three runs; the first was over before the last opened: a regression."""
    names = []
    for number, run in enumerate(("a", "b", "c")):
        told = kit.Told(run_id=run, ts=1_000_000.0 + 10_000 * number)
        opened = told.opened()
        names.append(opened.incident_id)
        kit.tell(bus, told.started(), opened, told.finished(opened.incident_id))
        if run == "a":
            kit.tell(bus, told.of(m.IncidentResolved, opened.incident_id, step=9, reason="calm"))
    other = kit.Told(run_id="d")
    opened = other.opened()
    culprit = kit.a_culprit(token_id=13708, token_text="another tokenizer's")
    cause = m.Cause(name="advantage-outlier", confidence="low", summary="")
    kit.tell(bus, other.started(), opened, other.finished(opened.incident_id, culprits=(culprit,), causes=(cause,)))
    of(kit, f"{api}/incidents?status=located", lambda known: len(known["incidents"]) == 3)
    known = of(kit, f"{api}/incidents/{names[2]}/similar", lambda known: len(known["incidents"]) == 2)
    counts = {each["kind"]: (each["value"], each["num_incidents"], each["num_runs"]) for each in known["fingerprints"]}
    assert counts == {"token": ("13708", 3, 3), "cause": ("token-mismatch", 3, 3)}
    assert known["came_back_after"] == names[0]
    assert {each["shared"] for each in known["incidents"]} == {"token, cause"}
    assert of(kit, f"{api}/incidents/{opened.incident_id}/similar")["incidents"] == []
    assert len(kit.ask(f"{api}/incidents?token_id=13708").json["incidents"]) == 4
    assert kit.ask(f"{api}/incidents?token_id=1370").json["incidents"] == []
    assert len(kit.ask(f"{api}/incidents?cause=token-mismatch").json["incidents"]) == 3
    assert len(kit.ask(f"{api}/incidents?since=1010000&until=1020000").json["incidents"]) == 1


def test_attribution_along_every_axis(kit: Any, told: Any, bus: MemoryBus, api: str) -> None:
    opened = told.opened()
    kit.tell(bus, told.started(), opened)
    address = f"{api}/incidents/{opened.incident_id}/attribution"
    assert of(kit, address)["shares"] == []
    kit.tell(bus, told.finished(opened.incident_id))
    of(kit, address, lambda known: known["num_places"] == 120)
    firsts = {}
    for axis in ("rank", "micro-batch", "sequence", "token", "layer"):
        shares = kit.ask(f"{address}?axis={axis}").json["shares"]
        assert [abs(each["share"]) for each in shares] == sorted((abs(each["share"]) for each in shares), reverse=True)
        firsts[axis] = {key: value for key, value in shares[0].items() if value is not None}
    assert firsts["rank"] == {"rank": 3, "share": pytest.approx(0.9994)}
    assert firsts["sequence"] == {"rank": 3, "micro_batch": 0, "sequence": 2, "share": 0.9991}
    assert firsts["token"]["token"] == 358
    assert firsts["layer"]["layer"] == "layers.0.attention"


# --- silences ----------------------------------------------------------------------------------


def test_a_silence_is_made_listed_ended_and_logged(kit: Any, api: str) -> None:
    body = {"by": "ada", "matchers": [{"name": "team", "value": "rl*"}], "hours": 2, "reason": "known"}
    made = kit.ask(f"{api}/silences", "POST", body)
    assert made.status == 201 and made.json["active"]
    name = made.json["silence_id"]
    assert [each["silence_id"] for each in kit.ask(f"{api}/silences").json["silences"]] == [name]
    ended = kit.ask(f"{api}/silences/{name}", "DELETE")
    assert ended.status == 200 and not ended.json["active"]
    assert kit.ask(f"{api}/silences/nosuch", "DELETE").status == 404
    assert [each["kind"] for each in kit.ask(f"{api}/audit").json["entries"]] == ["silence_ended", "silence_created"]
    for wrong in (
        {"matchers": []},
        {"hours": 0},
        {"hours": 10_000},
        {"by": "  "},
        {"matchers": [{"name": "x y", "value": ""}]},
    ):
        assert kit.ask(f"{api}/silences", "POST", body | wrong).status == 422


def test_a_teams_silences_are_its_own(kit: Any, start: Start) -> None:
    tokens = Tokens(
        {
            digest("all"): Viewer("oncall", "operate"),
            digest("vision"): Viewer("vision", "operate", frozenset({"vision"})),
            digest("rl"): Viewer("rl", "operate", frozenset({"rl"})),
        }
    )
    url = start(tokens=tokens).url + "/api/v1/silences"
    body = {"by": "ada", "matchers": [{"name": "run", "value": "*"}], "hours": 1}
    made = {
        who: kit.ask(url, "POST", body, {"Authorization": f"Bearer {who}"}).json["silence_id"]
        for who in ("all", "vision")
    }

    def seen(who: str) -> set[str]:
        return {
            each["silence_id"] for each in kit.ask(url, headers={"Authorization": f"Bearer {who}"}).json["silences"]
        }

    assert seen("all") == set(made.values()) and seen("vision") == {made["vision"]} and seen("rl") == set()
    for who, name, status in (("rl", "vision", 404), ("vision", "all", 404), ("vision", "vision", 200)):
        assert kit.ask(f"{url}/{made[name]}", "DELETE", None, {"Authorization": f"Bearer {who}"}).status == status


@pytest.mark.parametrize(
    ("op", "pattern", "value", "fits"),
    [
        ("=", "a", "a", True),
        ("=", "a", "b", False),
        ("!=", "a", "b", True),
        ("=", "qwen*-grpo", "qwen3-4b-grpo", True),
        ("!=", "qwen*", "qwen3", False),
        ("=", "a?c", "abc", False),
        ("=", "[a]", "[a]", True),
        ("=", "[a]", "a", False),
        ("=", "", "", True),
        ("=", "*" * 100, "a" * 500, True),
    ],
)
def test_only_the_star_stands_for_anything(op: Any, pattern: str, value: str, fits: bool) -> None:
    assert matches([Matcher(name="run", op=op, value=pattern)], {"run": value}) is fits


def test_a_name_that_is_not_there_counts_as_empty() -> None:
    assert matches([Matcher(name="team", value="")], {}) and matches([Matcher(name="team", op="!=", value="rl")], {})


@pytest.mark.parametrize(
    ("norm", "healthy", "severity"),
    [
        (640.0, 0.4, "critical"),
        (4.0, 0.4, "warning"),
        (math.nan, 0.4, "critical"),
        (math.inf, None, "critical"),
        (640.0, None, "warning"),
        (640.0, 0.0, "warning"),
        (None, None, "warning"),
        (640.0, math.nan, "warning"),
    ],
)
def test_what_may_have_ruined_the_weights_is_critical(norm: float | None, healthy: float | None, severity: str) -> None:
    assert severity_of(norm, healthy) == severity


def test_closing_before_opening_is_known_says_so(kit: Any, tmp_path: Any) -> None:
    database = Database(f"sqlite:///{tmp_path}/x.sqlite")
    with database.writing() as session:
        assert not close(session, "nothing", by="a", reason="", ts=1.0) and not reopen(
            session, "nothing", by="a", reason="", ts=1.0
        )
    database.close()
