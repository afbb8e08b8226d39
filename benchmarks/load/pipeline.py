"""Detector and reporter as processes before a Redis that many runs write to, watched from outside.

From a spike's XADD to the moment when its incident can be read from the incident stream, and from the reporter's
database, where it outlives everything: the durable alert. Numbers of processes come from /proc.
"""

import contextlib
import json
import os
import sqlite3
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis
from load.events import Events
from load.fleet import DRAIN_TIMEOUT_S, WARM_UP_STEPS, Detector, Fleet, drained, quantiles, running_detector

from gradloc_proto import streams

SPIKES_PER_S = 4.0
LOOK_EVERY_S = 0.01
SPIKE_TIMEOUT_S = 30.0


@dataclass
class ReporterProcess(Detector):
    """A reporter as users start it, on SQLite."""

    database: Path

    def lag_s(self) -> float:
        """Seconds since it last knew that it had read everything, by its own word."""
        return self._sample("gradloc_reporter_lag_seconds")

    def num_read(self) -> int:
        return int(self._sample('gradloc_messages_read_total{stream="steps"}'))

    def _sample(self, name: str) -> float:
        text = urllib.request.urlopen(self.metrics_url, timeout=60).read().decode()
        return next((float(line.split()[-1]) for line in text.splitlines() if line.startswith(name + " ")), 0.0)


