"""Two minutes of the soak: what grows with every step or every look shows; `make soak` looks closer, for longer."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).parent / "soak.py"
# Allocators take memory in pieces and caches fill: a leak of ten kilobytes a step would be twice as much.
GROWN_MAX_MB = 32.0
GROWN_MAX = 4  # descriptors and threads: a pool may take a few more; one a look would be eighteen more


@pytest.mark.timeout(900)
def test_nothing_grows_while_nothing_happens() -> None:
    command = [sys.executable, str(SOAK), "--seconds", "75", "--warm-up", "20", "--young", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    result = json.loads(done.stdout)["soak"]
    assert result["steps"] > 100 and result["leaked_processes"] == 0
    assert len(result["processes"]) == 6
    for row in result["processes"]:
        assert row["files"][1] <= row["files"][0] + GROWN_MAX, row
        assert row["threads"][1] <= row["threads"][0] + GROWN_MAX, row
        if not row["process"].startswith("redis"):
            assert row["grown_mb"] < GROWN_MAX_MB, row
