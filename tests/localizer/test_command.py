"""`gradloc localize`: a report for people, one line of JSON for machines, one clear line for bad input."""

import json

import pytest
from click.testing import CliRunner

from gradloc_localizer.command import localize
from gradloc_proto.messages import Finding


@pytest.fixture
def run():
    def run(*arguments):
        return CliRunner().invoke(localize, [*arguments, "--threads", "1", "--device", "cpu"], terminal_width=200)

    return run


@pytest.fixture
def snapshot(trainer, tokenizer_json, tmp_path):
    """Folder of a snapshot with a stale token at rank 1, micro-batch 0, sequence 2, position 9."""
    step = trainer.faulty(trainer.model(), trainer.stale(9.0))
    folder = tmp_path / "run" / "0" / "7"
    step.write(f"file://{folder}", tokenizer_json=tokenizer_json)
    return folder


@pytest.mark.parametrize("strategy", ["attribution", "bisect"])
def test_json_is_one_line_that_is_a_finding(run, snapshot, strategy):
    result = run(str(snapshot), "--json", "--strategy", strategy)
    assert result.exit_code == 0, result.output
    (line,) = result.stdout.splitlines()
    finding = Finding.model_validate_json(line)
    culprit = finding.culprits[0]
    assert (finding.verdict, finding.strategy, finding.step) == ("token", strategy, 7)
    assert (culprit.rank, culprit.micro_batch, culprit.sequence, culprit.token) == (1, 0, 2, 9)
    assert culprit.token_text == f"w{culprit.token_id}"
    view = finding.sequence_view
    assert view.token_texts[9 - view.first_position] == culprit.token_text
    assert len(view.shares) == len(view.token_ids) == len(view.token_texts)
    # The summary goes into logs: no text of a token in it.
    assert culprit.token_text not in finding.summary


def test_the_report_says_who_proof_why_and_what_to_do(run, snapshot):
    result = run(str(snapshot))
    assert result.exit_code == 0
    for words in ("verdict: token", "Proof", "proved", "train/inference mismatch", "TokenClip [0.5, 5]", "reproduced"):
        assert words in " ".join(result.stdout.split())


def test_a_limit_given_replaces_the_snapshots(run, snapshot):
    finding = Finding.model_validate_json(run(str(snapshot), "--json", "--limit", "123.5").stdout)
    assert finding.certificate.limit == 123.5


def damage_nothing(folder):
    return folder


def missing(folder):
    return folder.parent / "8"


def truncated_weights(folder):
    path = folder / "weights" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    return folder


def altered_batch(folder):
    path = folder / "batch" / "rank-1.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    return folder


def missing_batch(folder):
    (folder / "batch" / "rank-0.safetensors").unlink()
    return folder


def not_json(folder):
    (folder / "manifest.json").write_bytes(b'{"format": "gradloc-sna')
    return folder


def edited(**changes):
    def damage(folder):
        path = folder / "manifest.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
        return folder

    return damage


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (missing, "no snapshot at"),
        (truncated_weights, "truncated or altered"),
        (altered_batch, "was altered: sha256"),
        (missing_batch, "rank-0.safetensors is missing"),
        (not_json, "truncated or not JSON"),
        (edited(version=99), "unknown version 99, expected 1"),
        (edited(format="zip"), "not of format"),
        (edited(grad_norm="much"), "grad_norm"),
        (edited(world_size=3), "parts of ranks"),
        (edited(parameter_dtype="int3"), "unknown number format"),
        (edited(model_config_hf=None), "neither a Hugging Face configuration nor a factory"),
    ],
)
def test_bad_input_is_one_clear_line_and_exit_code_2(run, snapshot, damage, reason):
    result = run(str(damage(snapshot)), "--json")
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("gradloc localize: ")
    assert reason in line


def test_ids_outside_the_vocabulary_are_refused(run, trainer, tmp_path):
    """They would read beside the embedding table."""
    step = trainer.faulty(trainer.model(), None)
    step.ranks[0][0].ids_BT[0, 0] = 48
    result = run(step.write(f"file://{tmp_path}/run/0/7"), "--json")
    assert result.exit_code == 2
    assert "outside the model's vocabulary of 48" in result.stderr


def test_a_tokenizer_that_is_none_is_refused(run, trainer, tmp_path):
    step = trainer.faulty(trainer.model(), None)
    result = run(step.write(f"file://{tmp_path}/run/0/7", tokenizer_json="[]"), "--json")
    assert result.exit_code == 2
    assert "tokenizer.json" in result.stderr


@pytest.mark.parametrize(
    "arguments", [(), ("x", "--strategy", "guess"), ("x", "--limit", "-1"), ("x", "--threads", "0")]
)
def test_misuse_is_exit_code_2(arguments):
    assert CliRunner().invoke(localize, list(arguments)).exit_code == 2


@pytest.mark.parametrize("device", ["warp", "cuda:99"])
def test_a_device_that_is_not_there_is_refused(snapshot, device):
    result = CliRunner().invoke(localize, [str(snapshot), "--device", device])
    assert result.exit_code == 2
    assert device in result.stderr


def test_a_store_that_cannot_be_opened_is_one_line(run):
    result = run("nosuch://bucket/run/0/7")
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1


def test_redacted_there_is_no_text_of_the_run_in_any_form(run, snapshot, tmp_path):
    page = tmp_path / "page.html"
    told = run(str(snapshot), "--json").stdout
    culprit = json.loads(told)["culprits"][0]
    words = (culprit["uid"], f'"{culprit["token_text"]}"', f">{culprit['token_text']}<", f"'{culprit['token_text']}'")
    told += run(str(snapshot), "--html", str(page)).output + page.read_text()
    assert [word in told for word in words] == [True] * 4
    quiet = run(str(snapshot), "--json", "--redact").output
    result = run(str(snapshot), "--html", str(page), "--redact")
    assert result.exit_code == 0, result.output
    quiet += result.output + page.read_text()
    assert '"token_id"' in quiet
    assert [word in quiet for word in words] == [False] * 4
