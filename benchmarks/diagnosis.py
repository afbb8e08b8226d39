"""A confusion matrix over causes: the demo's faults, every one with many seeds, diagnosed.

    python benchmarks/diagnosis.py --json              15 faults x 10 seeds, from seed 101; an hour on 2 idle cores
    python benchmarks/diagnosis.py --json --quick      three faults of one seed: shows that it runs
    python benchmarks/diagnosis.py --json --resume F   lines go to F; plays in it are not played again

Seeds from 101 on are of record; whoever works on the diagnosis looks at others (--seed-base 1).

Real: supervised training, GRPO in processes of their own (two ranks over gloo, or --ranks 1 at half the cost; what
needs a second rank has it), the demo's fault, Redis, the detector with its limits and wishes, the snapshot, and the
localizer's code on it. Left out: Ray, reporter and Slack; training ends two steps after its first spike.

    right       the finding's first cause is that of docs/demo.md (of no fault: no finding, no incident)
    confident   that cause's confidence is "high"
    in full     with --judged: verdict, cause and place are as docs/demo.md has them, the place by the demo's judge
"""

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diagnosing.play import played, policy_of, services

from gradloc.demo.envelope import ANSWERS

NUM_SEEDS = 10
SEED_OF_RECORD = 101
QUICK = ("token-mismatch", "mask", "none")
NOTHING = "no incident"


def expected_of(fault: str) -> str:
    """The cause that docs/demo.md has for the fault."""
    return ANSWERS[fault].cause or NOTHING


def found_in(play: dict[str, Any]) -> str:
    """The play's first cause; without a finding what there is instead."""
    if play["cause"] is not None:
        return str(play["cause"])
    return "incident without a finding" if play["incidents"] else NOTHING


def matrix_of(plays: Sequence[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Plays by expected cause and by found cause."""
    matrix: dict[str, Counter[str]] = {}
    for play in plays:
        matrix.setdefault(expected_of(play["fault"]), Counter())[found_in(play)] += 1
    return {expected: dict(found.most_common()) for expected, found in matrix.items()}


def summary_of(plays: Sequence[dict[str, Any]]) -> dict[str, Any]:
    wrong = [play for play in plays if found_in(play) != expected_of(play["fault"])]
    return {
        "plays": len(plays),
        "right_rate": 1 - len(wrong) / len(plays) if plays else None,
        "wrong": [play | {"expected": expected_of(play["fault"])} for play in wrong],
        "wrong_and_confident": sum(play["confidence"] == "high" for play in wrong),
        "verdict_right_rate": sum(play["verdict"] == ANSWERS[play["fault"]].verdict for play in plays) / len(plays)
        if plays
        else None,
        "in_full": _rate([play["in_full"] for play in plays if play["in_full"] is not None]),
        "matrix": matrix_of(plays),
    }


def _rate(answers: Sequence[bool]) -> str | None:
    return f"{sum(answers)} of {len(answers)}" if answers else None


def table(matrix: dict[str, dict[str, int]]) -> str:
    """Markdown: a row an expected cause, a column a found one."""
    columns = [*matrix, *sorted({found for row in matrix.values() for found in row} - matrix.keys())]
    rows = [["expected \\ found", *columns], ["---"] * (len(columns) + 1)]
    rows += [[name, *(str(found.get(column, "")) for column in columns)] for name, found in matrix.items()]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one line for machines at the end")
    parser.add_argument("--quick", action="store_true", help=f"one seed of {', '.join(QUICK)}")
    parser.add_argument("--seed-base", type=int, default=SEED_OF_RECORD, help=f"first seed (default {SEED_OF_RECORD})")
    parser.add_argument("--seeds", type=int, default=NUM_SEEDS, help=f"how many (default {NUM_SEEDS})")
    parser.add_argument("--fault", action="append", choices=list(ANSWERS), help="only this one; may be repeated")
    parser.add_argument(
        "--ranks", type=int, choices=(1, 2), default=2, help="of faults that need no second (default 2)"
    )
    parser.add_argument("--judged", action="store_true", help="ask the judge for the place as well; half as long again")
    parser.add_argument("--resume", type=Path, help="file of lines to go on from and to add to")
    arguments = parser.parse_args()
    faults = arguments.fault or (QUICK if arguments.quick else tuple(ANSWERS))
    seeds = range(arguments.seed_base, arguments.seed_base + (1 if arguments.quick else arguments.seeds))
    known: list[dict[str, Any]] = []
    if arguments.resume is not None and arguments.resume.exists():
        known = [json.loads(line) for line in arguments.resume.read_text().splitlines()]
    plays = [one for one in known if one["fault"] in faults and one["seed"] in seeds]
    done = {(one["fault"], one["seed"]) for one in plays}
    wanted = [(seed, fault) for seed in seeds for fault in faults if (fault, seed) not in done]
    started, commit = time.time(), _commit()
    with tempfile.TemporaryDirectory(prefix="gradloc-diagnosis-") as name, services(Path(name)) as shared:
        for seed, fault in wanted:
            policy = policy_of(seed, Path(name) / f"policy-{seed}")
            play = played(shared, fault, seed, policy, num_ranks=arguments.ranks, is_judged=arguments.judged) | {
                "commit": commit
            }
            plays.append(play)
            sys.stderr.write(json.dumps(play) + "\n")
            if arguments.resume is not None:
                with arguments.resume.open("a") as file:
                    file.write(json.dumps(play) + "\n")
    summary = summary_of(plays)
    sys.stderr.write(table(summary["matrix"]) + "\n")
    result = {
        "faults": list(faults),
        "seeds": list(seeds),
        **summary,
        "commits": sorted({play["commit"] for play in plays}),
        "seconds": round(time.time() - started),
    }
    sys.stdout.write((json.dumps(result) if arguments.json else json.dumps(result, indent=1)) + "\n")
    return 0


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=Path(__file__).parent, check=False
    ).stdout.strip()


if __name__ == "__main__":
    paths = [
        str(Path(__file__).parent),
        os.environ.get("PYTHONPATH", ""),
    ]  # for the process that others are forked from
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    multiprocessing.set_forkserver_preload(["diagnosing.play"])
    sys.exit(main())
