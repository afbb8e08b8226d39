"""A calm world for a long time: nothing may grow.

    python tests/faults/soak.py --seconds 1800 --warm-up 1500 --json

Two trainers publish sixty steps a second each to the real services, with a spike every two and a half minutes. The
streams of steps, of ticks and wishes, and of incidents are at their bounds from the start, so that Redis does not grow
either. After a warm-up, in which caches and pools fill and the streams of steps turn over twice, memory, descriptors
and threads of each process are noted every few seconds; slope.py says what a slope is.

Beside what the system counts (`memory`) stands what is in use of it, as the processes themselves say (alive/): blocks
of Python's objects and bytes of the C heap; of Redis its own count. Exit code 1 where the interval of one of these
lies above zero, or descriptors or threads have grown.
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from chaos import commit
from child import Child
from slope import NUM_STRETCHES, slope_of
from trainer import LAYERS, observed
from world import World

from gradloc.workstation.processes import interruptible
from gradloc_proto import codec, streams
from gradloc_proto.messages import Flag, IncidentOpened, IncidentResolved, Message, Spike, Tick

LOOK_EVERY_S = 2.0
MB = 1e6


class CalmWorld(World):
    num_runs = 2
    rate = 60.0
    spike_every = 9_000.0
    far = ()
    num_past = streams.STREAM_LENGTH_MAX["steps"]

    def start_trainer(self, run: str, first_step: int) -> None:
        """It goes on where a long past ended: the run's streams are full, of entries and ids such as those to come."""
        if self.num_past:
            dice = random.Random(f"{self.seed}/{run}")
            norms = (dice.lognormvariate(0.0, 0.1) for _ in range(first_step, self.num_past))
            steps = (observed(run, 0, step, norm, False, 0) for step, norm in enumerate(norms, first_step))
            self._fill(streams.stream(run, "steps"), steps, self.num_past - first_step, 1 / self.rate)
            # Ticks come every two seconds while something is waited for; what is told of incidents, of one told often.
            num = streams.STREAM_LENGTH_MAX["control"]
            ticks = (Tick(run_id=run, ts=time.time() - 2.0 * (num - n)) for n in range(num))
            self._fill(streams.stream(run, "control"), ticks, num, 2.0)
            num = streams.STREAM_LENGTH_MAX["incidents"]
            self._fill(streams.stream(run, "incidents"), islice(cycle(_told_often(run)), num), num, 75.0)
        super().start_trainer(run, self.num_past)

    def _fill(self, key: str, messages: Iterable[Message], num: int, apart_s: float) -> None:
        """`num` messages, `apart_s` from each other, the last just now."""
        began_ms = time.time() * 1e3
        with self.client() as client:
            pipeline = client.pipeline(transaction=False)
            for n, message in enumerate(messages):
                at_ms = int(began_ms - (num - n) * apart_s * 1e3)
                pipeline.xadd(key, {"m": codec.encode(message)}, id=f"{at_ms}-0")
                if len(pipeline) == 1_000 or n == num - 1:
                    pipeline.execute()


def _told_often(run: str) -> tuple[Message, Message]:
    """An incident of long ago, as large as those to come, and its end."""
    values = {"value": 1e2 / 3, "score": 1e2 / 3, "baseline": 1 / 3, "limit": 4 / 3}
    norm = Flag(rule="norm", series="norm", **values)
    flags = (norm, *(Flag(rule="layer", series=name, **values) for name in LAYERS))
    spike = Spike(spike_id=f"spk-of-old-{run}", step=1, grad_norm=1e2 / 3, healthy_norm=1 / 3, limit=4 / 3, flags=flags)
    told = {"run_id": run, "ts": time.time() - 10 * 86_400.0, "incident_id": f"inc-of-old-{run}"}
    opened = IncidentOpened.model_validate({**told, "spike": spike})
    return opened, IncidentResolved.model_validate({**told, "step": 21, "reason": "20 healthy steps in a row"})


