"""A finished run's log, whatever wrote it, is judged as it would have been live."""

import json
import math
import struct

import numpy as np
import pytest
from click.testing import CliRunner

from gradloc.trace_replay import files
from gradloc.trace_replay.command import replay
from gradloc.trace_replay.judged import judged
from gradloc_proto.rules import Sensitivity

SPIKE = 50


@pytest.fixture
def norms():
    values = np.exp(0.2 * np.random.default_rng(0).normal(size=80)) * 0.4
    values[SPIKE] = 640.0
    return values.tolist()


def varint(value):
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def field(number, payload):
    return varint(number << 3 | 2) + varint(len(payload)) + payload


def frame(event):
    return struct.pack("<Q", len(event)) + b"\0\0\0\0" + event + b"\0\0\0\0"


def events(norms, *, as_tensor):
    data = frame(varint(1 << 3 | 1) + struct.pack("<d", 1.0) + field(3, b"brain.Event:2"))
    for step, norm in enumerate(norms):
        number = struct.pack("<f", norm)
        value = field(8, varint(1 << 3) + varint(1) + field(5, number)) if as_tensor else varint(2 << 3 | 5) + number
        summary = field(1, field(1, b"train/grad_norm") + value)
        data += frame(varint(2 << 3) + varint(step) + field(5, summary))
    return data


def trainer_state(norms):
    history = [{"step": step, "grad_norm": norm, "loss": 0.1, "epoch": 0.1} for step, norm in enumerate(norms)]
    return json.dumps({"log_history": [*history, {"step": len(norms), "train_runtime": 3.0}]})


LOGS = {
    "run.csv": lambda norms: "step,grad_norm,loss\n" + "".join(f"{i},{norm},\n" for i, norm in enumerate(norms)),
    "wandb_export.csv": lambda norms: (
        '"Step","red-fox-7 - train/grad_norm","red-fox-7 - train/grad_norm__MIN"\n'
        + "".join(f'"{i}","{norm}","0"\n' for i, norm in enumerate(norms))
    ),
    "trainer_state.json": trainer_state,
    "history.jsonl": lambda norms: "".join(
        json.dumps({"_step": i, "train/grad_norm": norm}) + "\n" for i, norm in enumerate(norms)
    ),
    "trl.log": lambda norms: (
        "loading\n"
        + "".join(f"{{'loss': 0.0, 'grad_norm': {norm}, 'learning_rate': 1e-06, 'epoch': 0.0}}\n" for norm in norms)
    ),
    "trl_new.log": lambda norms: "".join(f"{{'loss': '0.0', 'grad_norm': '{norm}', 'epoch': '0'}}\n" for norm in norms),
    "verl.log": lambda norms: "".join(
        f"\x1b[36m(TaskRunner pid=1)\x1b[0m step:{i} - actor/pg_loss:0.01 - actor/grad_norm:{norm} - "
        f"critic/rewards/mean:0.5 - perf/mfu/actor:0.2\n"
        for i, norm in enumerate(norms)
    ),
    "verl_numpy.log": lambda norms: "".join(
        f"step:{i} - actor/grad_norm:np.float64({norm}) - critic/score/mean:np.float64(0.5)\n"
        for i, norm in enumerate(norms)
    ),
    "events.out.tfevents.1": lambda norms: events(norms, as_tensor=False),
    "events.out.tfevents.2": lambda norms: events(norms, as_tensor=True),
}


def written(folder, name, norms):
    content = LOGS[name](norms)
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def run(*arguments):
    return CliRunner().invoke(replay, [str(argument) for argument in arguments])


