"""Tokens: nobody without one, nobody beyond its scope, nobody into another team's runs."""

import http.client
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from gradloc_proto import messages as m
from gradloc_proto.memory_bus import MemoryBus
from gradloc_reporter import Reporter
from gradloc_reporter.access import Tokens, Viewer, digest, new_token, read_tokens, token_entry
from gradloc_reporter.command import reporter, reporter_token

Start = Callable[..., Reporter]
OPERATOR, READER, VISION = "operator-token", "reader-token", "vision-token"
TOKENS = Tokens(
    {
        digest(OPERATOR): Viewer("oncall", "operate"),
        digest(READER): Viewer("dashboard", "read"),
        digest(VISION): Viewer("vision", "operate", frozenset({"vision"})),
    }
)
WISHES = {
    "acknowledge": {"by": "ada"},
    "comments": {"by": "ada", "text": "seen"},
    "relocalize": {"by": "ada"},
    "resolve": {"by": "ada", "reason": "row removed"},
    "reopen": {"by": "ada"},
    "pin": {"by": "ada", "pinned": True},
}
RUN_WISHES = {"whatif": {"by": "ada"}, "overrides": {"by": "ada", "name": "sensitivity", "value": 2.0}}
SILENCE = {"by": "ada", "matchers": [{"name": "run", "value": "*"}], "hours": 1}


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def test_an_entry_that_was_made_is_read_back() -> None:
    token = new_token()
    text = token_entry(token, name="grafana", scope="read", teams=("rl", "vision"))
    assert token not in text
    tokens = read_tokens(text + token_entry(new_token(), name="oncall", scope="operate", teams=()))
    assert tokens.viewer(token) == Viewer("grafana", "read", frozenset({"rl", "vision"}))
    assert tokens.viewer(token + "x") is tokens.viewer("") is tokens.viewer("x" * 10_000) is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", r"\[\[tokens\]\]"),
        ("tokens = 3", r"\[\[tokens\]\]"),
        ("[[tokens]", "not TOML"),
        ("[[tokens]]\nname = 'a'", "number 1: expected the keys"),
        (f"[[tokens]]\nname='a b'\nsha256='{digest('x')}'\nscope='read'", "name must be"),
        ("[[tokens]]\nname='a'\nsha256='plain-token'\nscope='read'", "64 lower-case hex"),
        (f"[[tokens]]\nname='a'\nsha256='{digest('x')}'\nscope='write'", "one of read, operate"),
        (f"[[tokens]]\nname='a'\nsha256='{digest('x')}'\nscope='read'\nteams=[]", "leave it out for all runs"),
        (2 * f"[[tokens]]\nname='a'\nsha256='{digest('x')}'\nscope='read'\n", "number 2: .* unique"),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says) as refused:
        read_tokens(text)
    assert "plain-token" not in str(refused.value)


@given(st.text())
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        assert read_tokens(text).viewers
    except ValueError as error:
        assert str(error)


def test_without_a_token_only_health_and_metrics_answer(kit: Any, start: Start) -> None:
    url = start(tokens=TOKENS).url
    described = kit.ask(f"{url}/api/v1/openapi.json", headers=bearer(READER)).json["paths"]
    assert len(described) >= 8
    for path, operations in described.items():
        for method in operations:
            address = url + re.sub(r"\{\w+\}", "x", path)
            for headers in ({}, bearer("wrong"), {"Authorization": f"Basic {OPERATOR}"}, {"Cookie": "gradloc_token=x"}):
                answer = kit.ask(address, method.upper(), {} if method == "post" else None, headers)
                assert answer.status == 401 and answer.headers["www-authenticate"].startswith("Bearer"), path
                assert "gradloc reporter-token" in answer.json["what_to_do"]
    assert kit.ask(f"{url}/api/v1/openapi.json").status == kit.ask(f"{url}/nowhere", "POST", {}).status == 401
    for page in ("/", "/runs/x", "/incidents/x", "/nowhere"):
        assert "<h1>Sign in</h1>" in kit.ask(url + page).text  # after a redirect
    for path in ("/healthz", "/metrics"):
        assert kit.ask(url + path).status == 200


def test_a_token_that_reads_changes_nothing(kit: Any, told: Any, bus: MemoryBus, start: Start) -> None:
    url = start(tokens=TOKENS).url
    opened = told.opened()
    kit.tell(bus, told.started(), opened)
    incident = f"{url}/api/v1/incidents/{opened.incident_id}"
    kit.until(lambda: kit.ask(incident, headers=bearer(READER)).status, lambda status: status == 200, "incident")
    for wish, body in WISHES.items():
        refused = kit.ask(f"{incident}/{wish}", "POST", body, bearer(READER))
        assert refused.status == 403 and "dashboard has the scope read" in refused.json["detail"]
    assert [event["kind"] for event in kit.ask(incident, headers=bearer(READER)).json["events"]] == ["incident_opened"]
    for wish, body in WISHES.items():
        assert kit.ask(f"{incident}/{wish}", "POST", body, bearer(OPERATOR)).status in (200, 202)
    known = kit.ask(incident, headers=bearer(READER)).json
    assert known["acknowledged_by"] == "ada (token oncall)"  # the log names the token, whatever a person calls herself


