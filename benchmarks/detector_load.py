"""Claim: one core of detector keeps up with 1,000 runs of 2 steps a second, at a quarter of a bare loop's speed.

Starts its own redis-server without persistence. Three parts: a backlog folded and committed beside a bare
loop over the same events (redis-py with hiredis, XREAD of 256, orjson; by turns, best of the rounds); a
thousand live runs before one detector process pinned to one core (backlog, spike to incident stream, memory,
size of states); and streams written past their bounds. Times are wall-clock unless they say core. Wants a
machine with two idle cores: Redis and the publisher take one.
"""

import argparse
import json
import sys
from collections.abc import Sequence

import redis
from bus_throughput import connected, own_redis
from detection.provenance import commit
from load import fleet, throughput
from load.events import Events

from gradloc_proto import streams
from gradloc_proto.redis_bus import RedisBus

SEED = 0
NUM_OVER = 2_000  # entries written past a bound


def bounds(url: str, seed: int, names: Sequence[streams.StreamName]) -> list[dict[str, object]]:
    """Each stream of a run filled past its bound with steps: its bytes in Redis over bound x bytes of an event."""
    events, bus = Events(seed), RedisBus(url)
    rows = []
    with redis.Redis.from_url(url) as client:
        for name in names:
            key, length_max = streams.stream("bounds-0000", name), streams.STREAM_LENGTH_MAX[name]
            num_written = length_max + NUM_OVER
            for start in range(0, num_written, 500):
                data = [events.step("bounds-0000", number, 1.0) for number in range(start, start + 500)]
                bus.append(key, data, length_max=length_max)
            rows.append(
                {
                    "stream": name,
                    "length_max": length_max,
                    "length": bus.length(key),
                    "bytes_over_bound": round(client.memory_usage(key, samples=0) / (length_max * events.num_bytes), 3),
                }
            )
            client.delete(key)
    bus.close()
    return rows


def measure(options: argparse.Namespace) -> dict[str, object]:
    with own_redis() as url:
        connected(url).close()
        fast = throughput.measure(url, num_steps=options.steps, num_rounds=options.rounds, seed=SEED)
    with own_redis() as url:
        connected(url).close()
        live = fleet.measure(url, num_runs=options.runs, steps_per_s=options.rate, seconds=options.seconds, seed=SEED)
    with own_redis() as url:
        connected(url).close()
        bounded = bounds(url, SEED, ("limits", "findings") if options.quick else streams.STREAM_NAMES)
    return {
        "benchmark": "detector_load",
        "seed": SEED,
        "commit": commit(),
        "num_layers": 64,
        "throughput": fast,
        "live": live,
        "bounds": bounded,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6_000, metavar="N", help="steps of each run of the backlog")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="rounds of which the best counts")
    parser.add_argument("--runs", type=int, default=1_000, metavar="N", help="live runs")
    parser.add_argument("--rate", type=float, default=2.0, metavar="R", help="steps a second and live run")
    parser.add_argument("--seconds", type=float, default=60.0, metavar="S", help="how long they live")
    parser.add_argument("--quick", action="store_true", help="small, to see that it runs: its figures mean nothing")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    options = parser.parse_args()
    if options.quick:
        options.steps, options.rounds, options.runs, options.seconds = 400, 1, 8, 2.0
    result = measure(options)
    sys.stdout.write((json.dumps(result) if options.json else json.dumps(result, indent=2)) + "\n")


if __name__ == "__main__":
    main()
