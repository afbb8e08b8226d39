"""Claim: watching costs a trainer next to nothing, whatever Redis does, and a snapshot stalls it for a copy.

    python benchmarks/overhead.py --json            the run of record; an hour and more on 2 cores
    python benchmarks/overhead.py --json --quick    a tiny policy and few steps: shows that it runs

Two alike policies of 21 M parameters train on the same batches of 1,024 tokens, one of them watched; their steps
alternate in random order, so that whatever else the machine does strikes both. One thread computes.

    step_ratio_median, step_ratio_ci95      watched over plain, median over pairs; bootstrap interval (wall time)
    cpu_ratio_median, cpu_ratio_ci95        the same of CPU time; what our threads use, in either step, is the watched
                                            one's
    publish_share_p50, publish_share_p99    handing a step's message over, as a share of the step
    stall_ratio                             what a snapshot adds to observe(), over what a plain copy of the weights
                                            adds in its place; the writing goes on in the background meanwhile
    memory_growth_bytes                     of a tiny policy's process over the last third of 30,000 steps, Python's own
                                            count; resident_growth_bytes is the operating system's; num_queued: messages
                                            that wait at its beginning and end (4,096 at most; by then it is full where
                                            Redis is away or cannot follow)

Conditions: none (no Redis: the rules judge in the process), up, down (ended in the run), hanging (stopped: accepts,
never answers), slow (200 ms each way).
"""

import argparse
import gc
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from watching.policy import LARGE, QUICK, SMALL, Loop
from watching.redis_states import redis_that

from gradloc_proto import codec, streams
from gradloc_proto.memory_bus import MemoryBus
from gradloc_proto.messages import Limits, LimitsChanged, SnapshotCommitted

CONDITIONS = ("none", "up", "hanging", "down", "slow")
NUM_PAIRS, NUM_WARM_UP = 200, 5
NUM_STEPS_MEMORY = 30_000
NUM_STALLS = 24
NUM_RESAMPLES = 2_000
# glibc gives large blocks back to the system at once, or keeps them, by where small ones happen to lie: that decides
# over thousands of page faults a step in either loop. It keeps them.
ALLOCATOR = {"MALLOC_TRIM_THRESHOLD_": str(1 << 33), "MALLOC_MMAP_THRESHOLD_": str(1 << 32), "MALLOC_TOP_PAD_": "0"}
RUN = "overhead"
SEED = 0  # of the order of steps; a step's number is the seed of its batch


def paired(condition: str, num_pairs: int, *, quick: bool) -> dict[str, Any]:
    """Steps of a watched and a plain loop, interleaved."""
    size = QUICK if quick else LARGE
    order = random.Random(SEED)
    wall: list[float] = []
    cpu: list[float] = []
    shares: list[float] = []
    with redis_that(condition) as (url, switch):
        plain, watched = Loop(size, None), Loop(size, {"run": RUN, "redis": url})
        assert watched.probe is not None
        put_s = _timed_put(watched.probe)
        for pair in range(NUM_WARM_UP + num_pairs):
            if pair == NUM_WARM_UP:
                switch()
            times: dict[bool, tuple[float, float]] = {}
            put_s.clear()
            background_s = -(time.process_time() - time.thread_time())
            for loop in order.sample([plain, watched], 2):
                started, cpu_started = time.perf_counter(), time.thread_time()
                loop.step(pair)
                times[loop is watched] = (time.perf_counter() - started, time.thread_time() - cpu_started)
            background_s += time.process_time() - time.thread_time()
            if pair >= NUM_WARM_UP:
                wall.append(times[True][0] / times[False][0])
                cpu.append((times[True][1] + background_s) / times[False][1])
                shares.append(sum(put_s) / times[False][0])
        watched.probe.close()
    return {
        "step_ratio_median": _rounded(statistics.median(wall)),
        "step_ratio_ci95": _interval(wall),
        "cpu_ratio_median": _rounded(statistics.median(cpu)),
        "cpu_ratio_ci95": _interval(cpu),
        "publish_share_p50": float(f"{statistics.median(shares):.2e}"),
        "publish_share_p99": float(f"{_quantile(shares, 0.99):.2e}"),
        "num_pairs": num_pairs,
        "parameters": plain.num_parameters,
    }


