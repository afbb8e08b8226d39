"""The whole pipeline as real processes, on loopback ports and in a folder of its own, for faults to strike.

Redis with an append-only file, two detectors, a reporter on SQLite, a channel that speaks Slack's API, trainers.
Ended by pid, whatever happened to them.
"""

import contextlib
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from gradloc.demo.slack import CHANNEL, TOKEN, SlackEndpoint
from gradloc.workstation.processes import free_port
from gradloc_proto import codec, streams
from gradloc_proto.messages import StepObserved

HERE = Path(__file__).parent
NUM_STEPS, RATE = 20_000, 8.0  # more than a schedule lasts: trainers are asked to stop
CHECKPOINT_EVERY = 5  # steps a restarted trainer repeats at most


class Channel(SlackEndpoint):
    """Slack that can be out of order: `broken` answers as a server in trouble does."""

    broken = False

    def answer(self, method: str, arguments: dict[str, Any]) -> dict[str, Any]:
        if self.broken:
            return {"ok": False, "error": "internal_error"}
        return super().answer(method, arguments)

    def incidents(self) -> list[str]:
        """Incident of each message in the channel, as its metadata says."""
        import json

        found = []
        for message in list(self._messages.values()):
            if message.get("thread_ts"):
                continue
            metadata = message.get("metadata") or {}
            metadata = json.loads(metadata) if isinstance(metadata, str) else metadata
            found.append(str((metadata.get("event_payload") or {}).get("incident_id")))
        return found


@dataclass
class Child:
    """One process; `start` again after a kill is a restart with the same command."""

    name: str
    command: list[str]
    folder: Path
    env: dict[str, str] = field(default_factory=dict)
    process: "subprocess.Popen[bytes] | None" = None
    is_down: bool = False  # a fault wants it so

    def start(self) -> None:
        self.is_down = False
        with (self.folder / f"{self.name}.log").open("ab") as log:
            variables = {name: value for name, value in os.environ.items() if not name.startswith(("GRADLOC_", "RAY_"))}
            self.process = subprocess.Popen(
                self.command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=variables | self.env
            )

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def send(self, number: int) -> None:
        if self.process is not None and self.alive:
            self.process.send_signal(number)

    def kill(self) -> None:
        self.is_down = True
        if self.process is not None:
            self.send(signal.SIGCONT)
            self.process.kill()
            self.process.wait(timeout=30)

    def num_files(self) -> int:
        """Open descriptors."""
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir())) if self.process is not None else 0


