"""Two minutes of the soak: what grows with every step or every look shows; `make soak` looks closer, for longer."""

import importlib
import json
import random
import subprocess
import sys
from itertools import accumulate
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


@pytest.mark.parametrize("can_fall", [True, False])
def test_a_sum_of_chances_is_no_slope_and_a_leak_is_one(can_fall: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a process has touched it keeps: its memory wanders, or settles; a leak goes on in every stretch."""
    monkeypatch.syspath_prepend(SOAK.parent)
    slope_of = importlib.import_module("slope").slope_of
    dice = random.Random(1)

    def memory(leak: float) -> list[tuple[float, float]]:
        chances = [dice.gauss(0, 1) for _ in range(300)]
        sums = accumulate(chances) if can_fall else accumulate(chances, max)
        return [(float(n), value + leak * n) for n, value in enumerate(sums)]

    def is_seen(leak: float) -> bool:
        slope, half_width = slope_of(memory(leak))
        return slope - half_width > 0

    leak = 0.5 if can_fall else 0.02  # over 300 points: some eight times what chance alone does
    assert sum(is_seen(0.0) for _ in range(400)) <= 0.05 * 400
    assert sum(is_seen(leak) for _ in range(400)) >= 0.9 * 400
