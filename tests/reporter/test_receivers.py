"""Routes and receivers: who is told of what; webhook, e-mail and a real Alertmanager."""

import json
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiosmtpd.controller import Controller
from aiosmtpd.handlers import Message as MailHandler
from click.testing import CliRunner

from gradloc_proto import messages as m
from gradloc_proto.memory_bus import MemoryBus
from gradloc_reporter import Reporter
from gradloc_reporter.command import notify_test
from gradloc_reporter.notices.alertmanager import Alertmanager
from gradloc_reporter.routes import Receiver, read_receivers
from gradloc_reporter.store.engine import Database
from gradloc_reporter.store.fold import Fold
from gradloc_reporter.store.queries import Queries

Start = Callable[..., Reporter]


class Hook:
    """Keeps what is posted; answers with `statuses` first, then 200."""

    def __init__(self) -> None:
        self.posts: list[tuple[dict[str, str], Any]] = []
        self.statuses: list[int] = []
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                hook.posts.append(({k.lower(): v for k, v in self.headers.items()}, json.loads(body)))
                self.send_response(hook.statuses.pop(0) if hook.statuses else 200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/hook"
        self._thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self._thread.join()


@pytest.fixture
def hook() -> Iterator[Hook]:
    made = Hook()
    yield made
    made.close()


def receivers(text: str, **environment: str) -> tuple[Receiver, ...]:
    return read_receivers(text, environment)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "1 to 50"),
        ("[[receivers]", "not TOML"),
        ("[[receivers]]\nname='a b'\nkind='webhook'\nurl_env='U'", "name must be"),
        ("[[receivers]]\nname='a'\nkind='pager'", "kind must be one of slack"),
        ("[[receivers]]\nname='a'\nkind='webhook'", "has the keys url_env"),
        ("[[receivers]]\nname='a'\nkind='webhook'\nurl_env='NONE'", "which is not set in the environment"),
        ("[[receivers]]\nname='a'\nkind='webhook'\nurl_env='SECRET'", "is not a URL"),
        ("[[receivers]]\nname='a'\nkind='slack'\nchannel='#general'", "channel's id"),
        ("[[receivers]]\nname='a'\nkind='email'\nhost='h'\nfrom='x'\nto='y@z'", "plain e-mail addresses"),
        ("[[receivers]]\nname='a'\nkind='email'\nhost='h'\nfrom='x@y'\nto='y@z\\nBcc: q@z'", "plain e-mail"),
        ("[[receivers]]\nname='a'\nkind='alertmanager'\nurl='host:9093'", "http://"),
        ("[[receivers]]\nname='a'\nkind='webhook'\nurl_env='U'\nwhen={severity=3}", "when must be a table"),
        (2 * "[[receivers]]\nname='a'\nkind='webhook'\nurl_env='U'\n", "number 2: .* unique"),
        (
            "".join(f"[[receivers]]\nname='{n}'\nkind='slack'\nchannel='C012'\n" for n in "ab"),
            "number 2: its channel is that of one before",
        ),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says) as refused:
        receivers(text, U="http://127.0.0.1/", SECRET="hunter2")
    assert "hunter2" not in str(refused.value)


def test_secrets_stay_out_of_reprs() -> None:
    (receiver,) = receivers("[[receivers]]\nname='a'\nkind='webhook'\nurl_env='U'", U="http://127.0.0.1/hunter2")
    assert "hunter2" not in repr(receiver)


def test_routes_by_severity_and_label_and_each_stage_once(
    kit: Any, bus: MemoryBus, start: Start, hook: Hook, database_url: str
) -> None:
    text = """
[[receivers]]
name = "oncall"
kind = "webhook"
url_env = "ONCALL"
when = { severity = "critical", team = "!vision" }
"""
    other = Hook()
    everything = f"{text}\n[[receivers]]\nname = 'all'\nkind = 'webhook'\nurl_env = 'ALL'\n"
    routed = receivers(everything, ONCALL=hook.url, ALL=other.url)
    first = start(receivers=routed)
    bad, mild, vision = kit.Told(run_id="bad"), kit.Told(run_id="mild"), kit.Told(run_id="vision")
    kit.tell(bus, bad.started(), mild.started(), vision.started(labels={"team": "vision"}))
    opened = bad.opened()
    kit.tell(bus, opened, mild.opened(norm=4.0), vision.opened())
    kit.until(lambda: len(other.posts), lambda count: count == 3, "everything is told to one")
    kit.until(lambda: len(hook.posts), lambda count: count == 1, "what is critical to the other")
    first.stop()
    start(receivers=routed)
    kit.tell(bus, bad.finished(opened.incident_id))
    kit.until(lambda: len(hook.posts), lambda count: count == 2, "the finding")
    kit.tell(bus, bad.of(m.IncidentResolved, opened.incident_id, step=9, reason="calm"))
    kit.until(lambda: len(hook.posts), lambda count: count == 3, "the end")
    told = [(body["event"], body["incident"]["run_id"], headers["idempotency-key"]) for headers, body in hook.posts]
    names = [(stage, "bad", f"{opened.incident_id}-{stage}") for stage in ("opened", "located", "resolved")]
    assert told == names
    assert 'token 358 "<th" (id 13708)' in hook.posts[1][1]["text"]
    other.close()


