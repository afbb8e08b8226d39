"""One Slack message an incident, through its whole life, whatever happens in between.

Against a local server that speaks as much of Slack's API as we use and keeps what it received.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from gradloc_proto import messages as m
from gradloc_proto.memory_bus import MemoryBus
from gradloc_proto.redis_bus import RedisBus
from gradloc_reporter import Reporter, SlackSettings
from gradloc_reporter.slack.client import SlackChannel, SlackUnreachable
from gradloc_reporter.store import deliveries as ledger
from gradloc_reporter.store.engine import Database

CHANNEL = "C0GRADLOC01"
TOKEN = "xoxb-not-a-real-token"


@dataclass
class SlackServer:
    """Messages by ts, every call in order, and faults to come: (method, what happens)."""

    messages: dict[str, dict[str, Any]] = field(default_factory=dict)
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    replies: list[dict[str, Any]] = field(default_factory=list)
    hooked: list[dict[str, Any]] = field(default_factory=list)
    faults: list[tuple[str, str]] = field(default_factory=list)
    called_at: list[float] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    kill: tuple[int, bool, int] | None = None  # at which call, after its work or before, and whom
    page_size: int = 2  # small, so that looking back needs several pages
    url: str = ""

    def answer(self, method: str, arguments: dict[str, Any], token: str) -> tuple[int, dict[str, str], Any]:
        """Status, headers and body; body None breaks the connection after the work was done."""
        with self.lock:
            if method == "chat.postMessage" and "thread_ts" in arguments:
                method = "reply"
            self.calls.append((method, arguments))
            self.called_at.append(time.monotonic())
            if self.kill is not None and len(self.calls) == self.kill[0]:
                _, after, pid = self.kill
                if after:
                    getattr(self, "_" + method.replace(".", "_"))(arguments)
                os.kill(pid, signal.SIGKILL)
                self.kill = None
                return 200, {}, None
            fault = next((item for item in self.faults if item[0] == method), None)
            if fault is not None:
                self.faults.remove(fault)
                what = fault[1]
                if what.startswith("429"):
                    return 429, {"Retry-After": what.partition(" ")[2]}, {"ok": False, "error": "ratelimited"}
                if what != "lost":
                    return 200, {}, {"ok": False, "error": what}
            if method == "webhook":
                self.hooked.append(arguments)
                return 200, {}, None if fault else "ok"
            if token != f"Bearer {TOKEN}":
                return 200, {}, {"ok": False, "error": "invalid_auth"}
            body = getattr(self, "_" + method.replace(".", "_"))(arguments)
            return 200, {}, None if fault else body

    def _chat_postMessage(self, arguments: dict[str, Any]) -> Any:
        ts = f"{time.time():.6f}"
        while ts in self.messages:
            ts = f"{float(ts) + 1e-6:.6f}"
        self.messages[ts] = arguments | {"ts": ts}
        return {"ok": True, "channel": CHANNEL, "ts": ts}

    def _reply(self, arguments: dict[str, Any]) -> Any:
        if arguments["thread_ts"] not in self.messages:
            return {"ok": False, "error": "thread_not_found"}
        self.replies.append(arguments)
        return {"ok": True, "channel": CHANNEL, "ts": f"{time.time():.6f}"}

    def _conversations_replies(self, arguments: dict[str, Any]) -> Any:
        found = [each for each in self.replies if each["thread_ts"] == arguments["ts"]]
        return {"ok": True, "messages": [{"metadata": each["metadata"]} for each in found]}

    def _chat_update(self, arguments: dict[str, Any]) -> Any:
        if arguments["ts"] not in self.messages:
            return {"ok": False, "error": "message_not_found"}
        assert arguments["channel"] == CHANNEL
        self.messages[arguments["ts"]] |= arguments
        return {"ok": True, "channel": CHANNEL, "ts": arguments["ts"]}

    def _chat_delete(self, arguments: dict[str, Any]) -> Any:
        found = self.messages.pop(arguments["ts"], None)
        return {"ok": True} if found else {"ok": False, "error": "message_not_found"}

    def _conversations_history(self, arguments: dict[str, Any]) -> Any:
        assert arguments["channel"] == CHANNEL and arguments["include_all_metadata"] in ("true", "1")
        since = float(arguments["oldest"])
        all_ts = sorted((ts for ts in self.messages if float(ts) > since), key=float, reverse=True)
        start = int(arguments.get("cursor") or 0)
        page = all_ts[start : start + self.page_size]
        following = str(start + self.page_size) if start + self.page_size < len(all_ts) else ""
        shown = [{"ts": ts, "metadata": self.messages[ts].get("metadata")} for ts in page]
        return {"ok": True, "messages": shown, "response_metadata": {"next_cursor": following}}

    def named(self, method: str) -> list[dict[str, Any]]:
        with self.lock:
            return [arguments for name, arguments in self.calls if name == method]

    def texts(self) -> list[str]:
        with self.lock:
            return [message["text"] for message in self.messages.values()]


def _form(text: str) -> dict[str, Any]:
    return {name: values[0] for name, values in parse_qs(text).items()}


@pytest.fixture
def slack() -> Iterator[SlackServer]:
    state = SlackServer()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.headers.get("Content-Type", "").startswith("application/json"):
                self._reply(json.loads(body))
            else:
                self._reply(_form(body.decode()))

        def do_GET(self) -> None:
            self._reply(_form(urlsplit(self.path).query))

        def _reply(self, arguments: dict[str, Any]) -> None:
            method = urlsplit(self.path).path.rpartition("/")[2]
            status, headers, body = state.answer(method, arguments, self.headers.get("Authorization", ""))
            if body is None:
                self.close_connection = True
                return
            data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/plain" if isinstance(body, str) else "application/json")
            self.send_header("Content-Length", str(len(data)))
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_port}/api/"
    yield state
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def bot(slack: SlackServer) -> SlackSettings:
    return SlackSettings(token=TOKEN, channel=CHANNEL, base_url=slack.url, interval_s=0.02)


Start = Callable[..., Reporter]


def test_one_message_edited_from_spike_to_resolved(
    kit: Any, told: Any, bus: MemoryBus, start: Start, slack: SlackServer, bot: SlackSettings
) -> None:
    start(slack=bot, public_url="https://gradloc.example/")
    opened = told.opened()
    incident = opened.incident_id

    def says(words: str) -> None:
        kit.until(slack.texts, lambda texts: len(texts) == 1 and words in texts[0], f"Slack says {words!r}")

    kit.tell(bus, told.started(), opened)
    says("Waiting for localization")
    kit.tell(bus, told.of(m.LocalizationProgressed, incident, localization_attempt=1, stage="replay", fraction=0.2))
    says("Localizing: replay, 20 %")
    kit.tell(bus, told.finished(incident))
    says('token 358 `"&lt;th"` (id 13708) · 99.9 % of the norm²')
    kit.tell(bus, told.of(m.IncidentResolved, incident, step=1260, reason="calm"))
    says("Resolved at step 1,260: calm")
    assert len(slack.named("chat.postMessage")) == 1
    (message,) = slack.messages.values()
    assert message["metadata"] == {"event_type": "gradloc_incident", "event_payload": {"incident_id": incident}}
    assert f"https://gradloc.example/incidents/{incident}" in message["text"]
    assert message["text"].startswith("*Spike · run qwen3-4b-grpo · step 1,204* · grad norm 640 (healthy 0.41, 1,560x)")
    assert all(block["text"]["verbatim"] for block in message["blocks"] if block["type"] == "section")


def test_a_storm_is_one_message(
    kit: Any, told: Any, bus: MemoryBus, start: Start, slack: SlackServer, bot: SlackSettings
) -> None:
    start(slack=bot)
    opened = told.opened()
    joined = [told.of(m.IncidentJoined, opened.incident_id, spike=told.spike(2000 + step, 90.0)) for step in range(999)]
    kit.tell(bus, told.started(), opened, *joined)
    kit.until(slack.texts, lambda texts: any("1,000 spikes so far" in text for text in texts), "all spikes are told")
    assert len(slack.messages) == 1
    assert len(slack.calls) < 100, "states in between are skipped, not queued"


def test_a_post_whose_answer_was_lost_is_not_repeated(
    kit: Any, told: Any, bus: MemoryBus, start: Start, slack: SlackServer, bot: SlackSettings
) -> None:
    slack.faults.append(("chat.postMessage", "lost"))
    start(slack=bot)
    opened = told.opened()
    kit.tell(bus, told.started(), opened, told.finished(opened.incident_id))
    kit.until(lambda: slack.named("chat.update"), bool, "the message is found again and edited")
    assert len(slack.messages) == 1 and len(slack.named("chat.postMessage")) == 1


@pytest.mark.parametrize("posted", [0, 1, 3])
def test_a_crash_between_post_and_record_leaves_one_message(
    kit: Any,
    told: Any,
    bus: MemoryBus,
    start: Start,
    slack: SlackServer,
    bot: SlackSettings,
    database_url: str,
    posted: int,
) -> None:
    """The dead reporter wrote down its intention and then posted 0, 1 or (after a race) 3 messages."""
    opened, other = told.opened(), told.opened(7)
    kit.tell(bus, told.started(), opened, other)
    start().stop()  # without Slack: it only fills the database
    database = Database(database_url)
    door = SlackChannel(token=TOKEN, channel=CHANNEL, base_url=slack.url)
    with database.writing() as session:
        ledger.intend(session, opened.incident_id, receiver=CHANNEL, now=time.time())
    database.close()
    from gradloc_reporter.slack.client import SlackMessage

    for number in range(posted):
        for incident in (opened.incident_id, f"noise-{number}"):
            door.post(incident, SlackMessage(f"message {number}", []))
    start(slack=bot)

    def of_ours() -> list[str]:
        with slack.lock:
            ours = [each for each in slack.messages.values() if _incident(each) == opened.incident_id]
        return [each["text"] for each in ours]

    kit.until(of_ours, lambda texts: len(texts) == 1 and "Spike" in texts[0], "one message, up to date")
    kit.until(
        lambda: [_incident(each) for each in list(slack.messages.values())],
        lambda all_: other.incident_id in all_,
        "the other",
    )
    assert len(of_ours()) == 1
    assert len(slack.messages) == posted + 2, "nobody else's message was touched"


def _incident(message: dict[str, Any]) -> str:
    return str(message["metadata"]["event_payload"]["incident_id"])


def test_a_restart_does_not_post_again(
    kit: Any, told: Any, bus: MemoryBus, start: Start, slack: SlackServer, bot: SlackSettings
) -> None:
    opened = told.opened()
    kit.tell(bus, told.started(), opened)
    first = start(slack=bot)
    kit.until(slack.texts, lambda texts: len(texts) == 1, "posted")
    first.stop()
    start(slack=bot)
    kit.tell(bus, told.finished(opened.incident_id))
    kit.until(slack.texts, lambda texts: "99.9 %" in texts[0], "edited by the second reporter")
    assert len(slack.messages) == 1 and len(slack.named("chat.postMessage")) == 1


def test_retry_after_is_honoured_and_consuming_goes_on(
    kit: Any, told: Any, bus: MemoryBus, start: Start, slack: SlackServer, bot: SlackSettings
) -> None:
    slack.faults.append(("chat.postMessage", "429 2"))
    url = start(slack=bot).url
    opened = told.opened()
    kit.tell(bus, told.started(), opened)
    kit.until(lambda: slack.named("chat.postMessage"), bool, "the first try")
    kit.tell(bus, told.step(1, 0.4))
    kit.until(lambda: kit.ask(f"{url}/api/v1/runs").json["runs"][0]["last_step"], lambda step: step == 1, "consumed")
    assert slack.texts() == [], "not before the time that Slack named"
    kit.until(slack.texts, lambda texts: len(texts) == 1, "posted afterwards")
    posts = [at for (name, _), at in zip(slack.calls, slack.called_at, strict=True) if name == "chat.postMessage"]
    assert posts[1] - posts[0] >= 2.0


def test_a_message_that_somebody_deleted_stays_deleted(
    kit: Any, told: Any, bus: MemoryBus, start: Start, slack: SlackServer, bot: SlackSettings
) -> None:
    start(slack=bot)
    opened, later = told.opened(), told.opened(2000)
    kit.tell(bus, told.started(), opened)
    kit.until(slack.texts, lambda texts: len(texts) == 1, "posted")
    slack.messages.clear()
    kit.tell(bus, told.finished(opened.incident_id))
    kit.until(lambda: slack.named("chat.update"), bool, "the edit was tried")
    kit.tell(bus, later)
    kit.until(slack.texts, lambda texts: len(texts) == 1 and "step 2,000" in texts[0], "the next incident is told")


def test_one_message_that_slack_does_not_take_holds_up_no_other(
    kit: Any, told: Any, bus: MemoryBus, start: Start, slack: SlackServer, bot: SlackSettings
) -> None:
    slack.faults.append(("chat.postMessage", "invalid_blocks"))
    start(slack=bot)
    kit.tell(bus, told.started(), told.opened(5), told.opened(6))
    kit.until(slack.texts, lambda texts: len(texts) == 1 and "step 6" in texts[0], "the second incident is told")


def test_refusals_say_what_to_do_and_never_the_token(
    kit: Any, told: Any, bus: MemoryBus, start: Start, slack: SlackServer, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = SlackSettings(token="xoxb-wrong", channel=CHANNEL, base_url=slack.url, interval_s=0.02)
    url = start(slack=wrong).url
    kit.tell(bus, told.started(), told.opened())
    kit.until(lambda: "invalid_auth; check GRADLOC_SLACK_TOKEN" in caplog.text, bool, "a line in the log")
    assert "xoxb-wrong" not in caplog.text
    shown = kit.ask(f"{url}/metrics").text
    assert 'gradloc_receiver_calls_total{kind="slack",outcome="refused",receiver="slack"} 1.0' in shown
    assert 'gradloc_receiver_calls_total{kind="slack",outcome="ok",receiver="slack"} 0.0' in shown, "a rise from 0"


def test_old_incidents_are_history_when_slack_is_switched_on(
    kit: Any, bus: MemoryBus, start: Start, slack: SlackServer, bot: SlackSettings
) -> None:
    old, new = kit.Told(run_id="old", ts=time.time() - 3 * 86_400), kit.Told(run_id="new")
    kit.tell(bus, old.started(), new.started(), old.opened(), new.opened())
    start(slack=bot)
    kit.until(slack.texts, lambda texts: len(texts) == 1 and "run new" in texts[0], "only the news is told")


def test_redacted_messages_hold_no_token_text(
    kit: Any, told: Any, bus: MemoryBus, start: Start, slack: SlackServer, bot: SlackSettings
) -> None:
    url = start(slack=bot, redact_tokens=True).url
    opened = told.opened()
    kit.tell(
        bus, told.started(), opened, told.finished(opened.incident_id, culprits=(kit.a_culprit(token_text="SECRET"),))
    )
    kit.until(slack.texts, lambda texts: len(texts) == 1 and "token 358 (id 13708)" in texts[0], "the finding")
    assert "SECRET" not in json.dumps(slack.calls)
    assert "SECRET" not in kit.ask(f"{url}/incidents/{opened.incident_id}").text


# --- the thread, and death at any step ----------------------------------------------------------


def test_the_numbers_go_into_the_thread_once(
    kit: Any, told: Any, bus: MemoryBus, start: Start, slack: SlackServer, bot: SlackSettings
) -> None:
    slack.faults.append(("reply", "lost"))  # it is there, but nobody was told: looked up, not repeated
    first = start(slack=bot)
    opened = told.opened()
    kit.tell(bus, told.started(), opened, told.finished(opened.incident_id))
    kit.until(lambda: len(slack.named("conversations.replies")), lambda count: count == 1, "looked up")
    kit.until(slack.texts, lambda texts: "Located" in texts[0], "up to date")
    first.stop()
    start(slack=bot)
    kit.tell(bus, told.of(m.IncidentResolved, opened.incident_id, step=1260, reason="calm"))
    kit.until(slack.texts, lambda texts: "Resolved" in texts[0], "the end")
    (reply,) = slack.replies
    assert "IS ratio 2.1e5" in reply["text"] and '`"&lt;th"`' in reply["text"] and "ratio 2.1e5" in reply["text"]


def test_a_bot_that_may_not_reply_still_tells(
    kit: Any, told: Any, bus: MemoryBus, start: Start, slack: SlackServer, bot: SlackSettings
) -> None:
    slack.faults.append(("reply", "restricted_action_thread_only_channel"))
    start(slack=bot)
    opened = told.opened()
    kit.tell(bus, told.started(), opened, told.finished(opened.incident_id))
    kit.until(lambda: slack.named("reply"), bool, "tried")
    kit.tell(bus, told.of(m.IncidentResolved, opened.incident_id, step=1260, reason="calm"))
    kit.until(slack.texts, lambda texts: len(texts) == 1 and "Resolved" in texts[0], "the message goes on")


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("after", [False, True])
def test_killed_at_any_call_exactly_one_message_and_one_reply_are_left(
    kit: Any, redis_server: Any, slack: SlackServer, tmp_path: Any, after: bool
) -> None:
    """SIGKILL to the real process while Slack has its 1st, 2nd, ... call in hand, until none is left to die at."""
    bus = RedisBus(redis_server.url)
    for number in range(1, 12):
        told = kit.Told(run_id=f"run-{number}")
        opened = told.opened()
        kit.tell(bus, told.started(), opened, told.finished(opened.incident_id))
        slack.calls.clear()
        slack.messages.clear()
        slack.replies.clear()
        environment = dict(os.environ, GRADLOC_SLACK_TOKEN=TOKEN)
        command = [sys.executable, "-m", "gradloc_reporter", "--redis", redis_server.url, "--port", "0"]
        command += ["--database", f"sqlite:///{tmp_path}/{number}.sqlite"]
        command += ["--slack-channel", CHANNEL, "--slack-base-url", slack.url]
        name = opened.incident_id
        with (tmp_path / "log").open("ab") as log:
            first = subprocess.Popen(command, env=environment, stderr=log)
            slack.kill = (number, after, first.pid)
            try:
                dead = partial(_died_or_replied, first, slack)
                died = kit.until(dead, bool, "dead, or done") == "died"
            finally:
                first.kill()
                first.wait(20)
                slack.kill = None
            second = subprocess.Popen(command, env=environment, stderr=log)
            try:
                kit.until(
                    partial(_texts_of, slack, name),
                    lambda texts: len(texts) == 1 and "Located" in texts[0],
                    f"one message after death at call {number}",
                )
                kit.until(lambda: slack.replies, lambda replies: len(replies) == 1, "one reply")
            finally:
                second.terminate()
                second.wait(20)
        assert len(_texts_of(slack, name)) == 1 and len(slack.replies) == 1, number
        for run in range(number):  # the next round has its own
            bus.expire(f"run-{run + 1}", ttl_s=0.001)
        if not died:
            break
    else:
        pytest.fail("it never came to its end alive")
    bus.close()
    assert number >= 3


def _texts_of(slack: SlackServer, incident: str) -> list[str]:
    with slack.lock:
        return [each["text"] for each in slack.messages.values() if _incident(each) == incident]


def _died_or_replied(process: subprocess.Popen[bytes], slack: SlackServer) -> str:
    if slack.replies:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(3)
    return "died" if process.poll() is not None else "replied" if slack.replies else ""


# --- webhook -----------------------------------------------------------------------------------


def test_a_webhook_posts_at_opening_and_at_finding(
    kit: Any, told: Any, bus: MemoryBus, start: Start, slack: SlackServer
) -> None:
    hook = SlackSettings(webhook=slack.url + "webhook", interval_s=0.02)
    opened = told.opened()
    incident = opened.incident_id
    first = start(slack=hook)
    kit.tell(bus, told.started(), opened)
    kit.until(lambda: len(slack.hooked), lambda n: n == 1, "opened is told")
    kit.tell(bus, told.of(m.LocalizationProgressed, incident, localization_attempt=1, stage="verify", fraction=0.9))
    kit.tell(bus, told.finished(incident), told.of(m.IncidentResolved, incident, step=9, reason="calm"))
    kit.until(lambda: len(slack.hooked), lambda n: n == 2, "the finding is told")
    first.stop()
    start(slack=hook)
    kit.tell(bus, told.opened(3000))
    kit.until(lambda: len(slack.hooked), lambda n: n == 3, "the next incident is told")
    texts = [each["text"] for each in slack.hooked]
    assert "99.9 %" not in texts[0] and "99.9 %" in texts[1] and "step 3,000" in texts[2]


def test_a_webhooks_retry_after_is_honoured(
    kit: Any, told: Any, bus: MemoryBus, start: Start, slack: SlackServer
) -> None:
    slack.faults.append(("webhook", "429 1"))
    start(slack=SlackSettings(webhook=slack.url + "webhook", interval_s=0.02))
    kit.tell(bus, told.started(), told.opened())
    kit.until(lambda: len(slack.hooked), lambda n: n == 1, "told after all")
    assert slack.called_at[1] - slack.called_at[0] >= 1.0


def test_the_client_itself_never_repeats_a_post(slack: SlackServer) -> None:
    slack.faults.append(("chat.postMessage", "lost"))
    from gradloc_reporter.slack.client import SlackMessage

    door = SlackChannel(token=TOKEN, channel=CHANNEL, base_url=slack.url)
    with pytest.raises(SlackUnreachable):
        door.post("inc-1", SlackMessage("text", []))
    assert len(slack.named("chat.postMessage")) == 1
