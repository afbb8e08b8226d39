"""A thousand runs that publish at a steady rate to one detector process, which is watched from outside."""

import os
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import redis
from load.events import Events

from gradloc_proto import streams

WARM_UP_STEPS = 96
PUBLISH_EVERY_S = 0.05
SPIKE_TIMEOUT_S = 30.0
DRAIN_TIMEOUT_S = 600.0
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Detector:
    """A detector as users start it. Numbers of the process come from /proc."""

    process: "subprocess.Popen[str]"
    metrics_url: str

    def num_folded(self) -> int:
        """Steps folded so far, by the detector's own count."""
        text = urllib.request.urlopen(self.metrics_url, timeout=30).read().decode()
        for line in text.splitlines():
            if line.startswith('gradloc_detector_messages_total{stream="steps"}'):
                return int(float(line.split()[-1]))
        return 0

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS

    def memory_bytes(self) -> int:
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        line = next(line for line in lines if line.startswith("VmRSS"))
        return int(line.split()[1]) * 1024


@contextmanager
def running_detector(url: str, *, pinned: bool = True) -> Iterator[Detector]:
    """One detector, on one core where the system can pin it and it is wanted so."""
    command = [sys.executable, "-m", "gradloc_detector", "--redis", url, "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        line = next(line for line in process.stderr if "metrics on" in line)
        if pinned and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(process.pid, {max(os.sched_getaffinity(0))})
        # Its later lines must not fill the pipe.
        threading.Thread(target=lambda: [None for _ in process.stderr], daemon=True).start()
        yield Detector(process, line.split("metrics on ")[1].split(";")[0].strip())
    finally:
        process.terminate()
        process.wait(timeout=60)


@dataclass
class Fleet:
    """Publishes the steps of `runs`; `spike_wanted` makes a run's next step a spike and notes when it went out."""

    client: "redis.Redis[bytes]"
    events: Events
    runs: list[str]
    numbers: dict[str, int] = field(default_factory=dict)
    spike_wanted: set[str] = field(default_factory=set)
    spike_sent_at: dict[str, float] = field(default_factory=dict)
    spike_step: dict[str, int] = field(default_factory=dict)
    num_published: int = 0

    def start(self, num_steps: int) -> None:
        """Announce all runs, with `num_steps` healthy steps each."""
        for start in range(0, len(self.runs), 100):
            with self.client.pipeline(transaction=False) as pipeline:
                for run in self.runs[start : start + 100]:
                    pipeline.xadd(streams.REGISTRY, {"m": self.events.started(run)})
                    for number in range(num_steps):
                        self._add(pipeline, run, number)
                pipeline.execute()

    def publish(self, rate: float, until: float) -> None:
        """`rate` steps a second over all runs, run after run, until that moment of the monotonic clock."""
        began, num_done = time.monotonic(), 0
        while (now := time.monotonic()) < until:
            num_due = int((now - began) * rate)
            spikes = []
            with self.client.pipeline(transaction=False) as pipeline:
                for index in range(num_done, num_due):
                    run = self.runs[index % len(self.runs)]
                    is_spike = run in self.spike_wanted
                    self._add(pipeline, run, self.numbers[run] + 1, is_spike=is_spike)
                    if is_spike:
                        self.spike_wanted.discard(run)
                        self.spike_step[run] = self.numbers[run]
                        spikes.append(run)
                sent_at = time.monotonic()
                pipeline.execute()
            for run in spikes:
                self.spike_sent_at[run] = sent_at
            num_done = num_due
            time.sleep(max(0.0, PUBLISH_EVERY_S - (time.monotonic() - now)))

    def _add(self, pipeline: "redis.client.Pipeline[bytes]", run: str, number: int, *, is_spike: bool = False) -> None:
        shape = number + int(run[-4:])
        data = self.events.step(run, number, time.time(), is_spike=is_spike, shape=shape)
        length_max = streams.STREAM_LENGTH_MAX["steps"]
        pipeline.xadd(streams.stream(run, "steps"), {"m": data}, maxlen=length_max, approximate=True)
        self.numbers[run] = number
        self.num_published += 1


def spike_latencies(url: str, fleet: Fleet, until: float) -> list[float]:
    """Seconds from a spike's XADD to the moment its incident can be read, one spike after the other."""
    latencies = []
    with redis.Redis.from_url(url) as client:
        for run in fleet.runs:
            if time.monotonic() > until:
                break
            key = streams.stream(run, "incidents")
            fleet.spike_wanted.add(run)
            asked_at = time.monotonic()
            # In slices: the client gives up a call that lasts long.
            while not (found := client.xread({key: "0-0"}, block=1_000)):
                if time.monotonic() > asked_at + SPIKE_TIMEOUT_S:
                    break
            if found:
                arrived_at = time.monotonic()
                while run not in fleet.spike_sent_at:  # the publisher notes it right after
                    time.sleep(0.001)
                latencies.append(max(0.0, arrived_at - fleet.spike_sent_at[run]))
    return latencies


def drained(detector: Detector, fleet: Fleet) -> float:
    """Seconds until everything published so far is folded."""
    began = time.monotonic()
    while detector.num_folded() < fleet.num_published:
        if time.monotonic() > began + DRAIN_TIMEOUT_S:
            raise SystemExit("the detector did not fold what was published within ten minutes")
        time.sleep(0.1)
    return time.monotonic() - began


def measure(url: str, *, num_runs: int, steps_per_s: float, seconds: float, seed: int) -> dict[str, object]:
    """Live load: backlog, latency, memory, sizes."""
    events = Events(seed)
    with redis.Redis.from_url(url) as client, running_detector(url) as detector:
        time.sleep(1.0)
        memory_before = detector.memory_bytes()
        fleet = Fleet(client, events, [f"run-{number:04d}" for number in range(num_runs)])
        fleet.start(WARM_UP_STEPS)
        warm_up_s = drained(detector, fleet)
        until = time.monotonic() + seconds
        latencies: list[float] = []
        threads = [
            threading.Thread(target=fleet.publish, args=(num_runs * steps_per_s, until)),
            threading.Thread(target=lambda: latencies.extend(spike_latencies(url, fleet, until - 1.0))),
        ]
        cpu_before, began, published_before = detector.cpu_s(), time.monotonic(), fleet.num_published
        for thread in threads:
            thread.start()
        backlogs = []
        while time.monotonic() < until:
            time.sleep(1.0)
            backlogs.append(max(0, fleet.num_published - detector.num_folded()))
        for thread in threads:
            thread.join()
        wall_s = time.monotonic() - began
        cpu_share = (detector.cpu_s() - cpu_before) / wall_s
        rate = (fleet.num_published - published_before) / wall_s
        drain_s = drained(detector, fleet)
        memory = detector.memory_bytes() - memory_before
        sizes = _sizes(client, fleet.runs, events)
    later = backlogs[len(backlogs) // 2 :]
    # In steady state a step waits for its run's turn: under two seconds' worth, and no growth.
    keeps_up = max(later) < 2 * rate and statistics.mean(later[len(later) // 2 :]) < 1.5 * rate
    return {
        "num_runs": num_runs,
        "steps_per_s_and_run": steps_per_s,
        "seconds": seconds,
        "published_per_s": round(rate),
        "keeps_up": keeps_up,
        "cores_used": round(cpu_share, 3),
        "backlog_events_mean": round(statistics.mean(later)),
        "backlog_events_max": max(later),
        "drain_s": round(drain_s, 2),
        "warm_up_s": round(warm_up_s, 1),
        "num_spikes": len(latencies),
        "spike_to_stream_s": quantiles(latencies),
        "memory_per_run_bytes": round(memory / num_runs),
        **sizes,
    }


def quantiles(values: list[float]) -> dict[str, float]:
    if len(values) < 2:
        return {}
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {
        "p50": round(cuts[49], 3),
        "p95": round(cuts[94], 3),
        "p99": round(cuts[98], 3),
        "max": round(max(values), 3),
    }


def _sizes(client: "redis.Redis[bytes]", runs: list[str], events: Events) -> dict[str, object]:
    """What the runs' keys hold in Redis: the largest state, and each stream beside its bound."""
    states = [int(client.strlen(streams.state(run))) for run in runs]
    lengths = {name: max(int(client.xlen(streams.stream(run, name))) for run in runs) for name in streams.STREAM_NAMES}
    return {"state_bytes_max": max(states), "event_bytes": events.num_bytes, "stream_lengths_max": lengths}
