"""`gradloc demo` as its users run it: the JSON of its last line, its exit codes, and faults of its own surroundings."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.timeout(400)
def test_exploding_layers_are_found_at_the_planted_position():
    ended = demo("--fault", "layer", "--seed", "2")
    assert ended.returncode == 0, ended.stdout.splitlines()[-1:]
    result = json.loads(ended.stdout.splitlines()[-1])
    assert result["verdict"] == "layer"
    assert result["layers_exploding"] == [0, 1]
    assert len(result["module_kinds_exploding"]) > 1
    assert result["profile_peak"]["position"] == result["truth"]["position"]
    assert result["truth"]["token"] > result["truth"]["position"]
    assert result["norm_without"] <= result["limit"]
    assert abs(result["checksum"] - 1) <= 0.01
    assert result["replay_rel_error"] <= 1e-3


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
