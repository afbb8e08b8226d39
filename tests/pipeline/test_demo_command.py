"""`gradloc demo` as its users run it: the JSON of its last line, its exit codes, and faults of its own surroundings."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gradloc.demo.envelope import FAULT_NAMES

GRADLOC = Path(sys.executable).parent / "gradloc"


def demo(*arguments: str, timeout_s: float = 280) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [GRADLOC, "demo", "--json", *arguments], capture_output=True, text=True, timeout=timeout_s, check=False
    )


@pytest.mark.timeout(400)
def test_training_reaches_its_last_step_though_redis_dies():
    ended = demo("--fault", "token-mismatch", "--seed", "1", "--kill-redis-at-step", "5")
    assert ended.returncode == 0, ended.stderr
    result = json.loads(ended.stdout.splitlines()[-1])
    assert result["redis_killed"] and result["training_finished"]
    assert result["training_steps"] == 60
    assert result["events_dropped"] > 0
    assert result["found"] is None


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_healthy_run_raises_no_incident(seed: int):
    ended = demo("--fault", "none", "--seed", str(seed))
    result = json.loads(ended.stdout.splitlines()[-1])
    assert (ended.returncode, result["incidents"]) == (0, 0)


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", [1, 2])
def test_bisection_finds_the_same_token(seed: int):
    ended = demo("--fault", "token-mismatch", "--seed", str(seed), "--strategy", "bisect")
    assert ended.returncode == 0, ended.stdout.splitlines()[-1:]


def test_an_unknown_fault_is_one_clear_line():
    ended = demo("--fault", "gremlin")
    assert ended.returncode == 2
    assert "unknown fault 'gremlin'; expected one of token-mismatch, layer, none" in ended.stderr


def test_what_cannot_be_meant_together_is_one_clear_line():
    for arguments, words in (
        (("--all", "--fault", "two"), "--all plays every fault"),
        (("--fault", "two", "--fault", "nan", "--keep"), "for one fault"),
        (("--fault", "two", "--fault", "gremlin"), "unknown fault 'gremlin'"),
    ):
        ended = demo(*arguments)
        assert (ended.returncode, words in ended.stderr) == (2, True), ended.stderr


@pytest.mark.full
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_every_fault_gets_its_verdict_and_place(seed: int):
    ended = demo("--all", "--seed", str(seed), timeout_s=7000)
    rows = json.loads(ended.stdout.splitlines()[-1])["faults"]
    assert [row["fault"] for row in rows] == list(FAULT_NAMES)
    assert [row for row in rows if not row["right"]] == []
    assert ended.returncode == 0
