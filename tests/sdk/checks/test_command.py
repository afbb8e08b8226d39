"""The commands: exit codes, JSON, one clear line for what cannot be used."""

import gzip
import json
import math

import pytest

from gradloc.checks.planted.data import healthy_rows, vocabulary


def one_line(result):
    assert result.returncode == 2, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    return result.stderr


@pytest.fixture
def files(tmp_path):
    rows = healthy_rows()
    (tmp_path / "good.jsonl").write_text("\n".join(map(json.dumps, rows)))
    rows[3]["prompt"] = "add \0 them"
    (tmp_path / "bad.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "tokenizer.json").write_text(vocabulary().backend.to_str())
    return tmp_path


def test_data(files, gradloc):
    options = ["--tokenizer", files, "--max-tokens", 64, "--reward-range", 0, 1, "--json"]
    good = gradloc("check", "data", files / "good.jsonl", *options)
    assert good.returncode == 0, good.stdout + good.stderr
    bad = gradloc("check", "data", files / "bad.jsonl", *options)
    assert bad.returncode == 1
    (found,) = json.loads(bad.stdout)["findings"]
    assert (found["code"], found["where"]["row"], found["severity"]) == ("data.nul-character", 3, "error")


def test_what_people_read_names_place_number_and_remedy(files, gradloc):
    shown = gradloc("check", "data", files / "bad.jsonl").stdout
    assert "data.nul-character" in shown and "row 3" in shown and "remove it" in shown and "not made" in shown


def test_rewards_of_rows(files, gradloc):
    result = gradloc("check", "reward", files / "good.jsonl", "--json")
    assert result.returncode == 0, result.stdout + result.stderr


def test_rewards_of_rows_in_other_clothes(files, gradloc, tmp_path):
    rows = [{"prompt": f"q{i // 4}", "reward": float(i % 4 == 0)} for i in range(32)]
    rows[5]["reward"], rows[9]["reward"] = math.nan, 1e9
    text = "\n".join(map(json.dumps, rows))
    (tmp_path / "rows.json").write_text(text)
    with gzip.open(tmp_path / "rows.jsonl.gz", "wt") as out:
        out.write(text + "\nnot json\n")
    for name in ("rows.json", "rows.jsonl.gz"):
        result = gradloc("check", "reward", tmp_path / name, "--json")
        assert result.returncode == 1, result.stdout + result.stderr
        document = json.loads(result.stdout)
        # One absurd reward makes no rounding noise of the others.
        codes = [one["code"] for one in document["findings"]]
        assert codes == ["reward.not-a-number", "reward.advantage-outlier"]
        assert document["findings"][0]["where"] == {"index": 5, "group": "of row 4"}
        assert ("1 rows" in [one["what"] for one in document["skipped"]]) is name.endswith(".gz")
    assert gradloc("check", "data", tmp_path / "rows.json", "--json").returncode == 1


@pytest.mark.parametrize("text", ["", "\n\n", '{"foo": 1}\n' * 9])
def test_data_without_a_row_or_a_known_field_is_misuse(text, tmp_path, gradloc):
    (tmp_path / "rows.jsonl").write_text(text)
    assert "expected" in (said := one_line(gradloc("check", "data", tmp_path / "rows.jsonl"))) or "foo" in said


def test_two_tokenizers(files, gradloc):
    other = files / "other"
    other.mkdir()
    document = json.loads((files / "tokenizer.json").read_text())
    document["model"]["merges"] = document["model"]["merges"][:-1]
    document["model"]["vocab"]["qqqqq"] = 5_000
    (other / "tokenizer.json").write_text(json.dumps(document))
    tokenizers = ["--policy-tokenizer", files, "--reward-tokenizer", other]
    assert gradloc("check", "reward", *tokenizers).returncode == 1
    assert gradloc("check", "reward", *tokenizers, "--texts").returncode == 0


@pytest.mark.parametrize("layer", ["policy", "gradient", "optimizer", "reward", "data"])
def test_a_document_that_says_nothing_is_misuse(layer, tmp_path, gradloc):
    for name, text in (("a.json", '{"x": 1}'), ("b.json", "[1]"), ("c.json", "{")):
        (tmp_path / name).write_text(text)
        assert one_line(gradloc("check", layer, tmp_path / name))
    assert one_line(gradloc("check", layer, tmp_path / "missing.json"))


@pytest.mark.parametrize(
    ("layer", "document", "code"),
    [
        ("policy", {"logp": [-1.0, None], "old_logp": [-1.0, -1.0]}, "policy.logp-non-finite"),
        ("gradient", {"grad_norms": [0.4] * 40 + [math.inf]}, "gradient.non-finite"),
        ("optimizer", {"learning_rates": [1e-6, -1e-6]}, "optimizer.lr"),
        ("reward", {"rewards": [math.nan, 1.0]}, "reward.not-a-number"),
    ],
)
def test_documents_with_numbers_that_are_none(layer, document, code, tmp_path, gradloc):
    path = tmp_path / "step.json"
    path.write_text(json.dumps(document))
    result = gradloc("check", layer, path, "--json")
    assert result.returncode == 1
    assert code in [one["code"] for one in json.loads(result.stdout)["findings"]]


@pytest.mark.parametrize("document", [{}, {"logp": []}, {"logp": [[]]}, {"rewards": []}])
def test_empty_documents_do_no_harm(document, tmp_path, gradloc):
    path = tmp_path / "step.json"
    path.write_text(json.dumps(document))
    for layer in ("policy", "reward"):
        result = gradloc("check", layer, path)
        assert result.returncode in (0, 2) and "Traceback" not in result.stderr


def test_misuse(files, gradloc):
    assert gradloc("check").returncode == 2
    assert gradloc("check", "nonsense").returncode == 2
    assert gradloc("check", "reward").returncode == 2
    assert gradloc("check", "data", files / "good.jsonl", "--field", "x").returncode == 2
    assert gradloc("check", "data", files / "good.jsonl", "--reward-range", 1, 0).returncode == 2
    assert one_line(gradloc("check", "data", files / "good.jsonl", "--tokenizer", files / "none"))
    assert one_line(gradloc("triage", files / "none.log"))
    assert one_line(gradloc("doctor", files / "none"))
    assert one_line(gradloc("verify-step", files / "none"))


@pytest.mark.full
def test_the_self_test_passes(gradloc):
    result = gradloc("check", "--self-test", "--json")
    document = json.loads(result.stdout)
    assert result.returncode == 0, document
    assert document["caught"] == document["planted"] >= 60
    assert document["missed"] == document["false_findings"] == document["kinds_without_fault"] == []
    assert document["clean_setups"] == 3