@pytest.mark.parametrize("name", LOGS)
def test_the_spike_is_found_in_every_format(name, norms, tmp_path):
    result = run(written(tmp_path, name, norms), "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert found["num_steps"] == len(norms)
    assert found["flagged_steps"] == [SPIKE]
    (flag,) = found["flags"]
    assert flag["rule"] == "norm"
    assert flag["value"] == pytest.approx(640.0)
    assert flag["limit"] < 640 and flag["baseline"] == pytest.approx(0.4, rel=0.3)


@pytest.mark.parametrize("name", LOGS)
def test_a_healthy_run_is_told_healthy(name, norms, tmp_path):
    norms[SPIKE] = 0.4
    result = run(written(tmp_path, name, norms))
    assert result.exit_code == 0
    assert "80 steps, healthy" in result.output


@pytest.mark.parametrize("name", LOGS)
def test_nan_infinity_and_zeros_are_read_and_only_the_first_two_flagged(name, norms, tmp_path):
    norms[SPIKE], norms[20], norms[30] = math.nan, math.inf, 0.0
    if name == "history.jsonl":
        assert "NaN" in LOGS[name](norms)
    result = run(written(tmp_path, name, norms), "--json")
    found = json.loads(result.output)
    assert found["flagged_steps"] == [20, SPIKE]
    assert {flag["rule"] for flag in found["flags"]} == {"non-finite"}
    assert [flag["value"] for flag in found["flags"]] == ["Infinity", "NaN"]


def test_a_log_cut_off_in_the_middle_gives_what_it_holds(norms, tmp_path):
    for name in ("history.jsonl", "events.out.tfevents.1", "verl.log"):
        path = written(tmp_path, name, norms)
        path.write_bytes(path.read_bytes()[: -len(path.read_bytes()) // 4])
        kind, rows = files.read(path)
        assert 50 <= len(rows) < 80, kind


def test_rows_without_a_norm_are_left_out(tmp_path):
    path = tmp_path / "run.csv"
    path.write_text("step,grad_norm,reward\n0,0.5,1\n1,,1\n2,0.4,\n3,n/a,1\n")
    _, rows = files.read(path)
    assert [(row.step, row.norm, row.reward) for row in rows] == [(0, 0.5, 1.0), (2, 0.4, None)]


def test_a_restart_learns_anew_and_a_repeated_step_counts_once(norms, tmp_path):
    lines = [f"{step},{norm}" for step, norm in enumerate(norms[:SPIKE])]
    again = [f"{step},{100 * norm}" for step, norm in enumerate(norms[:SPIKE], 10)]
    path = tmp_path / "run.csv"
    path.write_text("\n".join(["step,grad_norm", *lines, lines[-1], *again]))
    found = json.loads(run(path, "--json").output)
    assert (found["num_restarts"], found["num_repeated"], found["flagged_steps"]) == (1, 1, [])


def test_sensitivity_is_the_size_of_spike_that_is_tolerated(norms, tmp_path):
    norms[SPIKE] = 2.5
    path = written(tmp_path, "run.csv", norms)
    assert json.loads(run(path, "--json").output)["num_flagged"] == 1
    assert json.loads(run(path, "--json", "--sensitivity", 3).output)["num_flagged"] == 0


def test_reward_cliffs_are_told_from_the_log_too(tmp_path):
    rewards = 0.6 + 0.05 * np.random.default_rng(1).normal(size=80)
    rewards[60:] -= 0.5
    path = tmp_path / "run.csv"
    path.write_text("step,grad_norm,reward\n" + "".join(f"{i},0.5,{reward}\n" for i, reward in enumerate(rewards)))
    assert [flag["rule"] for flag in json.loads(run(path, "--json").output)["flags"]] == ["reward-cliff"]


def test_the_series_of_the_json_has_the_limit_of_each_step(norms, tmp_path):
    found = json.loads(run(written(tmp_path, "run.csv", norms), "--json", "--series").output)
    assert len(found["series"]) == len(norms)
    assert found["series"][0]["limit"] is None
    assert found["series"][SPIKE]["limit"] < 640 == found["series"][SPIKE]["norm"]


@pytest.mark.parametrize("value", [640.0, math.nan, 0.0])
def test_the_pictures_show_norm_limit_and_flag(value, norms, tmp_path):
    norms[SPIKE] = value
    path = written(tmp_path, "run.csv", norms)
    for name in ("plot.html", "plot.png"):
        result = run(path, "--plot", tmp_path / name)
        assert result.exit_code == 0, result.output
    page = (tmp_path / "plot.html").read_text()
    assert page.count('<circle class="flag"') == (value != 0.0)
    assert 'polyline class="norm"' in page and 'polyline class="limit"' in page
    assert "<script" not in page and "http" not in page
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_what_a_log_says_cannot_become_markup(norms, tmp_path):
    path = tmp_path / "<b>run.csv"
    path.write_text(LOGS["run.csv"](norms))
    assert run(path, "--plot", tmp_path / "plot.html").exit_code == 0
    assert "<b>" not in (tmp_path / "plot.html").read_text()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not a log that is known"),
        (b"step,loss\n1,2\n", "no gradient norm among the columns"),
        (b"step,grad_norm\n1,\n", "holds no number"),
        (b"hello world\n", "not a log that is known"),
        (bytes(range(256)) * 4, "expected"),
    ],
)
def test_what_is_no_log_is_refused_in_one_line(content, reason, tmp_path):
    path = tmp_path / "run.txt"
    path.write_bytes(content)
    result = run(path)
    assert result.exit_code == 2
    assert reason in result.output


@pytest.mark.parametrize(
    "arguments",
    [("missing.csv",), ("run.json",), ("run.csv", "--sensitivity", "0"), ("run.csv", "--plot", "picture.gif")],
)
def test_misuse_ends_with_exit_code_2(arguments, norms, tmp_path):
    written(tmp_path, "run.csv", norms)
    (tmp_path / "run.json").write_text('{"log_history": 3}')
    result = run(tmp_path / arguments[0], *arguments[1:])
    assert result.exit_code == 2
    assert "expected" in result.output


def test_judging_a_log_is_causal(norms):
    _, rows = "rows", [files.Row(step=step, norm=norm) for step, norm in enumerate(norms)]
    whole = judged(rows, Sensitivity())
    half = judged(rows[:60], Sensitivity())
    assert whole.rows[:60] == half.rows
