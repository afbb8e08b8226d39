"""`gradloc tail` and the command group: readable lines, one-line errors, exit code 2 for bad input."""

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from gradloc.command import gradloc
from gradloc.tail import tail
from gradloc_proto import codec, streams
from gradloc_proto.messages import Flag, IncidentOpened, Message, RunEnded, RunStarted, Spike, StepObserved
from gradloc_proto.redis_bus import RedisBus

RUN = "run-1"


def fill(url: str) -> None:
    bus = RedisBus(url)
    started = RunStarted(run_id=RUN, ts=0.0)
    bus.append(streams.REGISTRY, [codec.encode(started)], length_max=10)
    steps: list[Message] = [started]
    steps += [StepObserved(run_id=RUN, ts=0.0, step=i, grad_norm=0.5 + i, limit=4.0) for i in range(3)]
    steps.append(
        StepObserved(run_id=RUN, ts=0.0, step=3, grad_norm=float("nan"), rules_hit=("non-finite",), decision="snapshot")
    )
    steps.append(RunEnded(run_id=RUN, ts=0.0, step=3))
    data = [codec.encode(message) for message in steps]
    bus.append(streams.stream(RUN, "steps"), [*data[:2], b"{not a message", *data[2:]], length_max=100)
    spike = Spike(
        spike_id="spk-1", step=3, grad_norm=float("nan"), flags=(Flag(rule="n", series="s", value=1, score=1),)
    )
    opened = IncidentOpened(run_id=RUN, ts=0.0, incident_id="inc-1", spike=spike)
    bus.append(streams.stream(RUN, "incidents"), [codec.encode(opened)], length_max=100)
    bus.close()


def test_a_finished_run_is_told_and_the_command_ends(redis_process: tuple[str, subprocess.Popen[bytes]]) -> None:
    url, _ = redis_process
    fill(url)
    result = CliRunner().invoke(tail, [RUN, "--redis", url])
    assert result.exit_code == 0, result.output
    assert "norm       nan" in result.output and "non-finite -> snapshot" in result.output
    assert "incident_opened inc-1 at step 3" in result.output
    assert "1 messages did not parse" in result.output


def test_json_lines_parse_strictly(redis_process: tuple[str, subprocess.Popen[bytes]]) -> None:
    url, _ = redis_process
    fill(url)
    result = CliRunner().invoke(tail, [RUN, "--redis", url, "--json", "--no-follow"])
    lines = [line for line in result.stdout.splitlines() if line.startswith("{")]

    def refuse(constant: str) -> float:
        raise AssertionError(constant)

    documents = [json.loads(line, parse_constant=refuse) for line in lines]
    assert [document["type"] for document in documents] == [
        "run_started",
        *["step_observed"] * 4,
        "run_ended",
        "incident_opened",
    ]
    assert documents[4]["grad_norm"] == "NaN"


def test_an_unknown_run_is_one_clear_line(redis_process: tuple[str, subprocess.Popen[bytes]]) -> None:
    url, _ = redis_process
    fill(url)
    result = CliRunner().invoke(tail, ["other", "--redis", url])
    assert result.exit_code == 2
    assert "no run 'other' at this Redis; the newest it knows: run-1" in result.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run-1", "--redis", "redis://user:secret@127.0.0.1:1/0"], "Redis at redis://127.0.0.1:1/0"),
        (["run-1", "--redis", "nonsense"], "Redis URL"),
        (["a b", "--redis", "redis://127.0.0.1:1"], "run id"),
    ],
)
def test_bad_input_is_one_line_without_secrets(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(tail, arguments)
    assert result.exit_code == 2
    assert said in result.output and "secret" not in result.output and "Traceback" not in result.output


def test_the_group_lists_its_commands_and_refuses_others() -> None:
    result = CliRunner().invoke(gradloc, ["--help"])
    assert result.exit_code == 0 and "tail" in result.output
    result = CliRunner().invoke(gradloc, ["no-such-thing"])
    assert result.exit_code == 2 and "No such command" in result.output


def test_asking_for_the_version_does_not_import_torch() -> None:
    code = "import sys; from gradloc.command import gradloc; gradloc(['--version'], standalone_mode=False); "
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
