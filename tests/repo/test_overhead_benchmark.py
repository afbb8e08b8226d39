"""The overhead benchmark runs, and what does not depend on the machine's speed holds."""

import json
import math
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "overhead.py"
KEYS = {
    "trainer",
    "parameters",
    "condition",
    "step_ratio_median",
    "step_ratio_ci95",
    "publish_share_p50",
    "publish_share_p99",
    "stall_ratio",
    "memory_growth_bytes",
}


def test_a_case_is_measured_where_redis_goes_away() -> None:
    command = [sys.executable, str(BENCHMARK), "--quick", "--json", "--condition", "down"]
    done = subprocess.run(command, capture_output=True, check=True)
    (case,) = json.loads(done.stdout)["cases"]
    assert set(case) >= KEYS
    assert (case["condition"], case["num_pairs"]) == ("down", 10)
    low, high = case["step_ratio_ci95"]
    assert 0 < low <= case["step_ratio_median"] <= high
    assert 0 < case["publish_share_p50"] <= case["publish_share_p99"]
    assert math.isfinite(case["stall_ratio"])
    assert case["num_snapshots"] == 4
