"""The whole pipeline under seeded schedules of faults; afterwards the promise must hold.

    python tests/faults/chaos.py --schedules 20 --seed 1 --resume chaos.jsonl

A schedule: six faults of `faults.py` at seeded moments, while trainers publish and spike. Then all is healed, the
trainers go on for a while and end, and within a minute everything that survived Redis has exactly one incident, one
message and, with --with-ray, one finding of a real localization; everything lost was noticed; nothing has leaked.
Prints a line a schedule and, last, one JSON object {schedules, faults, spikes, lost, lost_unnoticed, doubled, untold,
findings, worst_recovery_s, failures}. Exit code 1 where the promise was broken.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from faults import ALL
from schedule import run_schedule

from gradloc.workstation.processes import interruptible


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedules", type=int, default=5, metavar="N")
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="of the first; the others follow")
    parser.add_argument("--faults", type=int, default=6, metavar="N", help="a schedule")
    parser.add_argument("--with-ray", action="store_true", help="with Ray, snapshots and real localizations")
    parser.add_argument("--only", nargs="+", choices=sorted(ALL), help="these faults alone")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="JSON lines of finished schedules: read, added to")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep logs and data of failed schedules there")
    arguments = parser.parse_args()
    known: dict[int, dict[str, Any]] = {}
    if arguments.resume is not None and arguments.resume.exists():
        known = {row["seed"]: row for row in map(json.loads, arguments.resume.read_text().splitlines())}
    results = []
    for seed in range(arguments.seed, arguments.seed + arguments.schedules):
        if seed not in known:
            known[seed] = {"commit": commit(), **_one(seed, arguments)}
            if arguments.resume is not None:
                with arguments.resume.open("a") as lines:
                    lines.write(json.dumps(known[seed]) + "\n")
        row = known[seed]
        results.append(row)
        word = "holds" if row["holds"] else f"BROKEN {row}"
        sys.stderr.write(f"schedule {seed}: {word} ({', '.join(row['faults'])}; {row['recovery_s']} s)\n")
        sys.stderr.flush()
    sys.stdout.write(json.dumps(summed(results)) + "\n")
    sys.exit(0 if all(row["holds"] for row in results) else 1)


def _one(seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(prefix=f"gradloc-chaos-{seed}-"))
    try:
        with interruptible():
            row = run_schedule(seed, folder / "world", arguments.faults, arguments.only, with_ray=arguments.with_ray)
        if not row["holds"] and arguments.keep is not None:
            shutil.copytree(folder / "world", arguments.keep / str(seed), dirs_exist_ok=True)
        return row
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude", "*"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def summed(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Of rows of any version: earlier ones know no findings."""

    def count(name: str) -> int:
        return sum(len(row.get(name, ())) for row in results)

    return {
        "schedules": len(results),
        "faults": count("faults"),
        "spikes": sum(int(row["spikes"]) for row in results),
        "lost": sum(int(row["lost"]) for row in results),
        "lost_unnoticed": count("unnoticed") + count("missed"),
        "doubled": count("doubled"),
        "untold": count("untold"),
        "findings": sum(int(row.get("findings", 0)) for row in results),
        "given_up": sum(int(row.get("given_up", 0)) for row in results),
        "worst_recovery_s": max((float(row["recovery_s"]) for row in results), default=0.0),
        "failures": [row["seed"] for row in results if not row["holds"]],
    }


if __name__ == "__main__":
    main()