class World:
    """`with World(folder, seed) as world:` everything runs; afterwards nothing does."""

    def __init__(self, folder: Path, seed: int, num_runs: int = 3) -> None:
        self.folder, self.seed = folder, seed
        self.redis_port, self.reporter_port = free_port(), free_port()
        self.url = f"redis://127.0.0.1:{self.redis_port}/0"
        self.database = folder / "gradloc.sqlite"
        (folder / "redis").mkdir(parents=True)
        self.redis = Child(
            "redis",
            [
                shutil.which("redis-server") or "redis-server", "--port", str(self.redis_port), "--bind", "127.0.0.1",
                "--dir", str(folder / "redis"), "--save", "", "--appendonly", "yes", "--appendfsync", "everysec",
            ],
            folder,
        )  # fmt: skip
        self.detectors = [
            Child(
                f"detector-{n}", [sys.executable, "-m", "gradloc_detector", "--redis", self.url, "--port", "0"], folder
            )
            for n in range(2)
        ]
        self.channel = Channel()
        self.reporter = Child(
            "reporter",
            [
                sys.executable, "-m", "gradloc_reporter", "--redis", self.url, "--database", f"sqlite:///{self.database}",
                "--port", str(self.reporter_port), "--slack-channel", CHANNEL,
                "--slack-base-url", self.channel.base_url,
            ],
            folder,
            {"GRADLOC_SLACK_TOKEN": TOKEN},
        )  # fmt: skip
        self.runs = [f"run-{seed}-{number}" for number in range(num_runs)]
        self.attempts = dict.fromkeys(self.runs, 0)
        self.trainers: dict[str, Child] = {}
        self.num_restarts = 0

    def __enter__(self) -> "World":
        self.channel.__enter__()
        self.redis.start()
        self.wait_for_redis()
        for child in (*self.detectors, self.reporter):
            child.start()
        self.wait_for_services()
        for run in self.runs:
            self.start_trainer(run, 0)
        return self

    def __exit__(self, *_: object) -> None:
        for child in (*self.trainers.values(), self.reporter, *self.detectors, self.redis):
            with contextlib.suppress(Exception):
                child.kill()
        self.channel.__exit__()

    def client(self) -> "redis.Redis[bytes]":
        # Without the client's own patience: a paused Redis must not hold up the schedule.
        return redis.Redis(port=self.redis_port, socket_timeout=2, retry=Retry(NoBackoff(), 0))

    def wait_for_redis(self) -> None:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            with contextlib.suppress(redis.RedisError), self.client() as client:
                client.ping()
                return
            time.sleep(0.05)
        raise AssertionError(f"redis-server did not answer: {(self.folder / 'redis.log').read_text()[-500:]}")

    def wait_for_services(self) -> None:
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline:
            ready = all("detector ready" in (self.folder / f"{one.name}.log").read_text() for one in self.detectors)
            if ready and self.database.exists() and "reporter at" in (self.folder / "reporter.log").read_text():
                return
            time.sleep(0.1)
        raise AssertionError(f"the services did not start; see {self.folder}")

    def supervise(self) -> None:
        """Start again what ended by itself, as an operator's supervisor does: a service may refuse to start without
        Redis."""
        for child in (*self.detectors, self.reporter):
            if not child.alive and not child.is_down:
                self.num_restarts += 1
                child.start()

    def truth_path(self, run: str) -> Path:
        return self.folder / f"{run}.truth"

    def truth(self, run: str) -> list[tuple[int, int, bool]]:
        """(attempt, step, spike) of every step that the trainer made."""
        path = self.truth_path(run)
        lines = path.read_text().splitlines() if path.exists() else []
        rows = [line.split() for line in lines]
        return [(int(row[0]), int(row[1]), row[2] == "1") for row in rows if len(row) == 3]

    def start_trainer(self, run: str, first_step: int) -> None:
        command = [
            sys.executable, str(HERE / "trainer.py"), self.url, run, str(self.attempts[run]), str(first_step),
            str(NUM_STEPS), str(RATE), str(self.seed), str(self.truth_path(run)),
        ]  # fmt: skip
        self.trainers[run] = Child(f"{run}-{self.attempts[run]}", command, self.folder)
        self.trainers[run].start()

    def restart_trainer(self, run: str) -> None:
        """From a checkpoint of a few steps before, as a new attempt."""
        self.trainers[run].kill()
        last = max((step for _, step, _ in self.truth(run)), default=0)
        self.attempts[run] += 1
        self.start_trainer(run, max(0, last + 1 - CHECKPOINT_EVERY))

    def stop_trainers(self) -> None:
        for child in self.trainers.values():
            child.send(signal.SIGTERM)

    def streamed(self, run: str) -> set[tuple[int, int]]:
        """(attempt, step) that Redis holds now."""
        found = set()
        with self.client() as client:
            for _, fields in client.xrange(streams.stream(run, "steps")):
                with contextlib.suppress(Exception):
                    message = codec.decode(fields[b"m"])
                    if isinstance(message, StepObserved) and message.run_id == run:
                        found.add((message.attempt, message.step))
        return found

    def rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        """Rows of the reporter's database."""
        with contextlib.closing(sqlite3.connect(f"file:{self.database}?mode=ro", uri=True, timeout=10)) as connection:
            return connection.execute(query, values).fetchall()
