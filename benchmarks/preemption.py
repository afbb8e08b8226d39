"""Killing replicas and drivers of a localization at random: the same finding, and no probe lost that was saved.

    python benchmarks/preemption.py --json                    30 kills
    python benchmarks/preemption.py --kills 4 --seed 3        fewer

A real Ray on this machine. First one, two and three replicas localize a step without any harm: their shares are
compared. Then, kill by kill: a driver with three replicas starts on an empty store of probes; when so many probes are
saved (a number drawn from the seed) the driver or one of its actors, drawn too, gets SIGKILL. A driver that was killed
is started again. The finding must be the undisturbed one to the last digit, and every probe that was saved at the kill
must still be the very file afterwards: a probe asked again would have been written again.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from preempting.step import write

from gradloc.workstation.ray import RayHead

DRIVE = Path(__file__).parent / "preempting/drive.py"
NUM_REPLICAS = 3
TIMEOUT_S = 600.0
ACTOR = "ray::ReplayReplica"


class Driver:
    """One process that localizes."""

    def __init__(self, head: RayHead, snapshot: str, probes: Path, num_replicas: int) -> None:
        env = os.environ | {
            "RAY_ADDRESS": head.gcs_address,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": head.token,
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        words = [sys.executable, str(DRIVE), snapshot, probes.as_uri(), str(num_replicas)]
        self.process = subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def finding(self) -> dict[str, Any]:
        out, errors = self.process.communicate(timeout=TIMEOUT_S)
        assert self.process.returncode == 0, errors[-3_000:]
        found: dict[str, Any] = json.loads(out)
        return found

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.communicate()


def saved(probes: Path) -> dict[str, tuple[int, int]]:
    """Inode and time of each saved probe, by name."""
    return {path.name: ((stat := path.stat()).st_ino, stat.st_mtime_ns) for path in probes.glob("**/*.safetensors")}


def actors(head: RayHead) -> list[int]:
    """Process ids of this Ray's actors."""
    found = []
    for process in psutil.Process(head.process.pid).children(recursive=True):
        try:
            if process.cmdline()[:1] and process.cmdline()[0].startswith(ACTOR):
                found.append(process.pid)
        except psutil.NoSuchProcess:
            continue
    return sorted(found)


def shares_of(finding: dict[str, Any]) -> list[float]:
    rows = [share for *_, share in sorted(finding["shares_by_sequence"])]
    return [*rows, *finding["sequence_view"]["shares"], *(one["share"] for one in finding["culprits"])]


def killed(
    head: RayHead, snapshot: str, probes: Path, draw: random.Random, num_probes: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """One kill: what was done, and the finding."""
    at, victim = draw.randrange(1, num_probes), draw.choice(["driver", "actor", "actor"])
    driver = Driver(head, snapshot, probes, NUM_REPLICAS)
    deadline = time.monotonic() + TIMEOUT_S
    while len(saved(probes)) < at or (victim == "actor" and not actors(head)):
        if driver.process.poll() is not None:
            break  # done before the moment came: an actor that came late, say
        assert time.monotonic() < deadline
        time.sleep(0.002)
    before = saved(probes)
    there = actors(head)
    done = "nothing: it was over"
    if victim == "actor" and there and driver.process.poll() is None:
        os.kill(draw.choice(there), signal.SIGKILL)
        done = "actor"
    elif driver.process.poll() is None:
        driver.kill()
        done = "driver"
        driver = Driver(head, snapshot, probes, NUM_REPLICAS)
    finding = driver.finding()
    after = saved(probes)
    lost = sum(after.get(name) != stat for name, stat in before.items())
    return {"killed": done, "num_saved": len(before), "num_lost": lost}, finding


def measured(num_kills: int, seed: int) -> dict[str, Any]:
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        snapshot = (folder / "store/preempted/0/7").as_uri()
        write(snapshot, seed)
        head = RayHead(folder / "ray.log", num_cpus=NUM_REPLICAS + 1, job_env={}, spare_gpus=NUM_REPLICAS)
        try:
            head.wait_ready()
            alone = [
                Driver(head, snapshot, folder / f"alone-{number}", number).finding()
                for number in range(1, NUM_REPLICAS + 1)
            ]
            num_probes = len(saved(folder / "alone-1"))
            difference = max(
                abs(mine - theirs)
                for other in alone[1:]
                for mine, theirs in zip(shares_of(alone[0]), shares_of(other), strict=True)
            )
            kills: list[dict[str, Any]] = []
            num_same = tries = 0
            while len(kills) < num_kills and tries < 3 * num_kills:
                tries += 1
                told, finding = killed(head, snapshot, folder / f"kill-{tries}", draw, num_probes)
                sys.stderr.write(json.dumps(told) + "\n")
                if told["killed"] in ("driver", "actor"):
                    kills.append(told)
                    num_same += finding == alone[0]
        finally:
            head.end()
    return {
        "seed": seed,
        "verdict": alone[0]["verdict"],
        "num_probes": num_probes,
        "share_difference_max": difference,
        "num_kills": len(kills),
        "num_kills_of_drivers": sum(told["killed"] == "driver" for told in kills),
        "num_same_findings": num_same,
        "num_probes_saved_at_kills": sum(told["num_saved"] for told in kills),
        "num_probes_lost": sum(told["num_lost"] for told in kills),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    told = measured(arguments.kills, arguments.seed)
    text = json.dumps(told) if arguments.json else "\n".join(f"{key}: {value}" for key, value in told.items())
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()
