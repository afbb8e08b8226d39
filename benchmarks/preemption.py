"""Killing replicas and drivers of a localization at random: the same finding, and no probe lost that was saved.

    python benchmarks/preemption.py --json                     30 kills, drivers and replicas as forks of this process
    python benchmarks/preemption.py --json --replicas ray      the same on a real Ray
    python benchmarks/preemption.py --json --resume FILE       a line for each kill goes to FILE; those in it are done

First one, two and three replicas localize a step without any harm: their shares are compared. Then, kill by kill: a
driver with three replicas starts on an empty store of probes; when so many probes are saved (a number drawn from the
seed) the driver or one of the others, drawn too, gets SIGKILL. A driver that was killed is started again. The finding
must be the undisturbed one to the last digit, and every probe that was saved at the kill must still be the very file
afterwards: a probe asked again would have been written again.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from detection.provenance import commit
from preempting.forked import Forked
from preempting.step import write

NUM_REPLICAS = 3
TIMEOUT_S = 600.0
TRIES_MAX = 5  # a localization may be over before its moment comes


def saved(probes: Path) -> dict[str, tuple[int, int]]:
    """Inode and time of each saved probe, by name."""
    return {path.name: ((stat := path.stat()).st_ino, stat.st_mtime_ns) for path in probes.glob("**/*.safetensors")}


def shares_of(finding: dict[str, Any]) -> list[float]:
    rows = [share for *_, share in sorted(finding["shares_by_sequence"])]
    return [*rows, *finding["sequence_view"]["shares"], *(one["share"] for one in finding["culprits"])]


def killed(place: Any, probes: Path, draw: random.Random, num_probes: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """One kill: what was done, and the finding."""
    at, victim = draw.randrange(1, num_probes), draw.choice(["driver", "replica", "replica"])
    driver = place.driver(probes, NUM_REPLICAS)
    deadline = time.monotonic() + TIMEOUT_S
    while driver.alive() and (len(saved(probes)) < at or (victim == "replica" and not driver.actors())):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    before, there, done = saved(probes), driver.actors(), "nothing: it was over"
    if driver.alive() and victim == "replica" and there:
        os.kill(draw.choice(there), signal.SIGKILL)
        done = "replica"
    elif driver.alive():
        driver.kill()
        done = "driver"
        driver = place.driver(probes, NUM_REPLICAS)
    finding = driver.finding()
    after = saved(probes)
    lost = sum(after.get(name) != stat for name, stat in before.items())
    return {"killed": done, "num_saved": len(before), "num_lost": lost}, finding


def one_kill(
    place: Any, folder: Path, seed: int, number: int, num_probes: int, same_as: dict[str, Any]
) -> dict[str, Any]:
    """The kill of this number: what it is depends on the seed and the number alone, so kills can be resumed."""
    draw = random.Random(f"{seed}-{number}")
    for again in range(TRIES_MAX):
        told, finding = killed(place, folder / f"kill-{number}-{again}", draw, num_probes)
        if told["killed"] in ("driver", "replica"):
            return {"number": number, **told, "same_finding": finding == same_as}
    raise AssertionError(f"kill {number}: {TRIES_MAX} localizations were over before their moment came")


def measured(num_kills: int, seed: int, replicas: str, lines: Path | None) -> dict[str, Any]:
    started = time.monotonic()
    kills = _read(lines, replicas, seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        snapshot = (folder / "store/preempted/0/7").as_uri()
        place: Any = Forked(folder, snapshot)
        if replicas == "ray":
            from preempting.on_ray import OnRay

            place = OnRay(folder, snapshot, NUM_REPLICAS)
        write(snapshot, seed)
        try:
            alone = [place.driver(folder / f"alone-{n}", n).finding() for n in range(1, NUM_REPLICAS + 1)]
            num_probes = len(saved(folder / "alone-1"))
            for number in range(len(kills), num_kills):
                told = one_kill(place, folder, seed, number, num_probes, alone[0])
                kills.append(told)
                _keep(lines, {"replicas": replicas, "seed": seed, "commit": commit(), **told})
                sys.stderr.write(
                    f"{number + 1}/{num_kills} killed a {told['killed']} at {told['num_saved']} probes: "
                    f"{told['num_lost']} lost, {'the same' if told['same_finding'] else 'ANOTHER'} finding; "
                    f"{time.monotonic() - started:.0f} s\n"
                )
        finally:
            place.close()
    pairs = [(shares_of(alone[0]), shares_of(other)) for other in alone[1:]]
    return {
        "replicas": replicas,
        "seed": seed,
        "commit": commit(),
        "seconds": round(time.monotonic() - started, 1),
        "verdict": alone[0]["verdict"],
        "num_probes": num_probes,
        "share_difference_max": max(abs(a - b) for mine, theirs in pairs for a, b in zip(mine, theirs, strict=True)),
        "num_kills": len(kills),
        "num_kills_of_drivers": sum(told["killed"] == "driver" for told in kills),
        "num_same_findings": sum(told["same_finding"] for told in kills),
        "num_probes_saved_at_kills": sum(told["num_saved"] for told in kills),
        "num_probes_lost": sum(told["num_lost"] for told in kills),
    }


def _read(lines: Path | None, replicas: str, seed: int) -> list[dict[str, Any]]:
    """Kills of this kind, seed and code that were done before, from the first one on."""
    if lines is None or not lines.exists():
        return []
    found = [json.loads(line) for line in lines.read_text().splitlines()]
    return [one for one in found if (one["replicas"], one["seed"], one["commit"]) == (replicas, seed, commit())]


def _keep(lines: Path | None, told: dict[str, Any]) -> None:
    if lines is not None:
        with lines.open("a") as file:
            file.write(json.dumps(told) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--replicas", choices=["forked", "ray"], default="forked")
    parser.add_argument("--resume", type=Path, metavar="FILE")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    told = measured(arguments.kills, arguments.seed, arguments.replicas, arguments.resume)
    text = json.dumps(told) if arguments.json else "\n".join(f"{key}: {value}" for key, value in told.items())
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()
