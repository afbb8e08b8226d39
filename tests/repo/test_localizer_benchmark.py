"""The localizer's benchmark runs, and its first seed holds: no fault is missed, nobody innocent is blamed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "localizer.py"


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_every_fault_of_one_seed_is_explained_exactly() -> None:
    command = [sys.executable, str(BENCHMARK), "--quick", "--json", "--only", "cases", "--strategy", "attribution"]
    done = subprocess.run([*command, "--dtype", "fp32"], capture_output=True, text=True, check=True)
    cases = json.loads(done.stdout)["cases"]
    assert len(cases) >= 12
    assert {case["fault"] for case in cases} >= {"one token 3x", "near-cancelling pair", "batch-wide 10x", "NaN"}
    assert [case for case in cases if case["exact_rate"] != 1.0 or case["false_culprits"]] == []
    assert all(case["cost_steps"] <= 1.2 for case in cases if not case["fault"].startswith("layer"))