@contextlib.contextmanager
def running_reporter(url: str, folder: Path) -> Iterator[ReporterProcess]:
    database = folder / "reporter.sqlite"
    command = [sys.executable, "-m", "gradloc_reporter", "--redis", url, "--database", f"sqlite:///{database}"]
    process = subprocess.Popen([*command, "--port", "0"], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        line = next(line for line in process.stderr if "reporter at" in line)
        threading.Thread(target=lambda: [None for _ in process.stderr or ()], daemon=True).start()
        yield ReporterProcess(process, line.split("reporter at ")[1].split()[0].rstrip(";") + "/metrics", database)
    finally:
        process.terminate()
        process.wait(timeout=60)


@dataclass
class Spikes:
    """Asks for spikes, one run after the other, and times when each can be read: from the stream, from the database."""

    fleet: Fleet
    client: "redis.Redis[bytes]"
    database: Path
    in_stream_s: list[float] = field(default_factory=list)
    durable_s: list[float] = field(default_factory=list)
    num_unseen: int = 0

    def run(self, until: float) -> None:
        waiting: dict[str, set[str]] = {}
        next_at, number = time.monotonic(), 0
        with contextlib.closing(sqlite3.connect(f"file:{self.database}?mode=ro", uri=True, timeout=10)) as rows:
            while time.monotonic() < until or (waiting and time.monotonic() < until + SPIKE_TIMEOUT_S):
                now = time.monotonic()
                if next_at <= now < until:
                    # Far apart, so that each spike is an incident of its own.
                    run = self.fleet.runs[number % len(self.fleet.runs)]
                    number += 1
                    next_at += 1 / SPIKES_PER_S
                    if run not in waiting:
                        self.fleet.spike_wanted.add(run)
                        waiting[run] = {"stream", "database"}
                self._look(waiting, rows)
                time.sleep(LOOK_EVERY_S)
        self.num_unseen += len(waiting)

    def _look(self, waiting: dict[str, set[str]], rows: sqlite3.Connection) -> None:
        for run, left in list(waiting.items()):
            sent_at, step = self.fleet.spike_sent_at.get(run), self.fleet.spike_step.get(run)
            if sent_at is None or step is None:
                continue
            if "stream" in left and any(self._names(run, step)):
                self.in_stream_s.append(time.monotonic() - sent_at)
                left.discard("stream")
            query = "SELECT 1 FROM spikes WHERE run_id = ? AND step = ?"
            if "database" in left and rows.execute(query, (run, step)).fetchone():
                self.durable_s.append(time.monotonic() - sent_at)
                left.discard("database")
            if not left:
                del waiting[run]
                self.fleet.spike_sent_at.pop(run), self.fleet.spike_step.pop(run)

    def _names(self, run: str, step: int) -> Iterator[bool]:
        for _, parts in self.client.xrevrange(streams.stream(run, "incidents"), count=4):
            message = json.loads(parts[b"m"])
            yield message.get("spike", {}).get("step") == step


def measure(url: str, folder: Path, *, num_runs: int, rates: list[float], seconds: float, seed: int) -> dict[str, Any]:
    """A staircase of rates, each for `seconds`, until one is not kept up with."""
    with (
        redis.Redis.from_url(url) as client,
        running_detector(url, pinned=False) as detector,
        running_reporter(url, folder) as reporter,
    ):
        time.sleep(1.0)
        before = {"detector": detector.memory_bytes(), "reporter": reporter.memory_bytes()}
        fleet = Fleet(client, Events(seed), [f"run-{number:04d}" for number in range(num_runs)])
        fleet.start(WARM_UP_STEPS)
        warm_up_s = drained(detector, fleet) + _caught_up(reporter, fleet)
        stairs = []
        for rate in rates:
            stairs.append(_stair(client, fleet, detector, reporter, rate, seconds))
            if not stairs[-1]["keeps_up"]:
                break
        drained(detector, fleet)
        _caught_up(reporter, fleet)
        after = {"detector": detector.memory_bytes(), "reporter": reporter.memory_bytes()}
        return {
            "num_runs": num_runs,
            "num_layers": 64,
            "event_bytes": fleet.events.num_bytes,
            "warm_up_s": round(warm_up_s, 1),
            "stairs": stairs,
            "knee_steps_per_s": max((row["published_per_s"] for row in stairs if row["keeps_up"]), default=None),
            "gives_first": _gives_first(stairs[-1]) if not stairs[-1]["keeps_up"] else None,
            "memory_per_run_bytes": {name: round((after[name] - before[name]) / num_runs) for name in after},
            "database_bytes_per_step": round(_size(reporter.database) / fleet.num_published),
        }


def _stair(
    client: "redis.Redis[bytes]",
    fleet: Fleet,
    detector: Detector,
    reporter: ReporterProcess,
    rate: float,
    seconds: float,
) -> dict[str, Any]:
    spikes = Spikes(fleet, client, reporter.database)
    redis_pid = int(client.info("server")["process_id"])
    until = time.monotonic() + seconds
    threads = [
        threading.Thread(target=fleet.publish, args=(len(fleet.runs) * rate, until)),
        threading.Thread(target=spikes.run, args=(until - 1.0,)),
    ]
    watched = {
        "detector": detector.process.pid,
        "reporter": reporter.process.pid,
        "redis": redis_pid,
        "load": os.getpid(),
    }
    cpu = {name: _cpu_s(pid) for name, pid in watched.items()}
    began, published = time.monotonic(), fleet.num_published
    bytes_before = int(client.info("memory")["used_memory"])
    for thread in threads:
        thread.start()
    waiting: list[dict[str, float]] = []
    while time.monotonic() < until:
        time.sleep(1.0)
        waiting.append({"detector": fleet.num_published - detector.num_folded(), "reporter_lag_s": reporter.lag_s()})
    wall_s = time.monotonic() - began
    cores = {name: round((_cpu_s(pid) - cpu[name]) / wall_s, 3) for name, pid in watched.items()}
    for thread in threads:
        thread.join()
    reached = (fleet.num_published - published) / wall_s
    later = waiting[len(waiting) // 2 :]
    backlog = [row["detector"] for row in later]
    lag_s = [row["reporter_lag_s"] for row in later]
    return {
        "steps_per_s_and_run": rate,
        "wanted_per_s": round(rate * len(fleet.runs)),
        "published_per_s": round(reached),
        "detector_backlog_mean": round(statistics.mean(backlog)),
        "detector_backlog_max": max(backlog),
        "reporter_lag_max_s": round(max(lag_s), 2),
        "cores": cores,
        "spikes": len(spikes.durable_s),
        "spikes_unseen": spikes.num_unseen,
        "spike_to_stream_s": quantiles(spikes.in_stream_s),
        "spike_to_durable_s": quantiles(spikes.durable_s),
        "redis_bytes": int(client.info("memory")["used_memory"]),
        "redis_bytes_per_step": round(
            (int(client.info("memory")["used_memory"]) - bytes_before) / max(1, reached * wall_s)
        ),
        "memory_bytes": {"detector": detector.memory_bytes(), "reporter": reporter.memory_bytes()},
        # The publisher keeps its pace, a step waits less than two seconds, and nobody falls behind.
        "holds": {
            "load": reached > 0.95 * rate * len(fleet.runs),
            "detector": statistics.mean(backlog) < 2 * reached,
            "reporter": max(lag_s) < 5.0,
        },
        "keeps_up": reached > 0.95 * rate * len(fleet.runs)
        and statistics.mean(backlog) < 2 * reached
        and max(lag_s) < 5.0
        and spikes.num_unseen == 0,
    }


def _gives_first(stair: dict[str, Any]) -> str:
    """Who does not hold on the first stair that is too high; all cores used is a reason of its own."""
    broken = [name for name, holds in stair["holds"].items() if not holds]
    used = sum(stair["cores"].values())
    return f"{', '.join(broken) or 'alerts'} ({used:.2f} of {os.cpu_count()} cores used)"


def _caught_up(reporter: ReporterProcess, fleet: Fleet) -> float:
    """Seconds until the reporter has read all that was published."""
    began = time.monotonic()
    while reporter.num_read() < fleet.num_published:
        if time.monotonic() > began + DRAIN_TIMEOUT_S:
            raise SystemExit("the reporter did not read what was published within ten minutes")
        time.sleep(0.2)
    return time.monotonic() - began


def _cpu_s(pid: int) -> float:
    parts = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(parts[11]) + int(parts[12])) / os.sysconf("SC_CLK_TCK")


def _size(database: Path) -> int:
    return sum(path.stat().st_size for path in database.parent.glob(database.name + "*"))
