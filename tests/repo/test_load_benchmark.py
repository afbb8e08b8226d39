"""The detector's load benchmark runs, and what does not depend on the machine's speed holds."""

import json
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "detector_load.py"


def test_every_event_is_folded_every_spike_is_told_and_streams_keep_their_bounds() -> None:
    done = subprocess.run([sys.executable, str(BENCHMARK), "--quick", "--json"], capture_output=True, check=True)
    result = json.loads(done.stdout)
    live = result["live"]
    assert live["num_runs"] == 8
    assert live["num_spikes"] >= 1
    assert live["spike_to_stream_s"]["max"] < 30
    assert live["state_bytes_max"] <= 64 * 1024
    assert [row["bytes_over_bound"] <= 1 for row in result["bounds"]] == [True, True]
    assert result["throughput"]["ratio_whole"] > 0
