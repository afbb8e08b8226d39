"""Drivers as processes that meet Ray actors, on a Ray of their own on this machine."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from gradloc.workstation.ray import RayHead

DRIVE = Path(__file__).with_name("drive.py")
TIMEOUT_S = 600.0
ACTOR = "ray::ReplayReplica"


class OnRay:
    def __init__(self, folder: Path, snapshot: str, num_replicas: int) -> None:
        self._snapshot = snapshot
        self._head = RayHead(folder / "ray.log", num_cpus=num_replicas + 1, job_env={}, spare_gpus=num_replicas)
        self._head.wait_ready()

    def driver(self, probes: Path, num_replicas: int) -> "RayDriver":
        return RayDriver(self._head, self._snapshot, probes, num_replicas)

    def close(self) -> None:
        self._head.end()


class RayDriver:
    def __init__(self, head: RayHead, snapshot: str, probes: Path, num_replicas: int) -> None:
        env = os.environ | {
            "RAY_ADDRESS": head.gcs_address,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": head.token,
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        words = [sys.executable, str(DRIVE), snapshot, probes.as_uri(), str(num_replicas)]
        self._head = head
        self._process = subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def alive(self) -> bool:
        return self._process.poll() is None

    def actors(self) -> list[int]:
        """Process ids of this Ray's actors."""
        found = []
        for process in psutil.Process(self._head.process.pid).children(recursive=True):
            try:
                if process.cmdline()[:1] and process.cmdline()[0].startswith(ACTOR):
                    found.append(process.pid)
            except psutil.NoSuchProcess:
                continue
        return sorted(found)

    def kill(self) -> None:
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.communicate()

    def finding(self) -> dict[str, Any]:
        out, errors = self._process.communicate(timeout=TIMEOUT_S)
        assert self._process.returncode == 0, errors[-3_000:]
        (line,) = [line for line in out.splitlines() if line.startswith("{")]
        found: dict[str, Any] = json.loads(line)
        return found