def test_a_team_sees_nothing_of_another_on_any_endpoint(kit: Any, bus: MemoryBus, start: Start) -> None:
    url = start(tokens=TOKENS).url
    runs = {"rl": kit.Told(run_id="rl-run"), "vision": kit.Told(run_id="vision-run"), "": kit.Told(run_id="no-team")}
    incidents = {}
    for team, told in runs.items():
        opened = told.opened()
        incidents[team] = opened.incident_id
        started = told.started(labels={"team": team} if team else {})
        kit.tell(bus, started, told.step(1204, 640.0), opened, told.finished(opened.incident_id))
    everything = f"{url}/api/v1/incidents?limit=200"

    def located() -> int:
        return sum(one["status"] == "located" for one in kit.ask(everything, headers=bearer(READER)).json["incidents"])

    kit.until(located, lambda number: number == 3, "all incidents")
    mine = bearer(VISION)
    seen = [one["run_id"] for one in kit.ask(everything, headers=mine).json["incidents"]]
    assert seen == [one["run_id"] for one in kit.ask(f"{url}/api/v1/runs", headers=mine).json["runs"]] == ["vision-run"]
    assert kit.ask(f"{everything}&run=rl-run", headers=mine).json["incidents"] == []
    described = [path for path in kit.ask(f"{url}/api/v1/openapi.json", headers=mine).json["paths"] if "{" in path]
    described = [path for path in described if "silence" not in path]  # below
    asked = 0
    for other in ("rl", ""):
        pages = [f"/runs/{runs[other].run_id}", f"/incidents/{incidents[other]}"]
        for path in pages + [path.format(run=runs[other].run_id, incident=incidents[other]) for path in described]:
            body = (WISHES | RUN_WISHES).get(path.rsplit("/", 1)[-1])
            answer = kit.ask(url + path, "GET" if body is None else "POST", body, mine)
            assert answer.status == 404 and "640" not in answer.text, path
            asked += 1
    assert asked >= 30
    home = kit.ask(url, headers=mine).text
    assert "vision-run" in home and "rl-run" not in home and "no-team" not in home
    events = kit.ask(f"{url}/api/v1/incidents/{incidents['rl']}", headers=bearer(READER)).json["events"]
    assert {event["kind"] for event in events} == {"incident_opened", "localization_finished"}
    assert kit.ask(f"{url}/api/v1/incidents/{incidents['vision']}", headers=mine).status == 200


# Beside these the overview, below, and the live view, which test_live.py listens to.
LISTS = {"/api/v1/runs", "/api/v1/incidents", "/api/v1/silences", "/api/v1/audit"}


