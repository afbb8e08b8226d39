"""The services of one workstation, wired together: the composition root of `gradloc up` and the demo.

Redis (a given one or an embedded one), a Ray head with a spare pool, detector, reporter. Each is a
process of its own; nothing of them is imported here.
"""

import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from gradloc.workstation.processes import Process, StartFailed, free_port, uninterrupted
from gradloc.workstation.ray import RayHead
from gradloc.workstation.redis import EmbeddedRedis, answers

READY_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Plan:
    """What to run. `folder` keeps data and logs; `reporter_port` 0 takes a free one."""

    folder: Path
    redis_url: str | None = None
    store: str | None = None
    reporter_port: int = 0
    num_cpus: int = 2
    strategy: str = "attribution"
    reporter_arguments: tuple[str, ...] = ()
    reporter_env: dict[str, str] = field(default_factory=dict)


class Workstation:
    """Starts everything on entry, ends everything on exit, in reverse order, also after Ctrl-C.

    Raises ValueError for a Redis that is given but does not answer, StartFailed for a service that
    does not start.
    """

    def __init__(self, plan: Plan, *, on_stage: Callable[[str], None] = lambda stage: None) -> None:
        self._plan = plan
        self._on_stage = on_stage
        self._ending: list[Callable[[], None]] = []
        self._watched: list[Process] = []
        self.logs = plan.folder / "logs"
        self.store_url = plan.store or (plan.folder / "snapshots").resolve().as_uri()
        self.redis_url = plan.redis_url or ""
        self.redis: EmbeddedRedis | None = None
        self.ray: RayHead | None = None
        self.reporter_url = ""

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def _start(self) -> None:
        plan = self._plan
        if plan.redis_url is not None and not answers(plan.redis_url):
            raise ValueError("no Redis answers at the URL given; start it there, or leave --redis out for an own one")
        self.logs.mkdir(parents=True, exist_ok=True)
        if plan.redis_url is None:
            self._on_stage("Redis")
            self.redis = EmbeddedRedis(plan.folder / "redis", self.logs / "redis.log")
            self._ending.append(self.redis.end)
            self._watched.append(self.redis.process)
            self.redis.wait_ready()
            self.redis_url = self.redis.url
        self._on_stage("Ray")
        job_env = {"GRADLOC_REDIS_URL": self.redis_url, "GRADLOC_TORCH_THREADS": "1", "OMP_NUM_THREADS": "1"}
        self.ray = RayHead(self.logs / "ray.log", num_cpus=plan.num_cpus, job_env=job_env)
        self._ending.append(self.ray.end)
        self._watched.append(self.ray.process)
        self._on_stage("detector")
        self._launch_detector(self.ray)
        self._on_stage("reporter")
        self._launch_reporter()

    def _launch_detector(self, ray: RayHead) -> None:
        port = free_port()
        command = [sys.executable, "-m", "gradloc_detector", "--ray-address", ray.address, "--port", str(port)]
        command += ["--localizer-python", sys.executable, "--strategy", self._plan.strategy]
        env = {"GRADLOC_REDIS_URL": self.redis_url, "RAY_AUTH_TOKEN": ray.token}
        process = self._launch("detector", command, env)
        process.wait_ready(lambda: _is_ok(f"http://127.0.0.1:{port}/healthz"), timeout_s=READY_TIMEOUT_S)

    def _launch_reporter(self) -> None:
        port = self._plan.reporter_port or free_port()
        self.reporter_url = f"http://127.0.0.1:{port}"
        database = f"sqlite:///{self._plan.folder.resolve() / 'gradloc.sqlite'}"
        command = [sys.executable, "-m", "gradloc_reporter", "--database", database, "--port", str(port)]
        command += ["--public-url", self.reporter_url, *self._plan.reporter_arguments]
        process = self._launch("reporter", command, {"GRADLOC_REDIS_URL": self.redis_url, **self._plan.reporter_env})
        process.wait_ready(lambda: _is_ok(f"{self.reporter_url}/healthz"), timeout_s=READY_TIMEOUT_S)

    def _launch(self, name: str, command: list[str], env: dict[str, str]) -> Process:
        process = Process(name, command, self.logs / f"{name}.log", env)
        self._ending.append(process.end)
        self._watched.append(process)
        return process

    def wait_ray(self) -> None:
        """Wait until Ray takes jobs; everything else works before."""
        assert self.ray is not None
        self.ray.wait_ready()

    def check(self) -> None:
        """Raise StartFailed when a service has ended by itself."""
        for process in self._watched:
            if process.returncode is not None:
                raise StartFailed(f"{process.name} has ended (exit code {process.returncode}): {process.last_words()}")

    def watch(self, *, interval_s: float = 1.0) -> None:
        """Block until a service ends by itself (StartFailed) or the user interrupts."""
        while True:
            self.check()
            time.sleep(interval_s)

    def end(self) -> None:
        """End all services, the last started first; idempotent. Redis goes last."""
        with uninterrupted():
            while self._ending:
                self._ending.pop()()


def _is_ok(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False