def memory(condition: str, num_steps: int) -> dict[str, Any]:
    """Growth of this process over the last third of many small steps."""
    with redis_that(condition) as (url, switch):
        loop = Loop(SMALL, {"run": RUN, "redis": url})
        switch()
        marks: list[tuple[int, int]] = []
        num_queued: list[int] = []
        tracemalloc.start()
        for step in range(num_steps):
            loop.step(step)
            if step + 1 in (num_steps * 2 // 3, num_steps):
                gc.collect()
                marks.append((tracemalloc.get_traced_memory()[0], _resident_bytes()))
                num_queued.append(_num_queued(loop.probe))
        tracemalloc.stop()
        assert loop.probe is not None
        loop.probe.close()
    (traced, resident), (traced_after, resident_after) = marks
    return {
        "memory_growth_bytes": traced_after - traced,
        "resident_growth_bytes": resident_after - resident,
        "num_queued": num_queued,
    }


def stall(num_stalls: int, *, quick: bool) -> dict[str, Any]:
    """A step that takes a snapshot against one that takes none and a plain copy."""
    with tempfile.TemporaryDirectory() as folder:
        bus = MemoryBus()
        limits = LimitsChanged(run_id=RUN, ts=0.0, step=0, limits=Limits(version=10**6, norm=1e-12))
        bus.append(streams.stream(RUN, "limits"), [codec.encode(limits)], length_max=10)
        watch = {"run": RUN, "bus": bus, "store": f"file://{folder}", "reference_after": None}
        loop = Loop(QUICK if quick else LARGE, watch)
        probe = loop.probe
        assert probe is not None
        while probe._publisher is None or probe._publisher.limits is None:
            time.sleep(0.01)
        writer = probe._writer
        assert writer is not None
        order = random.Random(SEED)
        seconds: dict[str, list[float]] = {"plain": [], "snapshot": [], "copy": []}
        for number in range(num_stalls + 1):
            for kind in order.sample(list(seconds), len(seconds)):
                writer._snapshots_left = 50 if kind == "snapshot" else 0
                loop.copies = kind == "copy"
                loop.step(number)
                loop.copy = None
                writer.close()  # and so all start with the same memory free
                if number:  # the first round warms up
                    seconds[kind].append(loop.observed_s)
        probe.close()
        messages = [codec.decode(entry.data) for entry in bus.read_last(streams.stream(RUN, "steps"), count=1000)]
        num_committed = sum(isinstance(message, SnapshotCommitted) for message in messages)
    plain, taken, copied = (statistics.median(seconds[kind]) for kind in ("plain", "snapshot", "copy"))
    return {
        "stall_ratio": _rounded((taken - plain) / (copied - plain)),
        "num_snapshots": num_committed,
        "stall_ms": round((taken - plain) * 1e3, 2),
        "copy_ms": round((copied - plain) * 1e3, 2),
    }


def _timed_put(probe: Any) -> list[float]:
    """Seconds of each message that is handed over; nothing where there is no bus."""
    found: list[float] = []
    if probe._publisher is None:
        return found
    put = probe._publisher.put

    def timed(message: Any) -> None:
        started = time.perf_counter()
        put(message)
        found.append(time.perf_counter() - started)

    probe._publisher.put = timed
    return found


def _num_queued(probe: Any) -> int:
    return 0 if probe._publisher is None else len(probe._publisher._queue)


def _interval(values: Sequence[float]) -> list[float]:
    """Bootstrap interval of the median, 95 %."""
    resampling = random.Random(1)
    medians = sorted(statistics.median(resampling.choices(values, k=len(values))) for _ in range(NUM_RESAMPLES))
    return [_rounded(medians[int(0.025 * NUM_RESAMPLES)]), _rounded(medians[int(0.975 * NUM_RESAMPLES)])]


def _quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def _rounded(value: float) -> float:
    return round(value, 4)


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    asked = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent, check=False)
    return asked.stdout.strip()


def _in_own_process(arguments: Sequence[str]) -> dict[str, Any]:
    """One measurement in a fresh process: what an earlier one left in memory is not this one's."""
    command = [sys.executable, __file__, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | ALLOCATOR)
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)} failed:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _said(case: dict[str, Any]) -> None:
    sys.stderr.write(json.dumps(case) + "\n")
    sys.stderr.flush()


def measured(conditions: Sequence[str], *, quick: bool) -> dict[str, Any]:
    """Everything, one process a measurement."""
    flags = ["--quick"] if quick else []
    started = time.time()
    snapshot = _in_own_process(["--part", "stall", *flags])
    cases: list[dict[str, Any]] = []
    for condition in conditions:
        timed = _in_own_process(["--part", "paired", "--condition", condition, *flags])
        cases.append({"trainer": "plain", "condition": condition} | timed | snapshot)
        _said(cases[-1])
    for case in cases:  # after all that is timed: what else the machine does changes no count of bytes
        case |= _in_own_process(["--part", "memory", "--condition", case["condition"], *flags])
        _said(case)
    return {
        "cases": cases,
        "commit": _commit(),
        "seed": SEED,
        "torch": torch.__version__,
        "machine": platform.machine(),
        "seconds": round(time.time() - started),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one line for machines at the end")
    parser.add_argument("--quick", action="store_true", help="a tiny policy, few steps")
    parser.add_argument("--condition", choices=CONDITIONS, action="append", help="one or several (default: all)")
    parser.add_argument("--part", choices=["paired", "memory", "stall"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    conditions = options.condition or list(CONDITIONS)
    if options.part == "paired":
        result = paired(conditions[0], 10 if options.quick else NUM_PAIRS, quick=options.quick)
    elif options.part == "memory":
        result = memory(conditions[0], 600 if options.quick else NUM_STEPS_MEMORY)
    elif options.part == "stall":
        result = stall(3 if options.quick else NUM_STALLS, quick=options.quick)
    else:
        result = measured(conditions, quick=options.quick)
    if options.json or options.part:
        sys.stdout.write(json.dumps(result) + "\n")
        return
    for case in result["cases"]:
        sys.stdout.write(
            "{condition:8} step x{step_ratio_median} {step_ratio_ci95}  CPU x{cpu_ratio_median} {cpu_ratio_ci95}  "
            "publish {publish_share_p50:.1e} (p99 {publish_share_p99:.1e})  stall x{stall_ratio}  "
            "grew {memory_growth_bytes} bytes\n".format(**case)
        )


if __name__ == "__main__":
    main()
