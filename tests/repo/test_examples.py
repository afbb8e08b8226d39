"""Examples and benchmarks run as they stand, and their output is what it says."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
NUMBER = re.compile(r"\d+(\.\d+)?(e[+-]?\d+)?")
BENCHMARKS = sorted(path.name for path in (REPOSITORY / "benchmarks").glob("*.py"))


def run(repository: Path, *arguments: str):
    return subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        cwd=repository,
        env={**os.environ, "GRADLOC_STRICT": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def test_the_plain_loop_trains_to_its_last_step(repository: Path, tmp_path: Path):
    result = run(repository, "examples/plain_loop.py", "--steps", "30", "--store", tmp_path.as_uri())
    assert result.returncode == 0, result.stderr
    assert "30 steps" in result.stdout


def test_the_plain_loop_names_the_token_that_was_recorded_wrongly(repository: Path):
    result = run(repository, "examples/plain_loop.py", "--steps", "22", "--fault")
    assert result.returncode == 0, result.stderr
    assert re.search(r"step 20: token: .* of the squared norm", result.stdout), result.stdout


def test_the_plain_loop_trains_on_where_no_redis_answers(repository: Path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("GRADLOC_STRICT", None)
    result = subprocess.run(
        [sys.executable, "examples/plain_loop.py", "--steps", "5", "--redis", "redis://127.0.0.1:1/0"],
        cwd=repository,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "5 steps" in result.stdout


def test_the_readmes_own_loop_runs_as_it_stands_and_prints_what_the_readme_says(repository: Path, tmp_path: Path):
    section = (repository / "README.md").read_text().split("### A spike explained in your own loop", maxsplit=1)[1]
    program, printed = re.findall(r"^```(?:python)?\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)[:2]
    (tmp_path / "loop.py").write_text(program)
    result = run(tmp_path, "loop.py")
    assert result.returncode == 0, result.stderr
    assert "sequence 5 token 8" in result.stdout
    # Another machine may round differently; the words are the same.
    assert NUMBER.sub("#", result.stdout) == NUMBER.sub("#", printed)


@pytest.mark.full
def test_trls_trainer_names_the_token_that_was_recorded_wrongly(repository: Path, tmp_path: Path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GRADLOC_STRICT": "1"}
    result = subprocess.run(
        [sys.executable, "examples/trl_grpo.py", "--fault", "--out", str(tmp_path)],
        cwd=repository,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "28 steps" in result.stdout
    assert re.search(r"step 2\d: token: .* of the squared norm", result.stdout)
    assert "token-level train/inference mismatch" in result.stdout


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_opens_with_what_it_shows_and_speaks_json(name: str, repository: Path):
    source = (repository / "benchmarks" / name).read_text()
    assert source.startswith('"""')
    assert "--json" in source


@pytest.mark.full
@pytest.mark.parametrize("name", ["bus_throughput.py", "judging_cost.py"])
def test_a_benchmark_prints_one_json_object_a_line(name: str, repository: Path):
    result = run(repository, f"benchmarks/{name}", "--json")
    assert result.returncode == 0, result.stderr
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert rows
    assert {row["benchmark"] for row in rows} == {name.removesuffix(".py")}
