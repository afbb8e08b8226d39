"""Every fault from the trainer to the finding, without services: what docs/demo.md promises, and nothing betrayed.

Two ranks train for real, judged by their own rules; the snapshot that they keep is localized in this
process. `late` needs the detector's slow rules, so it is played by `gradloc demo` alone.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from gradloc.demo.envelope import ANSWERS, FAULT_NAMES, FAULT_VARIABLE, JUDGE_VARIABLE
from gradloc.demo.performance import Script
from gradloc.demo.review import review
from gradloc_localizer.driver import Options, explain

PLAYED = tuple(name for name in FAULT_NAMES if name not in ("none", "late"))


def test_the_table_in_the_docs_is_the_table_in_the_code(repository_docs: str):
    told = re.findall(r"^\| `([a-z-]+)` \|[^|]*\| ([^|]+) \| ([^|]+) \|", repository_docs, re.MULTILINE)
    assert {name: (verdict.strip("` "), cause.strip("` ")) for name, verdict, cause in told} == {
        name: (answer.verdict or "no incident", answer.cause or "-") for name, answer in ANSWERS.items()
    }


@pytest.fixture
def repository_docs() -> str:
    return (Path(__file__).resolve().parents[2] / "docs" / "demo.md").read_text()


def played(name: str, seed: int, weights: Path, work: Path) -> SimpleNamespace:
    """A run of two processes, what the judge says of it, and the finding of its first snapshot."""
    judge_dir = work / "judge"
    judge_dir.mkdir(parents=True)
    for path in weights.parent.glob("*.safetensors"):
        shutil.copy(path, work / path.name)
    env = {**os.environ, "OMP_NUM_THREADS": "1", FAULT_VARIABLE: name, JUDGE_VARIABLE: str(judge_dir)}
    command = [sys.executable, "-m", "gradloc.demo.trainer", "--work", str(work), "--run", f"grpo-sort-{seed}"]
    command += ["--seed", str(seed), "--steps", str(ANSWERS[name].num_steps), "--world-size", "2"]
    command += ["--store", (work / "store").as_uri()]
    ranks = []
    for rank in range(2):
        with (work / f"rank-{rank}.log").open("wb") as log:
            ranks.append(
                subprocess.Popen([*command, "--rank", str(rank)], env=env, stdout=log, stderr=subprocess.STDOUT)
            )
    codes = [rank.wait(timeout=1500) for rank in ranks]
    assert codes == [0, 0], (work / "rank-0.log").read_text() + (work / "rank-1.log").read_text()
    judge = [sys.executable, "-m", "gradloc.demo.judge", "--folder", str(judge_dir), "--world-size", "2"]
    subprocess.run(judge, env=env, check=True, timeout=600)
    kept = sorted((work / "store").glob("*/0/*/manifest.json"), key=lambda path: int(path.parent.name))
    snapshots = [path for path in kept if json.loads(path.read_text())["weights"] != "reference"]
    assert snapshots, "nothing was kept"
    _, finding = explain(snapshots[0].parent.as_uri(), Options(num_threads=1))
    rows = [json.loads(line) for line in (work / "progress.jsonl").read_text().splitlines()]
    return SimpleNamespace(
        work=work,
        truth=json.loads((judge_dir / "truth.json").read_text()),
        finding=json.loads(finding.model_dump_json()),
        outcomes=[json.loads((work / f"outcome-{rank}.json").read_text()) for rank in range(2)],
        step_times=[row["ts"] for row in rows],
        slack_texts=[],
        incidents=[{}],
        alert_at=None,
        culprit_at=None,
        redis_killed=False,
    )


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", PLAYED)
def test_a_fault_gets_its_verdict_its_cause_and_its_place(name: str, weights: Path, tmp_path: Path, betraying):
    run = played(name, 1, weights, tmp_path / "run")
    result = review(Script(name, 1, ANSWERS[name].num_steps), run)
    assert result["right"], result
    if name == "accounting":
        # The gradient is linear in the loss: divided rightly, the step is the healthy one that it was.
        assert result["fix"]["holds"] and "divide the loss" in result["fix"]["name"]
    files = [path for path in run.work.rglob("*") if path.is_file() and run.work / "judge" not in path.parents]
    assert {"manifest.json", "rank-0.safetensors", "rank-0.log", "progress.jsonl"} <= {path.name for path in files}
    told = [(path.name, str(path.relative_to(run.work))) for path in files]
    told += [(path.name, path.read_text()) for path in files if path.suffix in (".json", ".jsonl", ".log")]
    assert not [
        (where, word) for where, text in told for word in betraying if word in text.replace("default", "").lower()
    ]
