"""Rules and dashboards: only metrics that running services export, and a spike that really reaches somebody."""

import json
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from gradloc_detector.metrics import Metrics
from gradloc_proto import messages as m
from gradloc_proto import streams
from gradloc_proto.codec import encode
from gradloc_proto.identities import incident_id, spike_id
from gradloc_proto.memory_bus import MemoryBus
from gradloc_reporter import Reporter, Settings

FILES = Path(__file__).parents[2] / "deploy/k8s/gradloc/files"
DOCS = Path(__file__).parents[2] / "docs/alerts.md"
RULES = FILES / "rules.yaml"
DASHBOARDS = sorted((FILES / "dashboards").glob("*.json"))
RUN = "qwen3-4b-grpo"
NOW = time.time()


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def expressions(node: Any) -> Iterator[str]:
    """Every PromQL text of a dashboard."""
    if isinstance(node, dict):
        for key, value in node.items():
            if key in ("expr", "definition") and isinstance(value, str):
                yield value
            else:
                yield from expressions(value)
    elif isinstance(node, list):
        for value in node:
            yield from expressions(value)


@pytest.fixture
def exported(tmp_path: Path) -> set[str]:
    """Names of the samples that a reporter with one incident, and a detector, show."""
    bus = MemoryBus()
    with Reporter(bus, Settings(database=f"sqlite:///{tmp_path}/r.sqlite", port=0)) as reporter:
        tell(bus, *opening())
        until(lambda: scraped(reporter), lambda text: "gradloc_incidents_open" in text, "the incident")
        shown = scraped(reporter)
    metrics = Metrics()
    for counter in (metrics.messages, metrics.rejected):
        counter.labels("steps").inc()
    return set(re.findall(r"^# TYPE (\w+)", shown + metrics.text().decode(), re.MULTILINE))


def test_rules_and_dashboards_use_only_metrics_that_exist(exported: set[str]) -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    used = [rule["expr"] for rule in rules()]
    assert DASHBOARDS
    for file in DASHBOARDS:
        used += list(expressions(json.loads(file.read_text())))
    names = {name for text in used for name in re.findall(r"\bgradloc[\w:]+", text)}
    assert len(names) > 15
    assert names - exported - recorded == set()


def test_a_dashboard_is_whole() -> None:
    for file in DASHBOARDS:
        dashboard = json.loads(file.read_text())
        panels = dashboard["panels"]
        assert len({panel["id"] for panel in panels}) == len(panels)
        assert all(panel["description"] and panel["targets"] for panel in panels)
        cells = [
            (panel["gridPos"]["x"] + x, panel["gridPos"]["y"] + y)
            for panel in panels
            for x in range(panel["gridPos"]["w"])
            for y in range(panel["gridPos"]["h"])
        ]
        assert len(set(cells)) == len(cells) and max(x for x, _ in cells) < 24, "panels overlap or stick out"
        known = {variable["name"] for variable in dashboard["templating"]["list"]}
        asked = set(re.findall(r"\$\{?(\w+)", json.dumps(dashboard))) - {"__all"}
        assert asked <= known


def test_every_alert_has_words_a_severity_and_its_paragraph() -> None:
    alerts = [rule for rule in rules() if "alert" in rule]
    told = set(re.findall(r"^## (\w+)$", DOCS.read_text(), re.MULTILINE))
    assert told == {rule["alert"] for rule in alerts}
    for rule in alerts:
        assert rule["labels"]["severity"] in ("critical", "warning", "none")
        assert set(rule["annotations"]) == {"summary", "description"}