def test_what_a_team_lists_counts_and_reads_of_what_people_did_is_its_own(
    kit: Any, bus: MemoryBus, start: Start
) -> None:
    """The same spike in two teams' runs, people at work on both: each sees one incident and one team's deeds."""
    url = start(tokens=TOKENS).url
    mine, other = kit.Told(run_id="vision-run"), kit.Told(run_id="rl-run", ts=kit.Told().ts - 900)
    opened, theirs = mine.opened(), other.opened()
    kit.tell(bus, mine.started(labels={"team": "vision"}), opened, mine.finished(opened.incident_id))
    kit.tell(bus, other.started(), theirs, other.finished(theirs.incident_id))
    kit.tell(bus, other.of(m.IncidentResolved, theirs.incident_id, step=9, reason="calm"))
    whole, vision = bearer(READER), bearer(VISION)
    kit.until(
        lambda: {each["status"] for each in kit.ask(f"{url}/api/v1/incidents", headers=whole).json["incidents"]},
        lambda found: found == {"located", "resolved"},
        "both incidents",
    )
    deeds = [f"incidents/{theirs.incident_id}/{wish}" for wish in WISHES] + ["runs/rl-run/overrides", "silences"]
    for path in deeds:
        body = SILENCE | {"matchers": [{"name": "run", "value": "rl-run"}]}
        body = (WISHES | RUN_WISHES).get(path.rsplit("/", 1)[-1], body)
        assert kit.ask(f"{url}/api/v1/{path}", "POST", body, bearer(OPERATOR)).status in (200, 201, 202), path
    assert kit.ask(f"{url}/api/v1/silences", "POST", SILENCE, vision).status == 201
    comment = {"by": "ida", "text": "ours"}
    assert kit.ask(f"{url}/api/v1/incidents/{opened.incident_id}/comments", "POST", comment, vision).status == 200

    def audited(headers: dict[str, str]) -> list[tuple[str, str | None]]:
        entries = kit.ask(f"{url}/api/v1/audit?limit=200", headers=headers).json["entries"]
        return [(entry["kind"], entry["run_id"]) for entry in entries]

    everything = kit.until(
        lambda: audited(whole),
        lambda found: {("override_set", "rl-run"), ("relocalize_requested", "rl-run")} <= set(found),
        "the wishes came back",
    )
    assert {"acknowledged", "commented", "pinned", "reopened", "silence_created"} <= {kind for kind, _ in everything}
    assert audited(vision) == [("commented", "vision-run")]

    described = kit.ask(f"{url}/api/v1/openapi.json", headers=vision).json["paths"]
    lists = {path for path in described if "{" not in path}
    assert lists == LISTS, "a new list: say here what a team sees of it"
    for path in [*LISTS, "/", f"/api/v1/incidents/{opened.incident_id}/similar", f"/incidents/{opened.incident_id}"]:
        answer = kit.ask(url + path, headers=vision)
        assert answer.status == 200, path
        for name in ("rl-run", theirs.incident_id, "oncall", "row removed"):
            assert name not in answer.text, f"{path} names {name}"
    similar = kit.ask(f"{url}/api/v1/incidents/{opened.incident_id}/similar", headers=vision).json
    assert {each["num_incidents"] for each in similar["fingerprints"]} == {1} and similar["came_back_after"] is None
    for found in ("token_id=13708", "cause=token-mismatch", "status=resolved", "since=1"):
        listed = kit.ask(f"{url}/api/v1/incidents?{found}", headers=vision).json["incidents"]
        assert {each["run_id"] for each in listed} <= {"vision-run"}, found
    whole_silences = kit.ask(f"{url}/api/v1/silences", headers=whole).json["silences"]
    assert len(whole_silences) == 2
    (hidden,) = [each["silence_id"] for each in whole_silences if each["matchers"][0]["value"] == "rl-run"]
    assert kit.ask(f"{url}/api/v1/silences/{hidden}", "DELETE", headers=vision).status == 404
    still = kit.ask(f"{url}/api/v1/silences", headers=whole).json["silences"]
    assert [each["active"] for each in still if each["silence_id"] == hidden] == [True]


@dataclass
class Sent:
    status: int
    headers: dict[str, str]


def signed_in(url: str, body: str) -> Sent:
    """The answer to the form itself: no redirect is followed."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=20)
    try:
        connection.request("POST", "/sign-in", body)
        answer = connection.getresponse()
        return Sent(answer.status, {name.lower(): value for name, value in answer.getheaders()})
    finally:
        connection.close()


def test_a_person_signs_in_once_and_is_sent_where_she_wanted(kit: Any, start: Start) -> None:
    url = start(tokens=TOKENS).url
    wrong = kit.ask(f"{url}/sign-in", "POST", b"token=nonsense&next=/", {})
    assert wrong.status == 401 and "does not know this token" in wrong.text and "nonsense" not in wrong.text
    assert kit.ask(f"{url}/sign-in", "POST", b"token=" + b"x" * 60_000, {}).status == 401
    assert kit.ask(f"{url}/sign-in", "POST", b"token=" + b"x" * 100_000, {}).status == 413
    addresses = {"/runs/x": "/runs/x", "//evil.example": "/", "https://evil.example": "/", "/\\evil.example": "/"}
    for wanted, sent in addresses.items():
        answer = signed_in(url, f"token={OPERATOR}&next={wanted}")
        assert (answer.status, answer.headers["location"]) == (303, sent)
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=strict" in cookie
    session = {"Cookie": cookie.split(";")[0]}
    assert kit.ask(f"{url}/api/v1/runs", headers=session).status == 200
    assert kit.ask(f"{url}/api/v1/runs", headers=session | bearer("wrong")).status == 401
    assert "No run yet" in kit.ask(url, headers=session).text


def test_the_command_makes_a_token_and_the_reporter_reads_its_entry(tmp_path: Path) -> None:
    made = CliRunner().invoke(reporter_token, ["--name", "grafana", "--team", "rl"])
    assert made.exit_code == 0
    entry = made.stderr[made.stderr.index("[[tokens]]") :]
    assert read_tokens(entry).viewer(made.stdout.strip()) == Viewer("grafana", "read", frozenset({"rl"}))
    refused = CliRunner().invoke(reporter_token, ["--name", 'x"y'])
    assert refused.exit_code == 2 and "name must be" in refused.stderr
    file = tmp_path / "tokens.toml"
    for content, says in (("nonsense", "not TOML"), (None, "No such file")):
        file.unlink(missing_ok=True)
        if content is not None:
            file.write_text(content)
        done = CliRunner().invoke(reporter, ["--redis", "redis://127.0.0.1:1/0", "--tokens", str(file)])
        assert done.exit_code == 2 and says in done.stderr and str(file) in done.stderr
