"""The whole pipeline under seeded schedules of faults; afterwards the promise must hold.

    python tests/faults/chaos.py --schedules 20 --seed 1 --resume chaos.jsonl

A schedule: at least five faults of `faults.py` at seeded moments, while trainers publish and spike. Then all is
healed, the trainers go on for a while and end, and within a minute everything that survived Redis has exactly one
incident and one message, and everything lost was noticed. Prints a line a schedule and, last, one JSON object
{schedules, faults, spikes, lost, lost_unnoticed, doubled, untold, worst_recovery_s, failures}. Exit code 1 where the
promise was broken.
"""

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

from faults import EXCLUSIVE, FAULTS
from judgement import judge
from world import World

RECOVERY_MAX_S = 60.0
FIRST_FAULT_S, LAST_FAULT_S = 6.0, 30.0
CALM_S = 8.0  # trainers go on for a while after the last fault is healed
TRAINER_TIMEOUT_S = 120.0


def plan(seed: int, num_faults: int, only: list[str] | None) -> list[tuple[float, str]]:
    """Moments and names, in order of time."""
    dice = random.Random(f"plan {seed}")
    names = [dice.choice(only or sorted(FAULTS)) for _ in range(num_faults)]
    return sorted((dice.uniform(FIRST_FAULT_S, LAST_FAULT_S), name) for name in names)


def run_schedule(seed: int, folder: Path, num_faults: int, only: list[str] | None = None) -> dict[str, object]:
    """One schedule from start to judgement."""
    dice = random.Random(f"faults {seed}")
    due = plan(seed, num_faults, only)
    struck: list[str] = []
    with World(folder, seed) as world:
        started = time.monotonic()
        healing: list[tuple[float, str, object]] = []
        while due or healing:
            now = time.monotonic() - started
            for entry in [one for one in healing if one[0] <= now]:
                healing.remove(entry)
                entry[2]()  # type: ignore[operator]
            busy = {EXCLUSIVE[name] for _, name, _ in healing}
            for moment, name in [one for one in due if one[0] <= now]:
                if EXCLUSIVE[name] in busy:
                    continue  # waits until that is healed
                due.remove((moment, name))
                seconds, heal = FAULTS[name](world, dice)
                struck.append(f"{name}@{now:.1f}+{seconds:.1f}")
                healing.append((time.monotonic() - started + seconds, name, heal))
                busy.add(EXCLUSIVE[name])
            world.supervise()
            time.sleep(0.05)
        calm_until = time.monotonic() + CALM_S
        while time.monotonic() < calm_until:
            world.supervise()
            time.sleep(0.1)
        world.stop_trainers()
        ended = time.monotonic() + TRAINER_TIMEOUT_S
        while any(child.alive for child in world.trainers.values()) and time.monotonic() < ended:
            world.supervise()
            time.sleep(0.1)
        hanging = [run for run, child in world.trainers.items() if child.alive]
        healed = time.monotonic()
        judgement = judge(world)
        while not judgement.holds and time.monotonic() - healed < RECOVERY_MAX_S:
            world.supervise()
            time.sleep(1.0)
            judgement = judge(world)
        recovery_s = time.monotonic() - healed
        dead = [child.name for child in (*world.detectors, world.reporter, world.redis) if not child.alive]
        num_files = max(child.num_files() for child in (*world.detectors, world.reporter) if child.alive)
    result: dict[str, object] = {
        "seed": seed,
        "faults": struck,
        "spikes": judgement.num_spikes,
        "lost": judgement.num_lost,
        "missed": list(judgement.missed),
        "unnoticed": list(judgement.unnoticed),
        "doubled": list(judgement.doubled),
        "untold": list(judgement.untold),
        "dead": dead,
        "trainers_hanging": hanging,
        "restarts": world.num_restarts,
        "recovery_s": round(recovery_s, 1),
        "open_files_max": num_files,
    }
    result["holds"] = judgement.holds and not dead and not hanging and num_files < 200
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedules", type=int, default=5, metavar="N")
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="of the first; the others follow")
    parser.add_argument("--faults", type=int, default=6, metavar="N", help="a schedule")
    parser.add_argument("--only", nargs="+", choices=sorted(FAULTS), help="these faults alone")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="JSON lines of finished schedules: read, added to")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep logs and data of failed schedules there")
    arguments = parser.parse_args()
    known: dict[int, dict[str, object]] = {}
    if arguments.resume is not None and arguments.resume.exists():
        known = {row["seed"]: row for row in map(json.loads, arguments.resume.read_text().splitlines())}
    results = []
    for seed in range(arguments.seed, arguments.seed + arguments.schedules):
        if seed not in known:
            folder = Path(tempfile.mkdtemp(prefix=f"gradloc-chaos-{seed}-"))
            try:
                known[seed] = run_schedule(seed, folder / "world", arguments.faults, arguments.only)
                if not known[seed]["holds"] and arguments.keep is not None:
                    shutil.copytree(folder / "world", arguments.keep / str(seed), dirs_exist_ok=True)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            if arguments.resume is not None:
                with arguments.resume.open("a") as lines:
                    lines.write(json.dumps(known[seed]) + "\n")
        results.append(known[seed])
        row = known[seed]
        word = "holds" if row["holds"] else f"BROKEN {row}"
        sys.stderr.write(f"schedule {seed}: {word} ({', '.join(row['faults'])}; {row['recovery_s']} s)\n")  # type: ignore[arg-type]
    sys.stdout.write(json.dumps(summed(results)) + "\n")
    sys.exit(0 if all(row["holds"] for row in results) else 1)


def summed(results: list[dict[str, object]]) -> dict[str, object]:
    def count(name: str) -> int:
        return sum(len(row[name]) for row in results)  # type: ignore[arg-type]

    return {
        "schedules": len(results),
        "faults": count("faults"),
        "spikes": sum(int(row["spikes"]) for row in results),  # type: ignore[call-overload]
        "lost": sum(int(row["lost"]) for row in results),  # type: ignore[call-overload]
        "lost_unnoticed": count("unnoticed") + count("missed"),
        "doubled": count("doubled"),
        "untold": count("untold"),
        "worst_recovery_s": max(float(row["recovery_s"]) for row in results),  # type: ignore[arg-type]
        "failures": [row["seed"] for row in results if not row["holds"]],
    }


if __name__ == "__main__":
    main()
