"""`gradloc whatif`: the saved step under remedies; a table for people, one line of JSON for machines."""

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from gradloc_localizer.whatif_command import whatif


@pytest.fixture
def run(tmp_path):
    def run(*arguments):
        return CliRunner().invoke(whatif, [*arguments, "--threads", "1", "--device", "cpu"], terminal_width=200)

    return run


@pytest.fixture
def snapshot(trainer, tmp_path):
    """A step with a stale token at rank 1, micro-batch 0, sequence 2, position 9."""
    step = trainer.faulty(trainer.model(), trainer.stale(9.0))
    folder = tmp_path / "run" / "0" / "7"
    step.write(f"file://{folder}")
    return folder


def rows_of(result):
    assert result.exit_code == 0, result.output
    (line,) = result.stdout.splitlines()
    return {row["name"]: row for row in json.loads(line)["rows"]}


def test_without_options_every_remedy_is_tried_with_its_defaults(run, snapshot):
    rows = rows_of(run(str(snapshot), "--json"))
    assert list(rows)[:3] == ["as it is", "without the culprits", "TokenClip [0.5, 5]"]
    assert {"SeqClip [0.8, 1.25]", "AdvantageClip 5", "LayerClip"} <= set(rows)
    assert not rows["as it is"]["holds"] and rows["without the culprits"]["holds"]
    token_clip, clipped = rows["TokenClip [0.5, 5]"], list(rows.values())[-1]
    assert token_clip["holds"] and token_clip["num_changed"] == 1
    # Leaving the token out is what TokenClip does here; scaling the whole gradient turns nothing.
    assert token_clip["norm"] == pytest.approx(rows["without the culprits"]["norm"], rel=1e-6)
    assert token_clip["cosine"] == pytest.approx(1.0, abs=1e-6)
    assert clipped["holds"] and clipped["cosine"] == pytest.approx(rows["as it is"]["cosine"], abs=1e-9)
    assert rows["as it is"]["cosine"] < 0.5
    assert set(token_clip["layer_norms"]) == set(rows["as it is"]["layer_norms"])


def test_a_token_or_a_whole_sequence_is_dropped_as_findings_name_them(run, snapshot):
    rows = rows_of(run(str(snapshot), "--json", "--drop", "1:0:2:9", "--drop", "0:1:3"))
    dropped = rows["without rank 1, micro-batch 0, sequence 2, token 9"]
    assert dropped["norm"] == pytest.approx(rows["without the culprits"]["norm"], rel=1e-6)
    assert dropped["num_changed"] == 1
    assert rows["without rank 0, micro-batch 1, sequence 3"]["num_changed"] > 1
    assert len(rows) == 4


def test_bounds_are_the_users(run, snapshot):
    rows = rows_of(
        run(
            str(snapshot),
            "--json",
            "--token-clip",
            "0.1:20000:clip",
            "--seq-clip",
            "0.01:100:product",
            "--clip-norm",
            "2",
        )
    )
    names = list(rows)[2:]
    assert names == ["TokenClip [0.1, 20000], clip", "SeqClip [0.01, 100], product", "clip the norm to 2"]
    assert rows[names[0]]["norm"] == rows["as it is"]["norm"]
    assert rows[names[2]]["norm"] == pytest.approx(2.0)


def test_the_table_says_which_would_have_held(run, snapshot):
    result = run(str(snapshot))
    assert result.exit_code == 0
    text = " ".join(result.stdout.split())
    for words in ("verdict: token", "as it is", "too large", "TokenClip [0.5, 5]", "holds", "cosine:"):
        assert words in text


def test_what_the_snapshot_does_not_hold_is_said(run, trainer, tmp_path):
    step = trainer.faulty(trainer.model(), trainer.stale(9.0))
    step.ranks = [
        tuple(replace(batch, rollout_logp_BR=None, advantage_BR=None) for batch in rank) for rank in step.ranks
    ]
    url = step.write(f"file://{tmp_path}/bare/0/7", healthy_layer_norms={})
    result = run(url)
    assert result.exit_code == 0, result.output
    assert "TokenClip [0.5, 5]: not tried, the snapshot holds no rollout_logp" in result.stdout
    assert "AdvantageClip 5: not tried, the snapshot holds no advantage" in result.stdout
    assert run(url, "--layer-clip").stderr == (
        "gradloc whatif: layer-clip: the snapshot holds no healthy layer norms to compare with\n"
    )


def test_a_step_that_is_not_finite_is_told_in_strict_json(run, trainer, tmp_path):
    step = trainer.faulty(trainer.model(), trainer.stale(float("inf")))
    url = step.write(f"file://{tmp_path}/nan/0/7")
    rows = rows_of(run(url, "--json"))
    assert rows["as it is"]["norm"] == "NaN"
    assert rows["as it is"]["holds"] is False and rows["as it is"]["cosine"] is None
    assert rows["TokenClip [0.5, 5]"]["holds"] is True


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--drop", "1:0"], "expected RANK:MICRO:SEQ"),
        (["--drop", "1:0:-2"], "expected RANK:MICRO:SEQ"),
        (["--drop", "9:0:0"], "the step has ranks 0 to 1"),
        (["--drop", "1:7:0"], "rank 1 has micro-batches 0 to 1"),
        (["--drop", "1:0:77"], "sequences 0 to 3"),
        (["--drop", "1:0:2:0"], "its answer has tokens 6 to 17"),
        (["--token-clip", "5"], "expected LOW:HIGH"),
        (["--token-clip", "2:5"], "a healthy ratio"),
        (["--token-clip", "0.5:5:squash"], "expected 'clip' or 'mask'"),
        (["--seq-clip", "0.5:nan"], "SeqClip: bounds"),
    ],
)
def test_what_cannot_be_meant_is_one_line(run, snapshot, arguments, reason):
    result = run(str(snapshot), *arguments)
    assert result.exit_code == 2
    assert reason in result.stderr
    assert len(result.stderr.splitlines()) == 1
