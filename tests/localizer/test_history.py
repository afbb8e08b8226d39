"""The findings of a run over time, and runs compared: what came first, what remained after a fix."""

import json
import math

import pytest
from click.testing import CliRunner

from gradloc_localizer.history import Found, compare, history_of
from gradloc_localizer.history_command import history
from gradloc_localizer.html_report import history_page
from gradloc_proto.messages import Finding

HOSTILE = "<script>alert(1)</script>"


def finding(step, cause="token-mismatch", norm=640.0, **more):
    known = {
        "verdict": "token",
        "strategy": "attribution",
        "step": step,
        "summary": "one token",
        "culprits": [{"rank": 0, "micro_batch": 0, "sequence": 1, "token": 9, "share": 0.9, "token_id": 7, "uid": "u"}],
        "certificate": {
            "grad_norm": norm, "norm_without": 0.5, "limit": 1.6, "holds": True, "num_culprits": 1,
        },
        "fidelity": {
            "reported_norm": norm, "replayed_norm": norm, "rel_error": 0.0, "tolerance": 1e-3, "reproduced": True,
        },
        "causes": [{"name": cause, "confidence": "high", "summary": "why"}],
        "fix": {"name": "TokenClip [0.5, 5]", "norm_after": 0.44, "holds": True},
        "healthy_norm": 0.4,
        "cost": {"steps": 1.0},
    }  # fmt: skip
    return Finding.model_validate(known | more)


def of(run, *findings, attempt=0, **facts):
    return history_of(run, [Found(run, attempt, one) for one in findings], **facts)


def test_findings_in_a_row_with_one_cause_are_one_episode_told_by_its_worst():
    run = of("a", finding(30, "layer-heterogeneity"), finding(12, norm=9.0), finding(10), finding(40))
    assert [(one.cause, one.first[1], one.last[1], one.num_findings) for one in run.episodes] == [
        ("token-mismatch", 10, 12, 2),
        ("layer-heterogeneity", 30, 30, 1),
        ("token-mismatch", 40, 40, 1),
    ]
    first = run.episodes[0]
    assert (first.norm, first.times_healthy, first.norm_without) == (640.0, 1600.0, 0.5)
    assert (first.fix, first.tokens, first.uids) == ("TokenClip [0.5, 5]", (7,), ("u",))


def test_an_attempt_begins_after_the_one_before_and_a_second_finding_of_a_step_replaces_the_first():
    early, late = Found("a", 0, finding(50)), Found("a", 1, finding(20, "reward-drop"))
    run = history_of("a", [late, Found("a", 0, finding(50, "mask-fault")), early])
    assert [one.cause for one in run.episodes] == ["token-mismatch", "reward-drop"]


def test_causes_are_followed_from_run_to_run():
    one = of("one", finding(10), finding(20, "layer-heterogeneity"), finding(30), labels={"clip": "none", "lr": "1"})
    two = of("two", finding(40, "layer-heterogeneity"), finding(50, "mask-fault"), labels={"clip": "token", "lr": "1"})
    three = of("three", finding(70, "layer-heterogeneity"), finding(5, "reward-drop"))
    told = compare([one, two, three])
    assert [(course.cause, course.counts, course.fate) for course in told.courses] == [
        ("token-mismatch", (2, 0, 0), "gone"),
        ("layer-heterogeneity", (1, 1, 1), "remained"),
        ("mask-fault", (0, 1, 0), "gone"),
        ("reward-drop", (0, 0, 1), "new"),
    ]
    assert told.changed_labels[:2] == ({}, {"clip": ("none", "token")})
    assert compare([one]).courses[0].fate == "only run"
    gone_before = compare([of("none"), one, of("calm"), of("calm too")])
    assert {course.fate for course in gone_before.courses} == {"came and went"}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 0.0])
def test_numbers_that_are_not_finite_are_told_as_they_are(bad, tmp_path):
    fidelity = {"reported_norm": bad, "replayed_norm": bad, "rel_error": bad, "tolerance": bad, "reproduced": True}
    odd = finding(3, fidelity=fidelity, healthy_norm=bad)
    told = compare([of("a", finding(1), odd, finding(2, norm=bad))])
    assert "What spiked in a" in history_page(told)
    path = tmp_path / "a.json"
    path.write_text(odd.model_dump_json())
    result = CliRunner().invoke(history, [str(path), "--json"])
    assert result.exit_code == 0
    json.loads(result.stdout, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_files_of_findings_and_of_messages_become_text_json_and_a_page(tmp_path):
    plain, stream, page = tmp_path / "first.jsonl", tmp_path / "stream.jsonl", tmp_path / "page.html"
    plain.write_text("\n".join(one.model_dump_json() for one in (finding(10), finding(11))))
    lines = [
        {"type": "run_started", "run_id": "clipped", "attempt": 0, "labels": {"clip": HOSTILE}},
        {"type": "step_observed", "run_id": "clipped", "attempt": 0, "step": 99},
        {
            "type": "localization_finished", "run_id": "clipped", "attempt": 2,
            "finding": json.loads(finding(90, "layer-heterogeneity").model_dump_json()),
        },
    ]  # fmt: skip
    stream.write_text("\n".join(json.dumps(line) for line in lines))
    result = CliRunner().invoke(history, [str(plain), str(stream), "--html", str(page)], terminal_width=200)
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())  # a terminal breaks lines where it likes
    for words in ("first · 2 findings", "clipped · 1 finding in 100 steps", "10 to 11", "token-mismatch 2 - gone"):
        assert words in text
    told = json.loads(CliRunner().invoke(history, [str(plain), str(stream), "--json"]).stdout)
    assert [run["run_id"] for run in told["runs"]] == ["first", "clipped"]
    assert told["runs"][1]["episodes"][0]["first"] == [2, 90]
    assert told["courses"][0] == {"cause": "token-mismatch", "counts": [2, 0], "fate": "gone"}
    text = page.read_text()
    assert HOSTILE not in text and "&lt;script&gt;" in text and "From run to run" in text
    assert "clipped against the one before" in text and "<script" not in text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no finding"),
        ("{}", "holds no finding"),
        ("[1, 2]", "holds no finding"),
        ('{"a": 1}\n{', "line 2: not JSON"),
        ('{"verdict": "token", "fidelity": {}}', "a finding that is none"),
        ("\x00" * 9, "line 1: not JSON"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_a_file_that_holds_none_is_one_line_and_exit_code_2(tmp_path, text, said):
    path = tmp_path / "bad.json"
    path.write_text(text)
    result = CliRunner().invoke(history, [str(path)])
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert said in line and line.startswith("gradloc history: ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere.json"], "nowhere.json: No such file"),
        (["run", "--reporter", "ftp://x"], "expected http"),
        (["run", "--reporter", "http://127.0.0.1:9"], "no answer from the reporter"),
    ],
)
def test_what_cannot_be_read_is_one_line(arguments, said):
    result = CliRunner().invoke(history, arguments)
    assert result.exit_code == 2
    assert said in result.stderr and len(result.stderr.splitlines()) == 1