@dataclass
class Watched:
    """What was seen of one process: seconds, memory of its own, descriptors, threads; and what is in use of memory."""

    name: str
    rows: list[tuple[float, int, int, int]] = field(default_factory=list)
    in_use: list[tuple[float, int, int]] = field(default_factory=list)  # seconds, blocks of objects, bytes of the heap

    def look(self, child: Child, now: float, alive: Path) -> None:
        self.rows.append((now, child.memory_bytes(), child.num_files(), child.num_threads()))
        place = alive / str(child.process.pid if child.process else 0)
        if place.exists():
            num_blocks, num_bytes = place.read_text().split()
            self.in_use.append((now, int(num_blocks), int(num_bytes)))

    def told(self) -> dict[str, Any]:
        slope, half_width = slope_of([(at, memory) for at, memory, _, _ in self.rows])
        alive = {}
        if len(self.in_use) >= NUM_STRETCHES:
            alive = {
                "heap_mb_per_h": _per_h([(at, num_bytes / MB) for at, _, num_bytes in self.in_use]),
                "kblocks_per_h": _per_h([(at, num_blocks / 1e3) for at, num_blocks, _ in self.in_use]),
            }
        third = len(self.rows) // 3
        early, late = self.rows[:third], self.rows[-third:]

        def typical(rows: list[tuple[float, int, int, int]], column: int) -> float:
            return statistics.median(row[column] for row in rows)

        per_h = 3_600 / MB
        return {
            "process": self.name,
            "memory_mb": round(typical(late, 1) / MB, 2),
            "grown_mb": round((typical(late, 1) - typical(early, 1)) / MB, 3),
            "slope_mb_per_h": round(slope * per_h, 3),
            "interval_mb_per_h": [round((slope - half_width) * per_h, 3), round((slope + half_width) * per_h, 3)],
            "files": [int(typical(early, 2)), int(typical(late, 2))],
            "threads": [int(typical(early, 3)), int(typical(late, 3))],
            **alive,
        }


def _per_h(points: list[tuple[float, float]]) -> list[float]:
    """Slope an hour, and its interval."""
    slope, half_width = slope_of(points)
    return [round(3_600 * value, 3) for value in (slope, slope - half_width, slope + half_width)]


class YoungWorld(CalmWorld):
    num_past = 0
    spike_every = 900.0


def soak(kind: type[CalmWorld], folder: Path, seed: int, warm_up_s: float, seconds: float) -> dict[str, Any]:
    alive = folder.parent / "alive"
    alive.mkdir()
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent / "alive"), os.environ.get("PYTHONPATH", "")]))
    os.environ |= {"PYTHONPATH": path, "SOAK_ALIVE": str(alive)}
    with kind(folder, seed) as world:
        time.sleep(warm_up_s)
        children = {child.name: child for child in (*world.services(), world.redis, *world.trainers.values())}
        watched = {name: Watched(name) for name in children}
        began = time.monotonic()
        while (now := time.monotonic() - began) < seconds:
            for name, child in children.items():
                assert child.alive, f"{name} has ended: {child.log.read_text()[-500:]}"
                watched[name].look(child, now, alive)
            watched[world.redis.name].in_use.append((now, 0, _redis_bytes(world)))
            time.sleep(LOOK_EVERY_S)
        with world.client() as client:
            dataset = int(client.info("memory")["used_memory_dataset"])
        steps = {run: len(world.truth(run)) for run in world.runs}
    return {
        "soak": {
            "seed": seed,
            "commit": commit(),
            "warm_up_s": warm_up_s,
            "seconds": seconds,
            "steps": sum(steps.values()),
            "redis_dataset_mb": round(dataset / MB, 1),
            "leaked_processes": len(world.leaked),
            "processes": [one.told() for one in watched.values()],
        }
    }


def _redis_bytes(world: World) -> int:
    """What Redis has in use."""
    with world.client() as client:
        return int(client.info("memory")["used_memory"])


def grows(row: dict[str, Any]) -> bool:
    in_use = [row[name][1] for name in ("heap_mb_per_h", "kblocks_per_h") if name in row]
    grown = row["files"][1] > row["files"][0] or row["threads"][1] > row["threads"][0]
    return max([row["interval_mb_per_h"][0], *in_use]) > 0 or grown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1_800.0, metavar="S")
    parser.add_argument("--warm-up", type=float, default=2_400.0, metavar="S")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--young", action="store_true", help="streams are empty at the start, and Redis grows")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gradloc-soak-") as folder, interruptible():
        kind = YoungWorld if options.young else CalmWorld
        result = soak(kind, Path(folder) / "world", options.seed, options.warm_up, options.seconds)
    rows = result["soak"]["processes"]
    if options.json:
        sys.stdout.write(json.dumps(result) + "\n")
    else:
        for row in rows:
            low, high = row["interval_mb_per_h"]
            sys.stdout.write(
                f"{row['process']:<12} {row['memory_mb']:>7} MB, {row['slope_mb_per_h']:+.2f} MB/h in [{low:+.2f}, "
                f"{high:+.2f}], descriptors {row['files']}, threads {row['threads']}\n"
            )
    sys.exit(1 if any(grows(row) for row in rows) or result["soak"]["leaked_processes"] else 0)


if __name__ == "__main__":
    main()
