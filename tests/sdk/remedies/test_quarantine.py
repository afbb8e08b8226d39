"""Quarantine: what may enter, what a loader sees, and that every decision stays on record."""

from pathlib import Path
from typing import Any

import pytest

from gradloc.quarantine import Quarantine
from gradloc_proto.messages import Certificate, Cost, Culprit, Fidelity, Finding


def finding(**changed: Any) -> Finding:
    fields: dict[str, Any] = {
        "verdict": "token",
        "strategy": "attribution",
        "step": 12,
        "summary": "one token holds 99 % of the squared norm",
        "culprits": (
            Culprit(rank=0, micro_batch=0, sequence=1, token=5, share=0.9, uid="gsm8k/17"),
            Culprit(rank=0, micro_batch=0, sequence=1, token=6, share=0.05, uid="gsm8k/17"),
            Culprit(rank=1, micro_batch=0, sequence=2, token=3, share=0.04),
        ),
        "certificate": Certificate(grad_norm=640.0, norm_without=0.43, limit=1.6, holds=True, num_culprits=3),
        "fidelity": Fidelity(reported_norm=640.0, replayed_norm=640.0, rel_error=0.0, tolerance=1e-3, reproduced=True),
        "cost": Cost(steps=1.0),
    }
    return Finding(**(fields | changed))


def quarantine_in(folder: Path) -> Quarantine:
    return Quarantine(folder / "deep" / "quarantine.jsonl", clock=lambda: 1_000.0)


def test_a_proved_findings_samples_are_left_out_by_the_loader(tmp_path: Path) -> None:
    quarantine = quarantine_in(tmp_path)
    assert quarantine.add_finding(finding(), run_id="run-1", by="alice") == ("gsm8k/17",)
    rows = [{"uid": "gsm8k/16"}, {"uid": "gsm8k/17"}, {"uid": "gsm8k/18"}]
    assert [row["uid"] for row in quarantine.keep(rows, lambda row: row["uid"])] == ["gsm8k/16", "gsm8k/18"]
    (entry,) = quarantine.history
    assert (entry.by, entry.run_id, entry.step, entry.verdict, entry.ts) == ("alice", "run-1", 12, "token", 1_000.0)
    assert "99 %" in entry.reason


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"verdict": "batch-wide"}, "no sample's fault"),
        ({"verdict": "mask"}, "no sample's fault"),
        ({"verdict": "not-reproduced"}, "no sample's fault"),
        ({"certificate": None}, "not proved"),
        (
            {"certificate": Certificate(grad_norm=9.0, norm_without=8.0, limit=1.6, holds=False, num_culprits=1)},
            "not proved",
        ),
        (
            {
                "fidelity": Fidelity(
                    reported_norm=640.0, replayed_norm=0.4, rel_error=1.0, tolerance=1e-3, reproduced=False
                )
            },
            "not proved",
        ),
        ({"culprits": (Culprit(rank=0, micro_batch=0, sequence=1, token=5, share=0.9),)}, "have no uid"),
    ],
)
def test_a_finding_that_proves_nothing_against_a_sample_is_refused(
    tmp_path: Path, changed: dict[str, Any], said: str
) -> None:
    quarantine = quarantine_in(tmp_path)
    with pytest.raises(ValueError, match=said):
        quarantine.add_finding(finding(**changed), run_id="run-1", by="alice")
    assert len(quarantine) == 0


def test_a_release_is_one_more_line_and_survives_a_restart(tmp_path: Path) -> None:
    quarantine = quarantine_in(tmp_path)
    quarantine.add(17, reason="garbled", by="alice")
    quarantine.add(18, reason="garbled", by="alice")
    quarantine.release(17, reason="cleaned", by="bob")
    again = Quarantine(quarantine.path)
    assert again.uids == {"18"}
    assert 18 in again and "18" in again and 17 not in again
    assert [(one.action, one.uid, one.by) for one in again.history] == [
        ("quarantined", "17", "alice"),
        ("quarantined", "18", "alice"),
        ("released", "17", "bob"),
    ]


def test_lines_that_cannot_be_read_are_counted_and_harm_nothing(tmp_path: Path) -> None:
    path = tmp_path / "quarantine.jsonl"
    quarantine = Quarantine(path)
    quarantine.add("a", reason="x", by="alice")
    with path.open("ab") as file:
        file.write(b'not json\n{"action":"quarantined","uid":5,"ts":1}\n[1]\n\xff\xfe\n\n{"action":"quaran')
    again = Quarantine(path)
    assert again.num_rejected == 5
    again.add("b", reason="x", by="alice")  # after a line cut short by a crash
    assert Quarantine(path).uids == {"a", "b"}


def test_one_writes_and_others_see_it_when_they_look_again(tmp_path: Path) -> None:
    writer, reader = quarantine_in(tmp_path), quarantine_in(tmp_path)
    writer.add("a", reason="x", by="alice")
    assert "a" not in reader
    reader.reload()
    assert "a" in reader


def test_what_cannot_be_meant_is_refused(tmp_path: Path) -> None:
    quarantine = quarantine_in(tmp_path)
    for uid in ("", "x" * 513):
        with pytest.raises(ValueError, match="uid has"):
            quarantine.add(uid, reason="x", by="alice")
    with pytest.raises(ValueError, match="no reason"):
        quarantine.add("a", reason=" ", by="alice")
    with pytest.raises(ValueError, match="not in quarantine"):
        quarantine.release("a", reason="x", by="alice")
    assert not quarantine.path.exists()
