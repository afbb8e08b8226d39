"""The job tells the run's findings stream that it started, how far it is, and what it found or why not."""

import os
import subprocess
import sys
import time

import pytest

from gradloc_localizer.job import EXIT_DONE, EXIT_FAILED, EXIT_REJECTED, Job, Stopped, perform
from gradloc_localizer.publishing import Findings
from gradloc_proto import codec, streams
from gradloc_proto.bus import START, BusUnavailable
from gradloc_proto.memory_bus import MemoryBus
from gradloc_proto.messages import (
    LocalizationFailed,
    LocalizationFinished,
    LocalizationProgressed,
    LocalizationStarted,
)
from gradloc_proto.redis_bus import RedisBus

KEY = streams.stream("run", "findings")


def told(bus):
    return [codec.decode(entry.data) for entry in bus.read({KEY: START}, count=1000).get(KEY, [])]


@pytest.fixture
def url(trainer, tokenizer_json, tmp_path):
    step = trainer.faulty(trainer.model(), trainer.stale(9.0))
    return step.write(f"file://{tmp_path}/run/0/7", tokenizer_json=tokenizer_json)


def job_of(url, **changes):
    known = {
        "run_id": "run",
        "attempt": 0,
        "incident_id": "inc-1",
        "localization_attempt": 2,
        "snapshot": url,
        "device": "cpu",
        "num_threads": 1,
    }
    return Job(**(known | changes))


def test_a_localization_is_told_from_start_to_end(url):
    bus = MemoryBus()
    assert perform(job_of(url), bus) == EXIT_DONE
    messages = told(bus)
    assert isinstance(messages[0], LocalizationStarted)
    assert (messages[0].step, messages[0].snapshot) == (7, url)
    stages = [message for message in messages if isinstance(message, LocalizationProgressed)]
    assert [message.stage for message in stages][:3] == ["opening", "rebuilding", "replaying"]
    assert [message.fraction for message in stages] == sorted(message.fraction for message in stages)
    assert len({message.key() for message in messages}) == len(messages)
    last = messages[-1]
    assert isinstance(last, LocalizationFinished)
    assert last.finding.verdict == "token"
    assert {(m.run_id, m.attempt, m.incident_id, m.localization_attempt) for m in messages} == {("run", 0, "inc-1", 2)}


def test_bisection_can_be_ordered(url):
    bus = MemoryBus()
    assert perform(job_of(url, strategy="bisect"), bus) == EXIT_DONE
    assert told(bus)[-1].finding.strategy == "bisect"


@pytest.mark.parametrize(
    ("changes", "retryable", "reason"),
    [
        ({"snapshot": "file:///nowhere/run/0/7"}, False, "no snapshot at"),
        ({"snapshot": "nosuch://bucket/run/0/7"}, False, "expected a URL"),
        ({"run_id": "run", "attempt": 3}, False, "expected run run, attempt 3"),
        ({"device": "warp"}, False, "warp"),
    ],
)
def test_what_cannot_be_localized_fails_with_a_reason(url, changes, retryable, reason):
    bus = MemoryBus()
    assert perform(job_of(url, **changes), bus) == EXIT_REJECTED
    last = told(bus)[-1]
    assert isinstance(last, LocalizationFailed)
    assert last.retryable is retryable
    assert reason in last.reason
    assert "\n" not in last.reason


def test_a_store_that_cannot_be_read_may_be_tried_again(url, tmp_path):
    manifest = tmp_path / "run" / "0" / "7" / "manifest.json"
    manifest.unlink()
    manifest.mkdir()  # reading it is an OSError that is no "not found"
    bus = MemoryBus()
    assert perform(job_of(url), bus) == EXIT_FAILED
    assert told(bus)[-1].retryable is True


class Away:
    """A bus that is away for the first `num_failures` appends."""

    def __init__(self, num_failures):
        self._left = num_failures
        self.inner = MemoryBus()

    def append(self, key, data, *, length_max):
        if self._left > 0:
            self._left -= 1
            raise BusUnavailable("away")
        self.inner.append(key, data, length_max=length_max)


def findings(bus, waits):
    return Findings(bus, run_id="run", attempt=0, incident_id="i", localization_attempt=1, sleep=waits.append)


def test_a_bus_that_comes_back_hears_everything():
    bus, waits = Away(2), []
    findings(bus, waits).started(3, "file:///x/3")
    assert len(told(bus.inner)) == 1
    assert waits == [0.5, 1.0]


def test_progress_is_not_worth_waiting_for():
    bus, waits = Away(1), []
    findings(bus, waits).progressed("replaying", 0.1)
    assert told(bus.inner) == []
    assert waits == []


def test_a_bus_that_stays_away_is_an_error_after_few_tries():
    bus, waits = Away(99), []
    with pytest.raises(BusUnavailable):
        findings(bus, waits).failed("reason", retryable=True)
    assert len(waits) == 3


