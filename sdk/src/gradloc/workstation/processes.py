"""Child processes that end with us: each in a session of its own, logs in files, ended by pid.

Knows nothing of what runs in them. `end` takes the last started first: a service goes before what it
needs. Descendants that a child leaves behind (Ray's workers) are ended as well, by their own pids.
"""

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

END_TIMEOUT_S = 15.0
_POLL_S = 0.1
_LOG_TAIL_LINES = 5


class StartFailed(RuntimeError):
    """A child ended or stayed silent where it should have become ready; the text says where its log is."""


@dataclass(frozen=True)
class Child:
    """One child process and its log."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def last_lines(self) -> str:
        with contextlib.suppress(OSError):
            lines = self.log.read_text(errors="replace").strip().splitlines()
            return "\n".join(lines[-_LOG_TAIL_LINES:])
        return ""


class Processes:
    """A set of children; use it as a context manager so that nothing outlives us."""

    def __init__(self, log_dir: Path) -> None:
        self._log_dir = log_dir
        self._children: list[Child] = []
        log_dir.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    @property
    def children(self) -> tuple[Child, ...]:
        return tuple(self._children)

    def start(self, name: str, command: Sequence[str], *, env: Mapping[str, str] | None = None) -> Child:
        """Start `command` with our environment and `env` on top of it."""
        log = self._log_dir / f"{name}.log"
        with log.open("ab") as out:
            process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
                start_new_session=True,  # Ctrl-C is ours to hand on, in order
            )
        child = Child(name, process, log)
        self._children.append(child)
        return child

    def end(self) -> None:
        """End all children, the last started first; idempotent."""
        while self._children:
            end_child(self._children.pop())


def end_child(child: Child, timeout_s: float = END_TIMEOUT_S) -> None:
    """Ask the child to end, then make it and whatever it started end."""
    family = _family(child.process.pid)
    if child.is_running:
        child.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.process.wait(timeout=timeout_s)
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            if member.pid != child.process.pid:
                member.terminate()
    _, left = psutil.wait_procs(family, timeout=3.0)
    for member in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.process.wait(timeout=timeout_s)


def _family(pid: int) -> list[psutil.Process]:
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def wait_until_ready(child: Child, is_ready: Callable[[], bool], *, timeout_s: float) -> None:
    """Wait for `is_ready`. Raises StartFailed when the child ends first or the time is up."""
    deadline = time.monotonic() + timeout_s
    while not is_ready():
        if not child.is_running:
            raise StartFailed(
                f"{child.name} ended with code {child.process.returncode} while starting; "
                f"its log {child.log} ends with:\n{child.last_lines()}"
            )
        if time.monotonic() > deadline:
            raise StartFailed(f"{child.name} was not ready after {timeout_s:.0f} s; see its log {child.log}")
        time.sleep(_POLL_S)


def answers_http(url: str, token: str | None = None) -> bool:
    """Whether a GET of `url` is answered with 200 now."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
    try:
        with urllib.request.urlopen(request, timeout=2.0) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError, ValueError):
        return False


def free_ports(number: int) -> list[int]:
    """Free loopback ports, distinct; held together while they are looked for."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]
