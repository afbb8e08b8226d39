"""The whole pipeline as real processes, on loopback ports and in a folder of its own, for faults to strike.

Redis with an append-only file, two detectors, a reporter on SQLite, a channel that speaks Slack's API, trainers. Where
the system allows it, one detector and one trainer live behind wires that can be cut, and each has a clock that can be
set. Ended by pid, whatever happened to them. Ray, a store and trainers that write snapshots: localizing.py.
"""

import contextlib
import json
import shutil
import signal
import sqlite3
import sys
import time
from pathlib import Path
from typing import Any

import redis
from child import Child, marked
from clock import Clocks
from network import Network
from redis.backoff import NoBackoff
from redis.retry import Retry

from gradloc.demo.slack import CHANNEL, TOKEN, SlackEndpoint
from gradloc.workstation.processes import free_port
from gradloc_proto import codec, streams
from gradloc_proto.messages import StepObserved

HERE = Path(__file__).parent
NUM_STEPS, RATE = 1_000_000, 8.0  # more than a schedule lasts: trainers are asked to stop
START_TIMEOUT_S = 300.0  # of services and trainers, on a machine that has other things to do
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
        found = []
        for message in list(self._messages.values()):
            if message.get("thread_ts"):
                continue
            metadata = message.get("metadata") or {}
            metadata = json.loads(metadata) if isinstance(metadata, str) else metadata
            found.append(str((metadata.get("event_payload") or {}).get("incident_id")))
        return found


