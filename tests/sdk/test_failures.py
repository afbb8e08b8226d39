"""Whatever fails around it, a watched loop goes on or ends as it would unwatched: to the last bit of its weights."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("failing_loop.py")
READ_ONLY = "/sys/gradloc-store"  # not even root may make a folder there


class Trained:
    """What the ranks of one training run wrote, how they ended, and what they last complained of."""

    def __init__(self, out: Path, processes: list[subprocess.Popen[bytes]], output: list[str]) -> None:
        self.lines = [(out / f"rank-{rank}.txt").read_text().splitlines() for rank in range(len(processes))]
        self.codes = [process.returncode for process in processes]
        self.output = output

    @property
    def errors(self) -> list[str]:
        """Class of the exception that ended each rank, if any."""
        return [
            (re.findall(r"^(?:\[rank\d\]: )?([\w.]+Error)\b", text, re.MULTILINE) or [""])[-1] for text in self.output
        ]


def train(out: Path, *arguments: str, num_ranks: int = 1, resume_after_s: float | None = None) -> Trained:
    out.mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {name: value for name, value in os.environ.items() if name != "GRADLOC_STRICT"} | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "WORLD_SIZE": str(num_ranks),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), "--out", str(out), *arguments],
            env=environment | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank in range(num_ranks)
    ]
    try:
        if resume_after_s is not None:
            _resume(processes[1], out / "rank-1.txt", resume_after_s)
        output = [process.communicate(timeout=200)[0].decode() for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.communicate()
    return Trained(out, processes, output)


def _resume(process: subprocess.Popen[bytes], log: Path, after_s: float) -> None:
    """Let a rank that stopped itself go on."""
    deadline = time.monotonic() + 150
    while not (log.exists() and "pausing" in log.read_text()):
        assert time.monotonic() < deadline and process.poll() is None, "the rank never paused"
        time.sleep(0.05)
    time.sleep(after_s)
    process.send_signal(signal.SIGCONT)


def test_a_rank_that_dies_ends_the_others_as_it_would_unwatched(tmp_path: Path) -> None:
    plain = train(tmp_path / "plain", "--struck", "kill", num_ranks=2)
    watched = train(
        tmp_path / "watched", "--struck", "kill", "--watched", "--store", str(tmp_path / "store"), num_ranks=2
    )
    assert plain.codes[1] == watched.codes[1] == -signal.SIGKILL
    assert plain.codes[0] == watched.codes[0] != 0
    assert plain.errors[0] == watched.errors[0] != ""
    assert plain.lines == watched.lines  # it failed in the same step, no earlier and no later
    assert len(watched.lines[0]) == 18


@pytest.mark.full
def test_a_rank_that_pauses_is_waited_for_as_it_would_be_unwatched(tmp_path: Path) -> None:
    plain = train(tmp_path / "plain", "--struck", "pause", num_ranks=2, resume_after_s=0.5)
    arguments = ("--struck", "pause", "--watched", "--store", str(tmp_path / "store"))
    watched = train(tmp_path / "watched", *arguments, num_ranks=2, resume_after_s=3.0)
    assert watched.codes == plain.codes == [0, 0]
    assert watched.lines == plain.lines
    assert watched.lines[0][-1].startswith("done")


@pytest.mark.parametrize("trouble", ["full disk", pytest.param("read-only", marks=pytest.mark.full)])
def test_a_store_that_takes_nothing_changes_no_bit(tmp_path: Path, trouble: str) -> None:
    store = str(tmp_path / "store") if trouble == "full disk" else READ_ONLY
    struck = ("--struck", "disk") if trouble == "full disk" else ()
    plain = train(tmp_path / "plain", *struck)
    watched = train(tmp_path / "watched", *struck, "--watched", "--store", store)
    assert plain.codes == watched.codes == [0]
    assert watched.lines == plain.lines
    assert "snapshot of step 17 failed: StoreUnavailable: cannot write" in watched.output[0]
    assert not list(tmp_path.glob("store/**/manifest.json"))


@pytest.mark.full
def test_a_redis_that_nobody_answers_for_changes_no_bit(tmp_path: Path) -> None:
    plain = train(tmp_path / "plain")
    watched = train(tmp_path / "watched", "--watched", "--redis", "redis://127.0.0.1:1/0")
    assert plain.codes == watched.codes == [0]
    assert watched.lines == plain.lines
    assert "training goes on" in watched.output[0]
