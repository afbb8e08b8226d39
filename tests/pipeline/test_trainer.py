"""The demo's GRPO loop: a function of its seed, on one rank or two, with or without anyone listening."""

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gradloc.demo.moment import Fault
from gradloc.demo.trainer import Settings, train

NUM_STEPS = 4
NOBODY = "redis://127.0.0.1:1/0"  # nobody listens there


def progress(work: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (work / "progress.jsonl").read_text().splitlines()]


def outcome(work: Path, rank: int) -> dict[str, float]:
    return json.loads((work / f"outcome-{rank}.json").read_text())


def test_a_run_is_a_function_of_its_seed(weights: Path, tmp_path: Path):
    norms = []
    for name, seed in (("first", 1), ("again", 1), ("other", 2)):
        work = tmp_path / name
        work.mkdir()
        shutil.copy(weights, work / "weights.safetensors")
        train(Settings(work, f"run-{name}", seed=seed, steps=NUM_STEPS), Fault())
        norms.append([row["grad_norm"] for row in progress(work)])
    assert norms[0] == norms[1]
    assert norms[0] != norms[2]
    assert all(math.isfinite(norm) and norm > 0 for norm in norms[0])


@pytest.fixture(scope="module")
def two_ranks(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of two processes whose Redis never answered."""
    work = tmp_path_factory.mktemp("two-ranks")
    shutil.copy(weights, work / "weights.safetensors")
    command = [sys.executable, "-m", "gradloc.demo.trainer", "--work", str(work), "--run", "two-ranks", "--seed", "1"]
    command += ["--steps", str(NUM_STEPS), "--world-size", "2", "--redis", NOBODY, "--store", (work / "store").as_uri()]
    with (work / "log").open("wb") as log:
        ranks = [
            subprocess.Popen(
                [*command, "--rank", str(rank)],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            for rank in range(2)
        ]
        try:
            codes = [rank.wait(timeout=200) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    assert codes == [0, 0], (work / "log").read_text()
    return work


def test_two_ranks_train_to_the_last_step_though_nobody_listens(two_ranks: Path):
    assert [row["step"] for row in progress(two_ranks)] == list(range(NUM_STEPS))
    assert [outcome(two_ranks, rank)["steps"] for rank in range(2)] == [NUM_STEPS, NUM_STEPS]


def test_what_nobody_heard_is_counted(two_ranks: Path):
    # A start, four steps and an end were due; rank 1 has nothing to publish.
    assert outcome(two_ranks, 0)["num_events_dropped"] == NUM_STEPS + 2
    assert outcome(two_ranks, 1)["num_events_dropped"] == 0
    assert all(outcome(two_ranks, rank)["stall_s"] >= 0 for rank in range(2))
    assert (two_ranks / "log").read_text().count("telemetry waits") == 1, "one line, not a storm"


def test_rewards_are_neither_nothing_nor_everything(two_ranks: Path):
    assert all(0.1 < row["reward_mean"] < 0.95 for row in progress(two_ranks))
    assert all(row["reward_std"] > 0 for row in progress(two_ranks))
