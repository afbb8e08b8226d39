"""What a hostile trainer, store or tokenizer can write, and what of it reaches memory, terminals and logs."""

import json
import math
import os
import re
import resource
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from rich.console import Console

from gradloc.checks.finding import Report, finding
from gradloc.checks.log_series import read_log
from gradloc.checks.printing import report_lines
from gradloc.manifest import Manifest
from gradloc.snapshot import MANIFEST, MANIFEST_BYTES_MAX, SnapshotRejected, open_snapshot
from gradloc.tail import line_of
from gradloc.trace_replay import files
from gradloc.workstation.redis import EmbeddedRedis
from gradloc_localizer.html_report import html_report
from gradloc_localizer.report import report
from gradloc_proto import codec, streams
from gradloc_proto.memory_bus import MemoryBus
from gradloc_proto.messages import (
    Cause,
    Cost,
    Culprit,
    Fidelity,
    Finding,
    IncidentResolved,
    LocalizationFailed,
    RunStarted,
    SequenceView,
    SnapshotFailed,
    StepObserved,
)
from gradloc_proto.redis_bus import RedisBus
from gradloc_reporter import Reporter, Settings
from gradloc_reporter.web.body_size import BODY_BYTES_MAX

EVIL = "\x1b[2J\x1b]0;owned\x07\r\nERROR forged line\u202e<script>alert(1)</script>"
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def an_evil_finding() -> Finding:
    culprit = Culprit(
        rank=0, micro_batch=0, sequence=0, token=1, token_id=7, token_text=EVIL, share=0.9, layer=EVIL, uid=EVIL[:100]
    )
    view = SequenceView(
        rank=0,
        micro_batch=0,
        sequence=0,
        first_position=0,
        token_ids=(5, 7),
        token_texts=("a", EVIL),
        shares=(0.1, 0.9),
    )
    fidelity = Fidelity(reported_norm=9.0, replayed_norm=9.0, rel_error=0.0, tolerance=0.1, reproduced=True)
    return Finding(
        verdict="token", strategy="attribution", step=3, summary=EVIL, culprits=(culprit,), fidelity=fidelity,
        causes=(Cause(name=EVIL[:40], confidence="high", summary=EVIL),), sequence_view=view, layers_exploding=(EVIL,),
        layer_growth={EVIL: 9.0, "calm": 1.0}, cost=Cost(steps=1.0),
    )  # fmt: skip


def printed(thing: object) -> str:
    console = Console(width=300, force_terminal=False, color_system=None)
    with console.capture() as capture:
        console.print(thing)
    return capture.get()


# --- terminals, pages ----------------------------------------------------------------------------------


def test_no_escape_sequence_of_a_token_reaches_the_terminal() -> None:
    text = printed(report(an_evil_finding()))
    assert "owned" in text and not CONTROL.search(text)


@pytest.mark.parametrize(
    "message",
    [
        LocalizationFailed(run_id="r", ts=1.0, incident_id="i", localization_attempt=1, reason=EVIL, retryable=False),
        IncidentResolved(run_id="r", ts=1.0, incident_id="i", step=3, reason=EVIL),
        StepObserved(run_id="r", ts=1.0, step=3, grad_norm=1.0, rules_hit=(EVIL[:40],)),
    ],
)
def test_no_escape_sequence_of_a_message_reaches_the_terminal(message) -> None:
    text = printed(line_of(message))
    assert not CONTROL.search(text)
    assert len(text.strip().splitlines()) == 1


def test_no_escape_sequence_of_a_data_row_reaches_the_terminal() -> None:
    found = finding("data.special-token-in-text", EVIL, {"row": 3, "field": EVIL}, EVIL)
    text = printed(report_lines(Report((found,), (), {}), "data"))
    assert "row 3" in text and not CONTROL.search(text)


def test_a_token_that_is_markup_is_text_on_the_page_of_a_finding() -> None:
    page = html_report(an_evil_finding(), run_id="run", where="file:///s")
    assert "<script>alert" not in page and "&lt;script&gt;" in page


# --- sizes and names -----------------------------------------------------------------------------------


