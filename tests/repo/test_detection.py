"""benchmarks/detector.py scores labelled traces as their README says."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

NUM_ROWS = 90


def write(folder: Path, norms: dict[str, list[object]], labels: dict[str, dict[str, object]]) -> None:
    known = {"spikes": [], "unarguable": [], "ambiguous": [], "init_transient": [], "onset_of_collapse": None}
    (folder / "labels.json").write_text(json.dumps({name: known | labels.get(name, {}) for name in norms}))
    index = "".join(f"{name}\tsource-of-{name}:file\n" for name in norms)
    (folder / "INDEX.tsv").write_text("name\tsource\n" + index)
    for name, values in norms.items():
        rows = "".join(f"{row},{value},,\n" for row, value in enumerate(values))
        (folder / f"{name}.csv").write_text("step,grad_norm,loss,reward\n" + rows)


def measured(repository: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "benchmarks/detector.py", "--traces", str(folder), "--runs", "0", "--json"],
        cwd=repository,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_caught_missed_ignored_and_false_are_counted_as_the_protocol_says(repository: Path, tmp_path: Path):
    calm: list[object] = [1.0 + 0.1 * (row % 7) for row in range(NUM_ROWS)]
    noisy, wrong, broken = calm.copy(), calm.copy(), calm.copy()
    noisy[12] = noisy[40] = noisy[60] = 50.0  # before the scored rows; caught; ambiguous
    noisy[70] = ""  # not logged
    wrong[50] = 50.0  # not labelled: a false alarm
    wrong[80] = 2.0  # labelled and missed
    broken[45] = "nan"
    for row in range(60, NUM_ROWS):
        broken[row] = 100.0
    write(
        tmp_path,
        {"noisy": noisy, "wrong": wrong, "broken": broken},
        {
            "noisy": {"spikes": [12, 40], "unarguable": [12, 40], "ambiguous": [60]},
            "wrong": {"spikes": [80]},
            "broken": {"spikes": [45, 60], "unarguable": [45], "onset_of_collapse": 60},
        },
    )
    result = measured(repository, tmp_path)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    ours = {row["name"]: row for row in found["rules"]}["gradloc"]
    assert (ours["definite_caught"], ours["definite_total"]) == (3, 4)
    assert (ours["unarguable_caught"], ours["unarguable_total"]) == (2, 2)
    assert ours["collapses_in_traces"] == [1, 1]
    assert ours["false_alarms"] == 1
    # Rows 25 to the end or the onset, without spikes, the rows after them and what is ambiguous.
    assert ours["healthy_steps"] == (65 - 3) + (65 - 2) + (36 - 2 - 1)
    assert ours["false_alarms_per_1000"] == pytest.approx(1000 / ours["healthy_steps"], abs=1e-3)
    assert [row["source"] for row in found["leave_one_source_out"]][-1] == "all left out"
    assert len(found["leave_one_source_out"]) == 4
    assert {row["rule"] for row in found["matched"]} == {row["name"] for row in found["rules"]}
    assert found["sweep"] and found["synthetic"] == []


def test_a_folder_without_labels_is_refused_in_one_line(repository: Path, tmp_path: Path):
    result = measured(repository, tmp_path)
    assert result.returncode == 2
    assert "expected INDEX.tsv, labels.json" in result.stderr