class Stopping(Away):
    """The pool's signal arrives while progress is told."""

    def append(self, key, data, *, length_max):
        if isinstance(codec.decode(data[0]), LocalizationProgressed):
            raise Stopped
        self.inner.append(key, data, length_max=length_max)


def test_a_job_that_is_stopped_says_so(url):
    bus = Stopping(0)
    with pytest.raises(Stopped):
        perform(job_of(url), bus)
    last = told(bus.inner)[-1]
    assert isinstance(last, LocalizationFailed)
    assert last.retryable


def arguments(url):
    return [
        *(sys.executable, "-m", "gradloc_localizer", "--run", "run", "--attempt", "0", "--incident", "inc-1"),
        *("--localization-attempt", "1", "--snapshot", url, "--device", "cpu", "--threads", "1"),
    ]


def environment(**changes):
    known = {name: value for name, value in os.environ.items() if not name.startswith("GRADLOC_")}
    return known | changes


def test_the_process_publishes_to_redis(url, redis_url):
    done = subprocess.run(
        arguments(url), env=environment(GRADLOC_REDIS_URL=redis_url), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    bus = RedisBus(redis_url)
    try:
        messages = told(bus)
    finally:
        bus.close()
    assert isinstance(messages[0], LocalizationStarted)
    assert messages[-1].finding.culprits[0].token == 9
    # Logs name places, never texts.
    assert messages[-1].finding.culprits[0].token_text not in done.stderr


def test_a_stopped_process_tells_redis_and_ends(url, redis_url):
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(arguments(url), env=environment(GRADLOC_REDIS_URL=redis_url), **quiet)
    bus = RedisBus(redis_url)
    try:
        deadline = time.monotonic() + 60
        while not told(bus) and time.monotonic() < deadline:
            time.sleep(0.02)
        process.terminate()
        assert process.wait(timeout=60) == 143
        last = told(bus)[-1]
    finally:
        bus.close()
    assert isinstance(last, LocalizationFailed)
    assert (last.reason, last.retryable) == ("stopped by the pool", True)


@pytest.mark.parametrize(
    ("variables", "code", "reason"),
    [
        ({}, 2, "no Redis URL"),
        ({"GRADLOC_REDIS_URL": "http://127.0.0.1"}, 2, "expected redis://"),
        ({"GRADLOC_REDIS_URL": "redis://:secret@127.0.0.1:1/0"}, 1, "nothing could be published"),
    ],
)
def test_without_redis_the_process_says_one_line(variables, code, reason):
    done = subprocess.run(
        arguments("file:///x/run/0/7"), env=environment(**variables), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == code
    assert reason in done.stderr
    assert "secret" not in done.stderr
    assert "Traceback" not in done.stderr


class TestHealthyReference:
    """GRADLOC_REFERENCE: a healthy step of the run, replayed where the spike's replay does not match."""

    @pytest.fixture
    def spiked(self, trainer, tmp_path):
        """A spike that was reported 2 % larger than it replays, by one layer."""
        step = trainer.faulty(trainer.model(), trainer.stale(9.0))
        layers = {key: norm * (1.02 if key == "layers.1.mlp" else 1) for key, norm in step.layer_norms.items()}
        return step.write(f"file://{tmp_path}/run/0/7", grad_norm=1.02 * step.grad_norm, layer_norms=layers)

    def reference(self, trainer, tmp_path, **changes):
        step = trainer.faulty(trainer.model(), None)
        known = {"weights": "reference", "grad_norm": 1.01 * step.grad_norm, "step": 3}
        return step.write(f"file://{tmp_path}/run/0/3", **(known | changes))

    def finding_of(self, spiked, reference):
        bus = MemoryBus()
        assert perform(job_of(spiked, reference=reference), bus) == EXIT_DONE
        return told(bus)[-1].finding

    def test_its_error_widens_the_tolerance(self, trainer, spiked, tmp_path):
        finding = self.finding_of(spiked, self.reference(trainer, tmp_path))
        assert finding.fidelity.healthy_rel_error == pytest.approx(0.01 / 1.01, rel=1e-3)
        assert finding.verdict == "token"

    @pytest.mark.parametrize("changes", [{"run_id": "another"}, {"weights": "before-update"}])
    def test_what_is_no_healthy_step_of_the_run_is_not_used(self, trainer, spiked, tmp_path, changes, caplog):
        finding = self.finding_of(spiked, self.reference(trainer, tmp_path, **changes))
        assert finding.fidelity.healthy_rel_error is None
        assert finding.verdict == "inconclusive"
        assert "not a healthy step of run run" in caplog.text

    def test_one_that_is_gone_costs_a_line(self, spiked, tmp_path, caplog):
        finding = self.finding_of(spiked, f"file://{tmp_path}/run/0/2")
        assert finding.fidelity.healthy_rel_error is None
        assert "no snapshot at" in caplog.text
