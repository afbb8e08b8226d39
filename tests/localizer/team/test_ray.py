"""Replicas under a real Ray: one, two and three give the same finding; kills are benchmarks/preemption.py's."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.full
SCRIPT = Path(__file__).parents[3] / "benchmarks/preemption.py"


@pytest.mark.timeout(1_800)
def test_replicas_agree_and_whoever_is_killed_goes_on():
    words = [sys.executable, str(SCRIPT), "--json", "--kills", "4", "--seed", "3", "--replicas", "ray"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=os.environ | {"PYTHONWARNINGS": ""})
    assert done.returncode == 0, done.stderr[-4_000:]
    told = json.loads(done.stdout)
    assert told["num_kills"] == told["num_same_findings"] == 4
    assert told["num_probes_lost"] == 0
    assert told["share_difference_max"] <= 1e-5
