"""Drivers and replicas as forks of this process: as real to SIGKILL as Ray's actors, at a fraction of their cost."""

import contextlib
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from gradloc.replay import Gradient
from gradloc.snapshot import open_snapshot
from gradloc.team import Answer, Question, answer
from gradloc_localizer.driver import Options, explain, rebuilt

_FORK = multiprocessing.get_context("fork")


def _serve(url: str, options: Options, asked: Connection) -> None:
    policy, batches = rebuilt(open_snapshot(url), options)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the driver has ended
        while True:
            question, gradient = asked.recv()
            asked.send(answer(policy, batches, question, gradient))


class ForkedReplicas:
    """What `ray_replicas.RayReplicas` is, over pipes. One that dies is replaced."""

    def __init__(self, url: str, options: Options, num: int, pids: Path) -> None:
        self._start_one = lambda: self._started(url, options)
        self._pids = pids
        self._known: list[BaseProcess] = []
        self._idle: list[tuple[BaseProcess, Connection]] = []
        self._busy: dict[Connection, tuple[BaseProcess, int]] = {}
        for _ in range(num):
            self._start_one()

    def offer(self, number: int, question: Question, gradient: Gradient | None) -> bool:
        while self._idle:
            process, pipe = self._idle.pop()
            try:
                pipe.send((question, gradient))
            except OSError:
                self._start_one()
                continue
            self._busy[pipe] = (process, number)
            return True
        return False

    def collect(self, *, wait: bool) -> list[tuple[int, Answer | None]]:
        found: list[tuple[int, Answer | None]] = []
        for pipe in _ready(list(self._busy), wait):
            process, number = self._busy.pop(pipe)
            try:
                found.append((number, pipe.recv()))
                self._idle.append((process, pipe))
            except (EOFError, OSError):
                found.append((number, None))
                self._start_one()
        return found

    def close(self) -> None:
        for process in self._known:
            process.kill()
            process.join()

    def _started(self, url: str, options: Options) -> None:
        mine, theirs = _FORK.Pipe()
        process = _FORK.Process(target=_serve, args=(url, options, theirs), daemon=True)
        process.start()
        theirs.close()
        self._known.append(process)
        self._idle.append((process, mine))
        part = self._pids.with_suffix(".part")
        part.write_text(json.dumps([one.pid for one in self._known if one.is_alive()]))
        part.rename(self._pids)


def _ready(pipes: list[Connection], waits: bool) -> list[Connection]:
    return [pipe for pipe in wait(pipes, timeout=None if waits else 0) if isinstance(pipe, Connection)]


class Forked:
    """Starts drivers. Imports are this process's, so a driver costs what its localization costs."""

    def __init__(self, folder: Path, snapshot: str) -> None:
        torch.set_num_threads(1)  # before any pool of threads is there: forks do not inherit them
        self._folder, self._snapshot = folder, snapshot
        self._count = 0

    def driver(self, probes: Path, num_replicas: int) -> "ForkedDriver":
        self._count += 1
        return ForkedDriver(self._snapshot, probes, num_replicas, self._folder / f"driver-{self._count}")

    def close(self) -> None:
        return


class ForkedDriver:
    def __init__(self, snapshot: str, probes: Path, num_replicas: int, out: Path) -> None:
        self._out, self._pids = out, out.with_suffix(".pids")
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                os.setsid()
                options = Options(device="cpu", num_threads=1, num_replicas=num_replicas, probes=probes.as_uri())

                @contextlib.contextmanager
                def replicas(url: str, options: Options) -> Iterator[ForkedReplicas]:
                    made = ForkedReplicas(url, options, options.num_replicas - 1, self._pids)
                    try:
                        yield made
                    finally:
                        made.close()

                _, finding = explain(snapshot, options, replicas=replicas)
                out.write_text(finding.model_dump_json(exclude={"cost"}))
                code = 0
            except BaseException:  # noqa: BLE001 - a fork must not come back into its parent's code
                traceback.print_exc()
            finally:
                os._exit(code)

    def alive(self) -> bool:
        if self.pid and os.waitpid(self.pid, os.WNOHANG) == (0, 0):
            return True
        self.pid = 0
        return False

    def actors(self) -> list[int]:
        return list(json.loads(self._pids.read_text())) if self._pids.exists() else []

    def kill(self) -> None:
        """And after it its replicas, which Ray ends with their driver."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.pid = 0

    def finding(self) -> dict[str, Any]:
        while self.alive():
            time.sleep(0.01)
        assert self._out.exists(), "the driver ended without a finding"
        found: dict[str, Any] = json.loads(self._out.read_text())
        return found
