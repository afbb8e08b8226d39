"""Processes that this one starts, watches and ends: by their ids, in order, leaving none behind.

Knows nothing of what they do. Each gets a session of its own and a mark in its environment; on Linux
whoever still carries the mark when its process has ended is ended as well (Ray's workers leave their
parents' groups).
"""

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

MARK = "GRADLOC_WORKSTATION_MARK"
_POLL_S = 0.05
_LOG_TAIL_CHARACTERS = 300


class StartFailed(RuntimeError):
    """A process ended or did not become ready in time; the text is one line for the user."""


def free_port() -> int:
    """A port of the loopback interface that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Process:
    """One process with its log file. `end` is idempotent."""

    def __init__(self, name: str, command: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> None:
        self.name = name
        self.log = log
        self._mark = secrets.token_hex(12)
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {}), MARK: self._mark},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit code, None while it runs."""
        return self._process.poll()

    def wait_ready(self, ready: Callable[[], bool], *, timeout_s: float) -> None:
        """Return once `ready()`. Raises StartFailed."""
        deadline = time.monotonic() + timeout_s
        while not ready():
            if self.returncode is not None:
                raise StartFailed(f"{self.name} ended at its start (exit code {self.returncode}): {self.last_words()}")
            if time.monotonic() > deadline:
                raise StartFailed(f"{self.name} was not ready within {timeout_s:.0f} s; see {self.log}")
            time.sleep(_POLL_S)

    def wait(self, *, timeout_s: float) -> int | None:
        """Exit code, or None when it still runs after `timeout_s`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout=timeout_s)
        return None

    def last_words(self) -> str:
        """The last line of its log that says something, for an error message."""
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1][-_LOG_TAIL_CHARACTERS:] if lines else "(its log is empty)"

    def kill(self) -> None:
        """End it at once, as a crash would."""
        self._process.kill()
        self._process.wait()

    def end(self, *, grace_s: float = 8.0) -> None:
        """Ask it to end, wait `grace_s`, then end it and whatever it started."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            self.wait(timeout_s=grace_s)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        for pid in _marked(self._mark):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def _marked(mark: str) -> list[int]:
    """Processes whose environment carries the mark; none where there is no /proc."""
    needle = f"{MARK}={mark}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if needle in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM and SIGHUP end the block as Ctrl-C does, so that nothing is left running."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """A second Ctrl-C must not leave half of what is being ended behind. No effect outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
