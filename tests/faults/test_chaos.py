"""The promise through seeded schedules of faults; `make chaos` runs as many as are wanted."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

CHAOS = Path(__file__).parent / "chaos.py"


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_promise_holds_after_any_faults() -> None:
    command = [sys.executable, str(CHAOS), "--schedules", "4", "--seed", "900"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    result = json.loads(done.stdout)
    assert done.returncode == 0, done.stderr
    assert (result["schedules"], result["lost_unnoticed"], result["doubled"], result["untold"]) == (4, 0, 0, 0)
    assert result["faults"] >= 20 and result["spikes"] > 0 and result["worst_recovery_s"] <= 60


def test_a_schedule_is_the_same_whenever_its_seed_is() -> None:
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); from schedule import plan; "
        "print(plan(7, 6, None) == plan(7, 6, None) != plan(8, 6, None), len(plan(7, 6, None)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(CHAOS.parent)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["True", "6"]
