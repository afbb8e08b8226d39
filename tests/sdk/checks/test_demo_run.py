"""The checks on a run of the demo: the doctor finds the planted token, the struck step does not verify."""

import json
import subprocess
import sys

import pytest

from gradloc.checks.doctor import examine

_RUN = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from gradloc.demo import faults
from gradloc.demo.model import save_weights
from gradloc.demo.pretraining import pretrained
from gradloc.demo.trainer import Settings, train
work, judge = Path(sys.argv[1]), Path(sys.argv[2])
save_weights(pretrained(1), work / "weights.safetensors")
train(
    Settings(work=work, run="r", seed=1, steps=34, store=(work / "store").as_uri()),
    faults.named("token-mismatch", 1, 1, judge),
)
"""


@pytest.mark.full
@pytest.mark.timeout(1_000)
def test_the_doctor_and_verify_step_on_a_struck_run(tmp_path, gradloc):
    work, judge = tmp_path / "run", tmp_path / "judge"
    work.mkdir()
    judge.mkdir()
    subprocess.run([sys.executable, "-c", _RUN, work, judge], check=True, timeout=900)
    found = examine(work)
    codes = {code for report in found.reports.values() for code in report.codes}
    assert {"policy.token-mismatch", "gradient.spike", "gradient.token-imbalance"} <= codes
    assert found.logs["progress.jsonl"].branch == "spike"
    assert not any("budget" in one.why for one in found.skipped)
    (manifest,) = work.glob("store/r/0/*/manifest.json")
    result = gradloc("verify-step", manifest.parent, "--json")
    assert result.returncode == 1, result.stderr
    outside = {one["name"]: one["is_back"] for one in json.loads(result.stdout)["comparisons"]}
    assert not outside["grad_norm"] and outside["difference of two replays"]