def test_a_silence_keeps_back_what_is_new_and_its_end_tells_it(
    kit: Any, told: Any, bus: MemoryBus, start: Start, hook: Hook
) -> None:
    url = start(receivers=receivers("[[receivers]]\nname='a'\nkind='webhook'\nurl_env='U'", U=hook.url)).url
    body = {"by": "ada", "matchers": [{"name": "run", "value": told.run_id}], "hours": 1}
    silence = kit.ask(f"{url}/api/v1/silences", "POST", body).json["silence_id"]
    other = kit.Told(run_id="other")
    kit.tell(bus, told.started(), told.opened(), other.started(), other.opened())
    kit.until(
        lambda: [each["incident"]["run_id"] for _, each in hook.posts], lambda runs: runs == ["other"], "the other"
    )
    kit.ask(f"{url}/api/v1/silences/{silence}", "DELETE")
    kit.until(lambda: len(hook.posts), lambda count: count == 2, "told when the silence ends")


def test_a_webhook_that_fails_is_tried_again_and_each_receivers_calls_are_counted(
    kit: Any, told: Any, bus: MemoryBus, start: Start, hook: Hook
) -> None:
    hook.statuses = [503, 429]
    text = "[[receivers]]\nname='a'\nkind='webhook'\nurl_env='U'\n[[receivers]]\nname='b'\nkind='grafana'\n"
    url = start(receivers=receivers(text + f"url='{hook.url}'\ntoken_env='U'", U=hook.url)).url
    kit.tell(bus, told.started(), told.opened())
    kit.until(lambda: len(hook.posts), lambda count: count == 3, "told after all")

    def counted() -> dict[str, float]:
        lines = [line for line in kit.ask(f"{url}/metrics").text.splitlines() if "receiver_calls_total{" in line]
        return {line.rpartition(" ")[0].partition("{")[2]: float(line.rpartition(" ")[2]) for line in lines}

    ok = 'kind="webhook",outcome="ok",receiver="a"}'
    seen = kit.until(counted, lambda found: found[ok] == 1, "the third call is counted")
    assert seen[ok.replace('"ok"', '"unreachable"')] == seen[ok.replace('"ok"', '"rate_limited"')] == 1
    assert seen['kind="grafana",outcome="ok",receiver="b"}'] == 0, "what nobody called is there, at 0"
    assert len(seen) == 10


class Kept(MailHandler):
    def __init__(self) -> None:
        super().__init__()
        self.mails: list[Any] = []

    def handle_message(self, message: Any) -> None:
        self.mails.append(message)


def test_e_mail_is_one_thread_an_incident(kit: Any, told: Any, bus: MemoryBus, start: Start) -> None:
    kept = Kept()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = Controller(kept, hostname="127.0.0.1", port=port)
    server.start()
    text = f"[[receivers]]\nname='m'\nkind='email'\nhost='127.0.0.1'\nport={port}\nstarttls=false\n"
    start(receivers=receivers(text + "from='gradloc@example.org'\nto=['a@example.org', 'b@example.org']"))
    opened = told.opened()
    kit.tell(bus, told.started(), opened)
    kit.until(lambda: len(kept.mails), lambda count: count == 1, "opened")
    kit.tell(bus, told.finished(opened.incident_id))
    kit.until(lambda: len(kept.mails), lambda count: count == 2, "located")
    server.stop()
    first, second = kept.mails
    assert first["subject"] == "Spike · run qwen3-4b-grpo · step 1,204" or "qwen3-4b-grpo" in str(first["subject"])
    assert second["in-reply-to"] == first["message-id"] and second["to"] == "a@example.org, b@example.org"
    assert "99.9 %" in second.get_payload(decode=True).decode()