def a_sparse_file(path: Path, num_bytes: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        os.truncate(file.fileno(), num_bytes)


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def manifest_of(folder: Path, name: str, **values) -> str:
    record = {"num_bytes": 10, "sha256": "0" * 64}
    part = {"rank": 0, "grad_factor": 1.0, "micro_batches": [{}], "files": {name: record}}
    known = {"run_id": "run", "attempt": 0, "step": 7, "created_at": 1.0, "world_size": 1, "grad_norm": 4.0}
    made = Manifest.model_validate(known | {"parts": [part], "files": {}} | values)
    (folder / MANIFEST).write_text(made.model_dump_json())
    return f"file://{folder}"


def test_a_file_larger_than_its_manifest_says_is_refused_unread(tmp_path: Path) -> None:
    a_sparse_file(tmp_path / "batch" / "rank-0.safetensors", 1 << 40)
    before = peak_bytes()
    snapshot = open_snapshot(manifest_of(tmp_path, "batch/rank-0.safetensors"))
    with pytest.raises(SnapshotRejected, match="has 1099511627776 bytes, expected at most 10"):
        snapshot.micro_batches(0)
    assert peak_bytes() - before < 100 << 20


def test_a_manifest_beyond_all_measure_is_refused_unread(tmp_path: Path) -> None:
    a_sparse_file(tmp_path / MANIFEST, MANIFEST_BYTES_MAX + 1)
    with pytest.raises(SnapshotRejected, match="expected at most"):
        open_snapshot(f"file://{tmp_path}")


def test_a_world_size_beyond_all_measure_costs_no_memory(tmp_path: Path) -> None:
    url = manifest_of(tmp_path, "batch/rank-0.safetensors", world_size=10**12)
    with pytest.raises(SnapshotRejected, match="expected one of each of 1000000000000 ranks"):
        open_snapshot(url)


@pytest.mark.parametrize(
    "name", ["../../../etc/passwd", "/etc/passwd", "batch/../../x", "batch/\x00x", "..", "a/../../../b\x1b[2J"]
)
def test_no_name_in_a_manifest_leads_out_of_the_snapshot(tmp_path: Path, name: str) -> None:
    snapshot = open_snapshot(manifest_of(tmp_path, name))
    with pytest.raises(SnapshotRejected) as caught:
        snapshot.micro_batches(0)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("run", ["../other", "a/b", "a b", "a\nb", "a{b}", "", "x" * 1_000])
def test_no_run_is_named_as_a_path_or_a_key_of_others(run: str) -> None:
    with pytest.raises(ValueError, match=r"run_id|run id"):
        RunStarted(run_id=run, ts=1.0)


def test_a_body_beyond_all_measure_is_refused_unread(tmp_path: Path) -> None:
    with Reporter(MemoryBus(), Settings(database=f"sqlite:///{tmp_path}/r.sqlite", port=0)) as reporter:
        for body in (b"x" * (BODY_BYTES_MAX + 1), iter([b"x" * BODY_BYTES_MAX, b"x"])):  # told, and in pieces
            request = urllib.request.Request(
                f"{reporter.url}/api/v1/incidents/inc-1/acknowledge", data=body, method="POST"
            )
            request.add_header("Content-Type", "application/json")
            with pytest.raises((urllib.error.HTTPError, OSError)) as caught:
                urllib.request.urlopen(request, timeout=20)
            if isinstance(caught.value, urllib.error.HTTPError):
                with caught.value as answer:
                    assert answer.code == 413
                    assert json.loads(answer.read())["status"] == 413


@pytest.mark.parametrize("read", [files.read, read_log])
def test_a_cell_larger_than_any_table_has_is_one_clear_line(tmp_path: Path, read) -> None:
    path = tmp_path / "log.csv"
    path.write_text("step,grad_norm\n1,2\n2," + "9" * 200_000)
    with pytest.raises(ValueError, match="not a table"):
        read(path)


def test_an_integer_of_hundreds_of_digits_in_a_log_is_infinite(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1, "grad_norm": ' + "9" * 400 + "}\n")
    _, rows = files.read(path)
    assert rows[0].norm == math.inf


# --- logs and secrets ----------------------------------------------------------------------------------

PASSWORD, RAY_TOKEN, SLACK_TOKEN = "pa55-of-redis", "t0ken-of-ray", "t0ken-of-slack"
SECRETS = (PASSWORD, RAY_TOKEN, SLACK_TOKEN)
STAMPED = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (INFO|WARNING|ERROR) |Exception|Traceback|  ")


def messages_of_a_villain(run: str) -> list[bytes]:
    healthy = [
        StepObserved(run_id=run, ts=time.time(), step=n, grad_norm=1.0, layer_norms={EVIL: 1.0}) for n in range(30)
    ]
    spike = StepObserved(run_id=run, ts=time.time(), step=30, grad_norm=900.0, rules_hit=(EVIL[:40],))
    failed = SnapshotFailed(run_id=run, ts=time.time(), step=30, reason=EVIL)
    bad = [json.dumps({"type": EVIL, "run_id": EVIL}).encode(), EVIL.encode(), b"\xff" * 50]
    return [codec.encode(one) for one in (*healthy, spike, failed)] + bad


@pytest.fixture
def guarded_redis(tmp_path: Path):
    """A Redis with a password, and a URL that holds it."""
    redis = EmbeddedRedis(tmp_path / "redis", tmp_path / "redis.log")
    redis.wait_ready()
    bus = RedisBus(redis.url)
    bus._redis.config_set("requirepass", PASSWORD)  # the bus has no need of this itself
    bus.close()
    yield redis.url.replace("redis://", f"redis://:{PASSWORD}@")
    redis.end()


def test_neither_logs_nor_metrics_nor_the_list_of_processes_hold_a_secret_or_a_forged_line(
    tmp_path: Path, guarded_redis: str
) -> None:
    bus = RedisBus(guarded_redis)
    started = codec.encode(RunStarted(run_id="run", ts=time.time(), labels={"team": "red"}))
    bus.append(streams.REGISTRY, [started, EVIL.encode()], length_max=10)
    bus.append(streams.stream("run", "steps"), [started, *messages_of_a_villain("run")], length_max=1_000)
    env = os.environ | {
        "GRADLOC_REDIS_URL": guarded_redis, "RAY_AUTH_TOKEN": RAY_TOKEN, "GRADLOC_SLACK_TOKEN": SLACK_TOKEN
    }  # fmt: skip
    commands = {
        "detector": ["-m", "gradloc_detector", "--port", "0", "--ray-address", "http://127.0.0.1:1"],
        "reporter": [
            "-m", "gradloc_reporter", "--port", "0", "--database", f"sqlite:///{tmp_path}/r.sqlite", "--slack-channel",
            "C0123456", "--slack-base-url", "http://127.0.0.1:1/",
        ],
    }  # fmt: skip
    seen, processes = [], []
    try:
        for name, command in commands.items():
            with (tmp_path / f"{name}.log").open("wb") as log:
                processes.append(subprocess.Popen([sys.executable, *command], env=env, stdout=log, stderr=log))
        page = _address(tmp_path / "reporter.log", r"reporter at (http://\S+)")
        told = _until(lambda: _asked(f"{page}/api/v1/incidents"), '"run_id":"run"')
        metrics = _address(tmp_path / "detector.log", r"metrics on (http://[^\s;]+)")
        seen += [told, _asked(metrics), _asked(f"{page}/metrics"), _asked(f"{page}/"), _asked(f"{page}/runs/run")]
        seen += [Path(f"/proc/{one.pid}/cmdline").read_text() for one in processes]
    finally:
        for one in processes:
            one.terminate()
        for one in processes:
            one.wait(timeout=60)
        bus.close()
    logs = [(tmp_path / f"{name}.log").read_text() for name in commands]
    for text in (*seen, *logs):
        assert not [secret for secret in SECRETS if secret in text]
        assert "\x1b" not in text and "\u202e" not in text
    for log in logs:
        assert [line for line in log.splitlines() if line and not STAMPED.match(line)] == []


def _asked(url: str) -> str:
    with urllib.request.urlopen(url, timeout=20) as answer:
        return str(answer.read().decode())


def _address(log: Path, pattern: str) -> str:
    return re.search(pattern, _until(log.read_text, re.compile(pattern)))[1].rstrip(";")  # type: ignore[index]


def _until(look, wanted) -> str:
    deadline = time.monotonic() + 120
    text = ""
    while time.monotonic() < deadline:
        text = look()
        if wanted in text if isinstance(wanted, str) else wanted.search(text):
            return text
        time.sleep(0.1)
    raise AssertionError(f"never came: {wanted}; last: {text[-500:]}")
