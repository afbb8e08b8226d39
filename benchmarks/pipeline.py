"""Claim: two cores carry 1,000 runs of a step a second, 64 layers each: a spike's alert is durable within a second.

Redis (append-only file, synced every second), detector and reporter (SQLite) as processes, and a publisher, all on
this machine. Rates rise stair by stair until one is not kept up with: the knee. Durable: the incident is in the
reporter's database. Times are wall-clock from the spike's XADD. Wants a machine with nothing else to do.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

from bus_throughput import connected, own_redis
from detection.provenance import commit
from load import pipeline

SEED = 0
RATES = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)


def measure(options: argparse.Namespace) -> dict[str, object]:
    rates = [rate for rate in RATES if rate >= 1.0][: 1 if options.quick else None]
    with own_redis("--appendonly", "yes", "--appendfsync", "everysec") as url, tempfile.TemporaryDirectory() as folder:
        connected(url).close()
        result = pipeline.measure(
            url, Path(folder), num_runs=options.runs, rates=rates, seconds=options.seconds, seed=SEED
        )
    return {
        "benchmark": "pipeline",
        "seed": SEED,
        "commit": commit(),
        "quick": options.quick,
        "num_cores": os.cpu_count(),
        "load_average_at_start": options.load,
        **result,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1_000, metavar="N")
    parser.add_argument("--seconds", type=float, default=30.0, metavar="S", help="of each rate")
    parser.add_argument("--quick", action="store_true", help="small, to see that it runs: its figures mean nothing")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    options.load = round(os.getloadavg()[0], 1)
    if options.quick:
        options.runs, options.seconds = 8, 6.0
    result = measure(options)
    if options.json:
        sys.stdout.write(json.dumps(result) + "\n")
        return
    for row in result["stairs"]:  # type: ignore[attr-defined]
        latency = row["spike_to_durable_s"]
        sys.stdout.write(
            f"{row['published_per_s']:>6,} steps/s: alert durable in {latency.get('p50')} s, "
            f"p99 {latency.get('p99')} s; cores {row['cores']}; {'keeps up' if row['keeps_up'] else 'falls behind'}\n"
        )


if __name__ == "__main__":
    main()
