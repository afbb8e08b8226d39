"""Processes of a split model as actors of a real Ray: the same finding; one is killed, and the next attempt goes on."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from gradloc.workstation.ray import RayHead
from gradloc_localizer.driver import Options, explain
from gradloc_proto.messages import Finding

pytestmark = pytest.mark.full
SCRIPT = Path(__file__).with_name("on_ray.py")
ACTOR = "ray::SplitProcess"


@pytest.fixture
def head(tmp_path):
    made = RayHead(tmp_path / "ray.log", num_cpus=3, job_env={}, spare_gpus=1)
    try:
        made.wait_ready()
        yield made
    finally:
        made.end()


def driver(head, url, probes):
    env = os.environ | {
        "RAY_ADDRESS": head.gcs_address,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": head.token,
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONWARNINGS": "",
    }
    words = [sys.executable, str(SCRIPT), url, probes.as_uri(), "2"]
    return subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def said(process):
    out, errors = process.communicate(timeout=900)
    assert process.returncode == 0, errors[-4_000:]
    return out.strip().splitlines()[-1]


def actors(head):
    found = []
    for process in psutil.Process(head.process.pid).children(recursive=True):
        try:
            if process.cmdline()[:1] and process.cmdline()[0].startswith(ACTOR):
                found.append(process.pid)
        except psutil.NoSuchProcess:
            continue
    return sorted(found)


def saved(probes):
    return {path: path.stat().st_mtime_ns for path in probes.glob("**/*.safetensors")}


@pytest.mark.timeout(1_800)
def test_actors_find_what_one_process_finds_and_a_killed_attempt_is_gone_on_with(
    trainer, written, head, tmp_path, assert_same
):
    url = written(trainer.model(num_layers=4, hidden_size=128))
    # The same shards of work: with probes they are cut alike.
    _, alone = explain(url, Options(device="cpu", num_threads=1, probes=(tmp_path / "alone").as_uri()))
    for number in range(5):  # it may be over before it is killed
        probes = tmp_path / f"probes-{number}"
        line = said(killed(head, url, probes))
        if line.startswith("failed"):
            break
        assert_same(Finding.model_validate_json(line), alone)
    assert line.startswith("failed: process ") and "died" in line, line
    before = saved(probes)
    finding = Finding.model_validate_json(said(driver(head, url, probes)))
    assert_same(finding, alone)
    after = saved(probes)
    assert len(after) > len(before) > 0
    # What both had is not asked again; of the last question one alone may have kept its part.
    assert sum(after[path] != time_ns for path, time_ns in before.items()) <= 1
    assert actors(head) == []


def killed(head, url, probes):
    """A driver one of whose processes is killed when two answers were kept."""
    attempt, deadline = driver(head, url, probes), time.monotonic() + 600
    while len(saved(probes)) < 2 and attempt.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    for victim in actors(head)[-1:]:
        os.kill(victim, signal.SIGKILL)
    return attempt