def test_the_playbook_says_where_to_look_first_for_every_alert() -> None:
    rows = re.findall(r"^\| (`Gradloc.*`) \|", (DOCS.parent / "operating.md").read_text(), re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`(Gradloc\w+)`", row)]
    assert sorted(named) == sorted(rule["alert"] for rule in rules() if "alert" in rule)


def test_promtool_finds_nothing_and_the_rules_do_what_their_tests_say() -> None:
    for arguments in (["check", "rules", "rules.yaml"], ["test", "rules", "rules.test.yaml"]):
        done = subprocess.run([binary("promtool"), *arguments], cwd=FILES, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


class Receiver:
    """Keeps what Alertmanager posts to it."""

    def __init__(self) -> None:
        self.notices: list[dict[str, Any]] = []
        notices = self.notices

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                notices.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def last(self) -> dict[str, Any]:
        """The newest state of each incident alert, by run."""
        return {alert["labels"]["run"]: alert for notice in list(self.notices) for alert in notice["alerts"]}


def test_a_spike_reaches_a_receiver_stays_and_is_resolved(tmp_path: Path) -> None:
    """Real reporter, Prometheus and Alertmanager. The norm is back to normal before the first scrape."""
    bus, receiver = MemoryBus(), Receiver()
    processes: list[subprocess.Popen[bytes]] = []
    try:
        with Reporter(bus, Settings(database=f"sqlite:///{tmp_path}/r.sqlite", port=0)) as reporter:
            tell(bus, *opening())
            alertmanager = started_alertmanager(tmp_path, receiver.url, processes)
            started_prometheus(tmp_path, reporter.url, alertmanager, processes)
            firing = until(receiver.last, lambda alerts: RUN in alerts, "the alert is received")[RUN]
            assert firing["status"] == "firing"
            assert firing["labels"]["alertname"] == "GradlocIncidentOpen"
            assert firing["annotations"]["summary"] == f"{RUN}: 1 incident(s) not resolved"
            heard = len(receiver.notices)
            until(lambda: len(receiver.notices), lambda number: number > heard, "it is repeated")
            assert receiver.last()[RUN]["status"] == "firing"
            tell(bus, resolved())
            until(receiver.last, lambda alerts: bool(alerts[RUN]["status"] == "resolved"), "the alert is resolved")
            assert set(receiver.last()) == {RUN}
    finally:
        for process in processes:
            process.send_signal(signal.SIGTERM)
        for process in processes:
            process.wait(20)
        receiver.close()


def started_alertmanager(folder: Path, receiver: str, processes: list[subprocess.Popen[bytes]]) -> str:
    configuration = {
        "route": {
            "receiver": "nobody",
            "routes": [{"receiver": "somebody", "matchers": ['alertname="GradlocIncidentOpen"']}],
            "group_by": ["alertname", "run"],
            "group_wait": "0s",
            "group_interval": "1s",
            "repeat_interval": "1s",
        },
        "receivers": [{"name": "nobody"}, {"name": "somebody", "webhook_configs": [{"url": receiver}]}],
    }
    (folder / "alertmanager.yaml").write_text(yaml.safe_dump(configuration))
    address = f"127.0.0.1:{free_port()}"
    processes.append(
        run(
            "prometheus-alertmanager",
            f"--config.file={folder}/alertmanager.yaml",
            f"--storage.path={folder}/alertmanager",
            f"--web.listen-address={address}",
            "--cluster.listen-address=",
        )
    )
    return address


def started_prometheus(
    folder: Path, reporter: str, alertmanager: str, processes: list[subprocess.Popen[bytes]]
) -> None:
    configuration = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(RULES)],
        "alerting": {"alertmanagers": [{"static_configs": [{"targets": [alertmanager]}]}]},
        "scrape_configs": [
            {"job_name": "reporter", "static_configs": [{"targets": [reporter.removeprefix("http://")]}]}
        ],
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(configuration))
    processes.append(
        run(
            "prometheus",
            f"--config.file={folder}/prometheus.yaml",
            f"--storage.tsdb.path={folder}/prometheus",
            f"--web.listen-address=127.0.0.1:{free_port()}",
        )
    )


def opening() -> tuple[m.Message, ...]:
    identity = spike_id(RUN, 0, 7, "norm")
    flag = m.Flag(rule="norm", series="norm", value=640.0, score=1500.0, baseline=0.4, limit=1.6)
    spike = m.Spike(spike_id=identity, step=7, grad_norm=640.0, healthy_norm=0.4, limit=1.6, flags=(flag,))
    incident = incident_id(RUN, 0, identity)
    known: dict[str, Any] = {"run_id": RUN, "attempt": 0, "ts": NOW}
    norms = {6: 0.4, 7: 640.0, 8: 0.4}
    return (
        m.RunStarted(world_size=2, **known),
        *(m.StepObserved(step=step, grad_norm=norm, limit=1.6, **known) for step, norm in norms.items()),
        m.LimitsChanged(limits=m.Limits(version=8, norm=1.6, healthy_norm=0.4), step=8, **known),
        m.IncidentOpened(incident_id=incident, spike=spike, **known),
        m.LocalizationFailed(
            incident_id=incident, localization_attempt=1, reason="no snapshot", retryable=False, **known
        ),
    )


def resolved() -> m.IncidentResolved:
    incident = incident_id(RUN, 0, spike_id(RUN, 0, 7, "norm"))
    return m.IncidentResolved(run_id=RUN, attempt=0, ts=NOW + 60, incident_id=incident, step=9, reason="calm")


def tell(bus: MemoryBus, *messages: m.Message) -> None:
    for message in messages:
        if isinstance(message, m.RunStarted):
            bus.append(streams.REGISTRY, [encode(message)], length_max=streams.REGISTRY_LENGTH_MAX)
        names: dict[type[m.Message], streams.StreamName] = {m.LimitsChanged: "limits"}
        name = names.get(type(message), "steps")
        if isinstance(message, m.IncidentMessage | m.IncidentResolved):
            name = "incidents"
        elif isinstance(message, m.LocalizationMessage):
            name = "findings"
        bus.append(streams.stream(RUN, name), [encode(message)], length_max=1_000)


def scraped(reporter: Reporter) -> str:
    with urllib.request.urlopen(f"{reporter.url}/metrics", timeout=20) as answer:
        return str(answer.read().decode())


def until(ask: Callable[[], Any], wanted: Callable[[Any], bool], what: str) -> Any:
    for _ in range(1_200):
        seen = ask()
        if wanted(seen):
            return seen
        time.sleep(0.1)
    raise AssertionError(f"never came true: {what}; last seen: {str(seen)[:500]}")


def binary(name: str) -> str:
    found = shutil.which(name)
    assert found is not None, f"{name} is not installed; make services installs it"
    return found


def run(name: str, *arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([binary(name), *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