def test_grafana_gets_a_mark_with_the_culprit_where_the_spike_was(
    kit: Any, told: Any, bus: MemoryBus, start: Start, hook: Hook
) -> None:
    text = f"[[receivers]]\nname='g'\nkind='grafana'\nurl='{hook.url}'\ntoken_env='T'"
    start(receivers=receivers(text, T="glsa_x"))
    opened = told.opened()
    kit.tell(bus, told.started(), opened, told.finished(opened.incident_id))
    kit.until(lambda: len(hook.posts), lambda count: count == 1, "one mark")
    headers, body = hook.posts[0]
    assert headers["authorization"] == "Bearer glsa_x"
    assert (body["tags"], body["time"]) == (["gradloc", f"run:{told.run_id}"], round(1000 * (told.ts + 1)))
    assert "token 358 &quot;&lt;th&quot; (id 13708)" in body["text"], "Grafana shows it as HTML"


def test_notify_test_says_who_took_it(tmp_path: Path, hook: Hook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOOD", hook.url)
    monkeypatch.setenv("BAD", "http://127.0.0.1:1/")
    file = tmp_path / "receivers.toml"
    file.write_text(
        "".join(f"[[receivers]]\nname='{n.lower()}'\nkind='webhook'\nurl_env='{n}'\n" for n in ("GOOD", "BAD"))
    )
    done = CliRunner().invoke(notify_test, ["--receivers", str(file)])
    assert done.exit_code == 1
    assert done.stdout == "good (webhook): told\nbad (webhook): webhook bad: ConnectError\n"
    assert hook.posts[0][1]["text"].startswith("Test · gradloc notify-test")
    assert CliRunner().invoke(notify_test, ["--receivers", str(file), "--only", "good"]).exit_code == 0
    refused = CliRunner().invoke(notify_test, ["--receivers", str(file), "--only", "nobody"])
    assert refused.exit_code == 2 and "is no receiver" in refused.stderr


# --- Alertmanager ------------------------------------------------------------------------------


def test_alerts_fire_are_posted_again_grow_worse_and_end(
    kit: Any, told: Any, bus: MemoryBus, start: Start, hook: Hook
) -> None:
    """Against a plain server, so that every post is seen."""
    start(receivers=receivers(f"[[receivers]]\nname='am'\nkind='alertmanager'\nurl='{hook.url}'"))
    opened = told.opened(norm=4.0)
    name = opened.incident_id
    kit.tell(bus, told.started(), opened)

    def newest(wanted: Callable[[list[Any]], bool], what: str) -> list[Any]:
        found: list[Any] = kit.until(lambda: hook.posts[-1][1] if hook.posts else [], wanted, what)
        return found

    (alert,) = newest(lambda alerts: len(alerts) == 1, "fires")
    assert alert["labels"] == {
        "alertname": "GradlocIncident",
        "run": told.run_id,
        "team": "rl",
        "incident": name,
        "severity": "warning",
    }
    kit.tell(bus, told.of(m.IncidentWorsened, name, spike=told.spike(1300, 640.0)))
    both = newest(lambda alerts: len(alerts) == 2, "the mild one ends, the bad one begins")
    assert [each["labels"]["severity"] for each in both] == ["warning", "critical"]
    assert both[0]["endsAt"] < both[1]["endsAt"]
    kit.tell(bus, told.of(m.IncidentResolved, name, step=9, reason="calm"))
    (ended,) = newest(lambda alerts: len(alerts) == 1 and "Resolved" in alerts[0]["annotations"]["description"], "ends")
    assert ended["labels"] == both[1]["labels"]


@pytest.fixture
def alertmanager(kit: Any, hook: Hook, tmp_path: Path) -> Iterator[str]:
    """The address of a real one, which posts to `hook`."""
    binary = shutil.which("prometheus-alertmanager")
    if binary is None:
        pytest.skip("no prometheus-alertmanager on the PATH")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    configuration = {
        "route": {"receiver": "hook", "group_by": ["incident"], "group_wait": "0s", "group_interval": "1s"},
        "receivers": [{"name": "hook", "webhook_configs": [{"url": hook.url, "send_resolved": True}]}],
    }
    (tmp_path / "am.yaml").write_text(yaml.safe_dump(configuration))
    address = f"http://127.0.0.1:{port}"
    command = [
        binary,
        f"--config.file={tmp_path}/am.yaml",
        f"--storage.path={tmp_path}/am",
        "--cluster.listen-address=",
    ]
    with (tmp_path / "am.log").open("wb") as log:
        process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
        try:
            kit.until(lambda: _ready(kit, address), bool, "Alertmanager is there")
            yield address
        finally:
            process.terminate()
            process.wait(20)


def test_a_real_alertmanager_is_told_and_the_alert_resolves(
    kit: Any, told: Any, bus: MemoryBus, start: Start, hook: Hook, alertmanager: str
) -> None:
    start(receivers=receivers(f"[[receivers]]\nname='am'\nkind='alertmanager'\nurl='{alertmanager}'"))
    opened = told.opened()
    kit.tell(bus, told.started(), opened)
    firing = kit.until(lambda: [body for _, body in hook.posts], lambda posts: len(posts) > 0, "it fires")[0]
    assert (firing["status"], firing["commonLabels"]["incident"]) == ("firing", opened.incident_id)
    kit.tell(bus, told.of(m.IncidentResolved, opened.incident_id, step=9, reason="calm"))
    kit.until(lambda: [body["status"] for _, body in hook.posts], lambda seen: "resolved" in seen, "it resolves")


@pytest.mark.parametrize("expire_s", [300.0, pytest.param(10.0, marks=pytest.mark.full)])
def test_an_alert_that_goes_on_is_posted_again_and_expires_when_nobody_posts(
    kit: Any, told: Any, hook: Hook, alertmanager: str, database_url: str, expire_s: float
) -> None:
    """A real Alertmanager: every post moves the end of the alert on. Nobody waits for the end of five minutes here."""
    database = Database(database_url)
    opened = told.opened()
    with database.writing() as session:
        fold = Fold(session)
        fold.apply_all([told.started(), opened])
        fold.finish()
    poster = Alertmanager(
        database, Queries(), alertmanager, name="am", clock=time.time, repost_s=0.2, expire_s=expire_s
    )
    thread = threading.Thread(target=poster.run)
    thread.start()

    def statuses() -> list[str]:
        return [body["status"] for _, body in hook.posts]

    def ends_at() -> list[datetime]:
        found = kit.ask(f"{alertmanager}/api/v2/alerts?active=true").json
        return [datetime.fromisoformat(each["endsAt"]) for each in found]

    try:
        kit.until(statuses, lambda seen: seen == ["firing"], "it fires")
        (first,) = kit.until(ends_at, lambda found: len(found) == 1, "it stands")
        kit.until(ends_at, lambda found: found[0] > first, "it stands for longer than the first post said")
        if expire_s < 60:
            kit.until(lambda: datetime.now(UTC), lambda now: now > first, "what the first post said is over")
            assert ends_at()[0] > first, "and yet it stands"
        assert statuses() == ["firing"], "nobody hears of it twice"
    finally:
        poster.stop()
        thread.join(20)
        database.close()
    if expire_s < 60:
        kit.until(statuses, lambda seen: seen == ["firing", "resolved"], "nobody posts: it expires")


def test_two_alertmanagers_are_told_of_what_each_wants(
    kit: Any, told: Any, bus: MemoryBus, start: Start, hook: Hook
) -> None:
    other = Hook()
    text = "[[receivers]]\nname='{}'\nkind='alertmanager'\nurl='{}'\nwhen={{ team = '{}' }}\n"
    start(receivers=receivers(text.format("rl", hook.url, "rl") + text.format("vision", other.url, "vision")))
    vision = kit.Told(run_id="vision-run")
    kit.tell(bus, told.started(), told.opened(), vision.started(labels={"team": "vision"}), vision.opened())
    for each, run in ((hook, told.run_id), (other, "vision-run")):
        kit.until(partial(len, each.posts), bool, f"{run} is told")
        assert {alert["labels"]["run"] for _, alerts in each.posts for alert in alerts} == {run}
    other.close()


def _ready(kit: Any, address: str) -> bool:
    try:
        return bool(kit.ask(f"{address}/-/ready").status == 200)
    except OSError:
        time.sleep(0.1)
        return False
