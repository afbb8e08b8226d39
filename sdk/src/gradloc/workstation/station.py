"""The workstation: Redis, Ray, detector and reporter together, in the order that they need each other.

The one place that knows all of them; each is a process of its own, started with this Python. Knows
no training run.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gradloc.workstation.processes import Child, Processes, answers_http, free_ports, wait_until_ready
from gradloc.workstation.ray import RayHead, start_ray
from gradloc.workstation.redis import reachable, start_redis

SERVICE_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Plan:
    """What to start. `redis_url` None means an embedded one; port 0 means any free one."""

    data_dir: Path
    redis_url: str | None = None
    store_url: str | None = None
    port: int = 0
    num_cpus: int = 2
    strategy: Literal["attribution", "bisect"] = "attribution"
    slack_channel: str | None = None
    slack_base_url: str | None = None
    slack_token: str | None = None


@dataclass(frozen=True)
class Station:
    """Addresses of what runs. `redis` is None where the user's own is used."""

    processes: Processes
    redis: Child | None
    redis_url: str
    store_url: str
    ray: RayHead
    detector_url: str
    reporter_url: str

    def services_that_ended(self) -> list[Child]:
        return [child for child in self.processes.children if not child.is_running]


@contextlib.contextmanager
def station(plan: Plan, tell: Callable[[str], None] = lambda text: None) -> Iterator[Station]:
    """Start everything but wait only for Redis; `wait_for_services` waits for the rest.

    Raises StartFailed, or ConnectionError where the user's Redis does not answer.
    """
    with Processes(plan.data_dir / "logs") as processes:
        redis_port, detector_port, free_port = free_ports(3)
        redis_child = None
        if plan.redis_url is None:
            redis_child, redis_url = start_redis(processes, plan.data_dir / "redis", redis_port)
            tell("Redis is up")
        else:
            redis_url = plan.redis_url
            if not reachable(redis_url):
                raise ConnectionError("Redis does not answer; start it, name another, or leave --redis out")
        store_url = plan.store_url or (plan.data_dir / "snapshots").resolve().as_uri()
        ray = start_ray(processes, redis_url, num_cpus=plan.num_cpus)
        reporter_url = f"http://127.0.0.1:{plan.port or free_port}"
        detector_url = f"http://127.0.0.1:{detector_port}"
        _start_detector(processes, plan, redis_url, ray, detector_port)
        _start_reporter(processes, plan, redis_url, reporter_url)
        try:
            yield Station(processes, redis_child, redis_url, store_url, ray, detector_url, reporter_url)
        finally:
            processes.end()
            ray.forget()


def wait_for_services(running: Station, tell: Callable[[str], None] = lambda text: None) -> None:
    """Wait until Ray takes jobs and both services answer. Raises StartFailed."""
    by_name = {child.name: child for child in running.processes.children}
    for name, url in (("reporter", f"{running.reporter_url}/healthz"), ("detector", f"{running.detector_url}/healthz")):
        wait_until_ready(by_name[name], lambda url=url: answers_http(url), timeout_s=SERVICE_TIMEOUT_S)  # type: ignore[misc]
        tell(f"{name} is up")
    running.ray.wait()
    tell("Ray is up")


def _start_detector(processes: Processes, plan: Plan, redis_url: str, ray: RayHead, port: int) -> None:
    command = [sys.executable, "-m", "gradloc_detector", "--ray-address", ray.address, "--port", str(port)]
    command += ["--strategy", plan.strategy, "--localizer-python", sys.executable]
    processes.start("detector", command, env={"GRADLOC_REDIS_URL": redis_url, "RAY_AUTH_TOKEN": ray.token})


def _start_reporter(processes: Processes, plan: Plan, redis_url: str, url: str) -> None:
    database = (plan.data_dir / "gradloc.sqlite").resolve()
    command = [sys.executable, "-m", "gradloc_reporter", "--database", f"sqlite:///{database}"]
    command += ["--port", url.rsplit(":", maxsplit=1)[1], "--public-url", url]
    if plan.slack_channel is not None:
        command += ["--slack-channel", plan.slack_channel]
    if plan.slack_base_url is not None:
        command += ["--slack-base-url", plan.slack_base_url]
    env = {"GRADLOC_REDIS_URL": redis_url}
    token = plan.slack_token or os.environ.get("GRADLOC_SLACK_TOKEN")
    if token:
        env["GRADLOC_SLACK_TOKEN"] = token
    processes.start("reporter", command, env=env)
