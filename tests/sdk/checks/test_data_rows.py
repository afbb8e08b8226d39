"""Data files: formats, torn ones, streaming, bounds; prompts never appear unasked."""

import gzip
import json
import tracemalloc

import pyarrow as pa
import pytest
from pyarrow import ipc, parquet

from gradloc.checks.data_rows import DataSettings, check_rows
from gradloc.checks.planted.data import healthy_rows, vocabulary
from gradloc.checks.repetition import Seen
from gradloc.checks.rows import Row, SourceRejected, open_rows, rows_of

SECRET = "the prompt that nobody may see"


def written(tmp_path, kind, rows):
    if kind == "jsonl":
        path = tmp_path / "rows.jsonl"
        path.write_text("\n".join(map(json.dumps, rows)))
    elif kind == "gz":
        path = tmp_path / "rows.jsonl.gz"
        path.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    elif kind == "parquet":
        path = tmp_path / "rows.parquet"
        parquet.write_table(pa.Table.from_pylist(rows), path)
    else:
        path = tmp_path / "saved"
        path.mkdir()
        table = pa.Table.from_pylist(rows)
        with (path / "data-00000-of-00001.arrow").open("wb") as raw, ipc.new_stream(raw, table.schema) as stream:
            stream.write_table(table)
        (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    return path


@pytest.mark.parametrize("kind", ["jsonl", "gz", "parquet", "folder"])
def test_every_format_gives_the_same_findings(kind, tmp_path):
    rows = healthy_rows()
    rows[5]["prompt"] = "add \0 numbers"
    rows[7]["reward"] = float("nan")
    source = open_rows(written(tmp_path, kind, rows))
    report = check_rows(source, DataSettings(tokens_max=64, reward_range=(0, 1)), vocabulary())
    assert [(one.code, one.where["row"]) for one in report.findings] == [
        ("data.nul-character", 5),
        ("data.reward-non-finite", 7),
    ]
    assert report.counts["rows"] == len(rows)


def test_chat_messages_are_prompts(tmp_path):
    rows = [{"prompt": [{"role": "user", "content": f"add {i}"}], "answer": str(i)} for i in range(10)]
    rows[4]["prompt"][0]["content"] = "add <eos> them"
    report = check_rows(open_rows(written(tmp_path, "jsonl", rows)), DataSettings(tokens_max=99), vocabulary())
    assert [(one.code, one.where["row"]) for one in report.findings] == [("data.special-token-in-text", 4)]


def test_a_template_in_all_prompts_is_no_accident():
    rows = [Row(i, {"prompt": f"<eos>user {i}<eos>"}) for i in range(10)]
    assert check_rows(rows, DataSettings(tokens_max=99), vocabulary()).findings == ()


def test_prompts_only_need_neither_response_nor_reward():
    rows = [Row(i, {"prompt": f"question {i}"}) for i in range(10)]
    report = check_rows(rows, DataSettings(tokens_max=99), vocabulary())
    assert report.findings == ()


def test_text_appears_only_when_asked_for():
    rows = [Row(i, {"prompt": f"{SECRET} {i}", "response": "ok"}) for i in range(10)]
    rows[3] = Row(3, {"prompt": f"{SECRET}\0", "response": ""})
    rows[4] = Row(4, {"prompt": f"{SECRET} 2", "response": SECRET})
    silent = check_rows(rows, DataSettings(tokens_max=2), vocabulary())
    assert len(silent.findings) >= 3
    assert "nobody" not in json.dumps(silent.to_json())
    shown = check_rows(rows, DataSettings(tokens_max=2, show_text=True), vocabulary())
    assert any(one.excerpt is not None and len(one.excerpt) < 80 for one in shown.findings)


@pytest.mark.parametrize("rows", [[], [Row(0, {}, "torn")]])
def test_nothing_to_look_at_is_said(rows):
    assert check_rows(rows).skipped


def test_rows_without_a_known_field_are_misuse_and_a_named_field_that_no_row_has_is_found():
    rows = list(rows_of({"question_text": f"{i}?"} for i in range(9)))
    with pytest.raises(ValueError, match="question_text"):
        check_rows(rows)
    assert check_rows(rows, DataSettings(fields={"prompt": "question_text"})).findings == ()
    (found,) = check_rows(rows, DataSettings(fields={"prompt": "qestion_text"})).findings
    assert (found.code, found.num_places) == ("data.field-missing", 9)


def test_groups_of_one_prompt_are_no_repetition_but_a_second_group_is():
    rows = [Row(i, {"prompt": f"question {i // 4}", "reward": 1.0, "uid": f"u{i // 4}"}) for i in range(16)]
    assert check_rows(rows).findings == ()
    moved = [*rows, Row(16, {"prompt": "question 0", "reward": 1.0, "uid": "u9"})]
    assert [(one.code, one.where) for one in check_rows(moved).findings] == [
        ("data.duplicate-prompt", {"row": 16, "first_row": 0})
    ]


def test_a_full_table_stops_remembering_and_says_so():
    seen = Seen(slots=16)
    assert all(seen.first_row(f"p{i}", i, i) is None for i in range(40))
    assert seen.is_full and seen.num_tracked == 12
    assert seen.first_row("p3", 99, 99) == 3


def test_sparse_rewards_are_no_outliers():
    rows = [Row(i, {"prompt": f"q{i}", "reward": 5.0 if i == 77 else 0.0}) for i in range(400)]
    assert check_rows(rows).findings == ()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b'{"prompt": "a"}\nnot json\n', "not JSON"),
        (b'{"prompt": "a"}\n[1, 2]\n', "JSON list"),
        (b'{"prompt": "a"}\n{"prompt": "\xff"}\n', "UTF-8"),
        (b'{"prompt": "a"}\n' + b"[" * 100_000 + b"\n", "JSON"),
    ],
)
def test_a_torn_row_is_one_finding_and_the_rest_is_read(content, says, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content + b'{"prompt": "b"}\n')
    report = check_rows(open_rows(path))
    (found,) = report.findings
    assert found.code == "data.row-unreadable" and says in found.what and found.where == {"row": 1}
    assert report.counts["rows"] == 3


def test_a_truncated_gzip_is_one_finding(tmp_path):
    path = written(tmp_path, "gz", healthy_rows())
    path.write_bytes(path.read_bytes()[:-40])
    assert "data.row-unreadable" in check_rows(open_rows(path)).codes


@pytest.mark.parametrize(
    ("name", "content"), [("rows.parquet", b"PAR1nope"), ("rows.xyz", b""), ("missing.jsonl", None)]
)
def test_a_source_that_cannot_be_read_is_refused_in_one_line(name, content, tmp_path):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SourceRejected, match=name.split(".")[0]):
        open_rows(path)


def test_memory_does_not_grow_with_the_rows():
    def rows(num):
        for i in range(num):
            bad = {"reward": None} if i % 50 == 0 else {"reward": 1.0}
            yield Row(i, {"prompt": f"question number {i}", "response": "an answer", **bad})

    peaks = []
    for num in (4_000, 16_000):
        tracemalloc.start()
        check_rows(rows(num))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.05 * peaks[0]
