"""`gradloc up` and the processes under it: ready when it says so, gone when it ends."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from pathlib import Path

import pytest

from gradloc.workstation.processes import Process, StartFailed
from gradloc.workstation.redis import EmbeddedRedis, answers

GRADLOC = Path(sys.executable).parent / "gradloc"
_TEST_MARK = "GRADLOC_TEST_MARK"
SLEEP = "import time; time.sleep(600)"


def carriers(mark: str) -> list[str]:
    """Command lines of processes that inherited the mark."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{_TEST_MARK}={mark}".encode() in (folder / "environ").read_bytes():
                found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:120])
        except OSError:
            continue
    return [line for line in found if line]


def test_a_process_that_ends_at_once_is_told_with_its_last_words(tmp_path: Path):
    code = "print('starting'); raise SystemExit('no such port')"
    process = Process("thing", [sys.executable, "-c", code], tmp_path / "log")
    with pytest.raises(StartFailed, match=r"thing ended at its start \(exit code 1\): no such port"):
        process.wait_ready(lambda: False, timeout_s=30)
    process.end()


def test_a_process_that_is_never_ready_is_told_with_its_log(tmp_path: Path):
    process = Process("thing", [sys.executable, "-c", SLEEP], tmp_path / "log")
    with pytest.raises(StartFailed, match=r"thing was not ready within 0 s; see .*log"):
        process.wait_ready(lambda: False, timeout_s=0.1)
    process.end()
    assert process.returncode == -signal.SIGTERM


def test_ending_a_process_ends_those_it_started_in_sessions_of_their_own(tmp_path: Path):
    mark = uuid.uuid4().hex
    code = (
        "import subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-c', {SLEEP!r}], start_new_session=True)\n"
        "print('both are there', flush=True)\n"
        f"{SLEEP}"
    )
    log = tmp_path / "log"
    process = Process("parent", [sys.executable, "-c", code], log, {_TEST_MARK: mark})
    process.wait_ready(lambda: "both are there" in log.read_text(), timeout_s=30)
    assert len(carriers(mark)) == 2
    process.end()
    deadline = time.monotonic() + 10
    while carriers(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert carriers(mark) == []
    process.end()  # once more does no harm


def test_a_process_deaf_to_sigterm_is_ended_all_the_same(tmp_path: Path):
    code = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); {SLEEP}"
    log = tmp_path / "log"
    process = Process("deaf", [sys.executable, "-c", code], log)
    process.wait_ready(lambda: "deaf" in log.read_text(), timeout_s=30)
    process.end(grace_s=0.2)
    assert process.returncode == -signal.SIGKILL


def test_an_embedded_redis_answers_until_it_is_killed(tmp_path: Path):
    server = EmbeddedRedis(tmp_path / "redis", tmp_path / "log")
    try:
        server.wait_ready()
        assert answers(server.url)
        server.process.kill()
        assert not answers(server.url)
    finally:
        server.end()


def test_a_redis_that_does_not_answer_is_one_clear_line(tmp_path: Path):
    # Port 1 of the loopback interface: nobody listens there.
    ended = subprocess.run(
        [GRADLOC, "up", "--redis", "redis://:hidden@127.0.0.1:1/0", "--folder", str(tmp_path / "up")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 2
    lines = [line for line in ended.stderr.splitlines() if line.strip()]
    assert len(lines) == 1 and "Redis" in lines[0]
    assert "hidden" not in ended.stderr


@pytest.mark.timeout(280)
def test_up_tells_its_addresses_serves_and_leaves_nothing_behind(tmp_path: Path):
    mark = uuid.uuid4().hex
    command = [GRADLOC, "up", "--json", "--port", "0", "--folder", str(tmp_path / "up")]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, _TEST_MARK: mark, "GRADLOC_REDIS_URL": ""},
    ) as process:
        try:
            assert process.stdout is not None
            told = json.loads(process.stdout.readline())
            assert answers(told["redis"])
            with urllib.request.urlopen(f"{told['rest']}/incidents", timeout=10) as reply:
                assert json.load(reply)["incidents"] == []
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(f"{told['ray']}/api/jobs/", timeout=10)
            refused.value.close()
            assert refused.value.code == 401, "jobs are for those who hold the token"
            assert len(carriers(mark)) > 4
        finally:
            process.terminate()
            process.wait(timeout=60)
    assert carriers(mark) == []
    assert process.returncode == 0