class World:
    """`with World(folder, seed) as world:` everything runs; afterwards nothing does."""

    num_runs = 3
    rate = RATE
    spike_every = 45.0
    far = ("detector", "trainer")  # what lives behind a wire: the first detector, the first run's trainer

    def __init__(self, folder: Path, seed: int) -> None:
        folder.mkdir(parents=True)
        self.folder, self.seed = folder, seed
        self.redis_port = free_port()
        self.network = Network(self.far)
        self.clocks = Clocks(folder)
        self.database = folder / "gradloc.sqlite"
        self.redis_folder = folder / "redis"
        self.num_redis = 0
        self.channel = Channel()
        self.runs = [f"run-{seed}-{number}" for number in range(self.num_runs)]
        self.attempts = dict.fromkeys(self.runs, 0)
        self.trainers: dict[str, Child] = {}
        self.num_restarts = 0
        self.leaked: list[int] = []

    # --- life ---

    def __enter__(self) -> "World":
        self.network.__enter__()
        self.channel.__enter__()
        try:
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def start(self) -> None:
        self.redis = self.new_redis(self.redis_folder, self.redis_port)
        self.redis.start()
        self.wait_for_redis()
        self.detectors = [self._detector(number) for number in range(2)]
        self.reporter = self._reporter()
        for child in (*self.detectors, self.reporter):
            child.start()
        self.wait_for_services()
        for run in self.runs:
            self.start_trainer(run, 0)
        self.wait_for_trainers()

    def __exit__(self, *_: object) -> None:
        for child in (*self.trainers.values(), *self.services(), getattr(self, "redis", None)):
            with contextlib.suppress(Exception):
                if child is not None:
                    child.kill()
        self.channel.__exit__()
        self.network.__exit__()
        self.leaked = marked(self.folder)

    def services(self) -> list[Child]:
        return [*getattr(self, "detectors", []), *([self.reporter] if hasattr(self, "reporter") else [])]

    # --- who lives here ---

    def url(self, place: str = "") -> str:
        """Redis as the process in `place` finds it."""
        return f"redis://{self.network.address(place)}:{self.redis_port}/0"

    def new_redis(self, folder: Path, port: int, *options: str) -> Child:
        folder.mkdir(parents=True, exist_ok=True)
        command = [
            shutil.which("redis-server") or "redis-server", "--port", str(port), "--dir", str(folder), "--save", "",
            "--bind", "127.0.0.1", *self.network.addresses, "--protected-mode", "no", "--appendonly", "yes",
            "--appendfsync", "everysec", *options,
        ]  # fmt: skip
        name = f"redis-{self.num_redis}"
        self.num_redis += 1
        return Child(name, command, self.folder, self.clocks.env("redis"))

    def _detector(self, number: int) -> Child:
        place = "detector" if number == 0 else ""
        command = [sys.executable, "-m", "gradloc_detector", "--redis", self.url(place), "--port", "0"]
        name = f"detector-{number}"
        return Child(
            name, [*command, *self.detector_options()], self.folder, self.clocks.env(name) | self.detector_env(),
            self.network.prefix(place),
        )  # fmt: skip

    def detector_options(self) -> list[str]:
        return []

    def detector_env(self) -> dict[str, str]:
        return {}

    def _reporter(self) -> Child:
        command = [
            sys.executable, "-m", "gradloc_reporter", "--redis", self.url(), "--database", f"sqlite:///{self.database}",
            "--port", "0", "--slack-channel", CHANNEL, "--slack-base-url", self.channel.base_url,
        ]  # fmt: skip
        return Child("reporter", command, self.folder, self.clocks.env("reporter") | {"GRADLOC_SLACK_TOKEN": TOKEN})

    def trainer_command(self, run: str, first_step: int) -> list[str]:
        return [
            sys.executable, str(HERE / "trainer.py"), self.url(self._place(run)), run, str(self.attempts[run]),
            str(first_step), str(NUM_STEPS), str(self.rate), str(self.seed), str(self.truth_path(run)),
            str(self.spike_every),
        ]  # fmt: skip

    def trainer_env(self) -> dict[str, str]:
        return {}

    def start_trainer(self, run: str, first_step: int) -> None:
        child = Child(
            f"{run}-{self.attempts[run]}", self.trainer_command(run, first_step), self.folder,
            self.clocks.env("trainer") | self.trainer_env(), self.network.prefix(self._place(run)),
        )  # fmt: skip
        self.trainers[run] = child
        child.start()

    def _place(self, run: str) -> str:
        return "trainer" if run == self.runs[0] else ""

    def restart_trainer(self, run: str) -> None:
        """From a checkpoint of a few steps before, as a new attempt."""
        self.trainers[run].kill()
        last = max((step for _, step, _ in self.truth(run)), default=0)
        self.attempts[run] += 1
        self.start_trainer(run, max(0, last + 1 - CHECKPOINT_EVERY))

    def stop_trainers(self) -> None:
        for child in self.trainers.values():
            child.send(signal.SIGTERM)

    # --- waiting and supervising ---

    def client(self, port: int | None = None) -> "redis.Redis[bytes]":
        # Without the client's own patience: a paused Redis must not hold up the schedule.
        return redis.Redis(port=port or self.redis_port, socket_timeout=2, retry=Retry(NoBackoff(), 0))

    def wait_for_redis(self, port: int | None = None) -> None:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            with contextlib.suppress(redis.RedisError), self.client(port) as client:
                client.ping()
                return
            time.sleep(0.05)
        raise AssertionError(f"redis-server did not answer: {self.redis.log.read_text()[-500:]}")

    def wait_for_services(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            self.supervise()
            ready = all("detector ready" in one.log.read_text() for one in self.detectors)
            if ready and self.database.exists() and "reporter at" in self.reporter.log.read_text():
                return
            time.sleep(0.1)
        raise AssertionError(f"the services did not start; see {self.folder}")

    def wait_for_trainers(self) -> None:
        """Until each has made steps: a schedule's moments count from there, however long a busy machine took."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while any(len(self.truth(run)) < CHECKPOINT_EVERY for run in self.runs):
            assert time.monotonic() < deadline, f"the trainers did not start; see {self.folder}"
            time.sleep(0.1)

    def supervise(self) -> None:
        """Start again what ended by itself, as an operator's supervisor does: a service may refuse to start without
        Redis."""
        for child in self.services():
            if not child.alive and not child.is_down:
                self.num_restarts += 1
                child.start()

    def is_well(self) -> bool:
        """Whether all that a fault may have taken answers again; from then on the promise's minute runs."""
        return True

    # --- looking ---

    def truth_path(self, run: str) -> Path:
        return self.folder / f"{run}.truth"

    def truth(self, run: str) -> list[tuple[int, int, bool]]:
        """(attempt, step, spike) of every step that the trainer made."""
        path = self.truth_path(run)
        lines = path.read_text().splitlines() if path.exists() else []
        rows = [line.split() for line in lines]
        return [(int(row[0]), int(row[1]), row[2] == "1") for row in rows if len(row) == 3]

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

    def num_connections(self) -> int:
        """To Redis, of everybody but us."""
        with self.client() as client:
            return int(client.info("clients")["connected_clients"]) - 1

    def usage(self) -> dict[str, tuple[int, int]]:
        """Descriptors and threads of each service that runs."""
        return {child.name: (child.num_files(), child.num_threads()) for child in self.services() if child.alive}
