"""The command as a process: bad input, signals, kills; a killed detector and one that was not tell the same."""

import json
import os
import random
import signal
import subprocess
import sys
import time
import urllib.request

import pytest
import redis
from click.testing import CliRunner

from gradloc_detector.redis_user import redis_user
from gradloc_proto import codec, streams
from gradloc_proto.messages import RunEnded, RunStarted
from gradloc_proto.redis_bus import RedisBus


def start(*arguments, **environment):
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("GRADLOC_", "RAY_"))}
    return subprocess.Popen(
        [sys.executable, "-m", "gradloc_detector", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=variables | environment,
    )  # fmt: skip


def outcome(*arguments, **environment):
    process = start(*arguments, **environment)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["--redis", "http://h:1"], "redis://"),
        (["--redis", "redis://127.0.0.1:1/0", "--port", "0"], "start Redis there"),
        (["--redis", "nonsense"], "redis://"),
        (["--jobs-max", "0"], "--jobs-max"),
        (["--strategy", "guess"], "attribution"),
        (["--sensitivity", "nan"], "--sensitivity"),
        (["--snapshot-timeout", "nan"], "--snapshot-timeout"),
        (["--sensitivity", "0"], "0.1<=x<=1000.0"),
    ],
)
def test_bad_input_is_one_clear_line_and_exit_code_2(arguments, hint):
    code, out, err = outcome(*arguments)
    assert code == 2
    assert hint in err and "Traceback" not in err and out == ""


def test_a_password_in_the_url_is_not_shown():
    code, _, err = outcome("--redis", "redis://user:s3cret@127.0.0.1:1/0")
    assert code == 2
    assert "s3cret" not in err and len(err.strip().splitlines()) == 1


def test_a_bad_ray_address_and_a_taken_port_are_one_line(redis_url):
    code, _, err = outcome("--redis", redis_url, "--ray-address", "ray://h")
    assert code == 2 and "http://host:8265" in err
    taken = redis_url.split(":")[-1].split("/")[0]
    code, _, err = outcome("--redis", redis_url, "--port", taken)
    assert code == 2 and "--port" in err


def test_it_starts_serves_and_ends_gracefully(redis_url, story):
    bus = RedisBus(redis_url)
    steps = [RunStarted(run_id=story.run, ts=1.0), *story.steps(0, 29), story.spike(30)]
    bus.append(streams.REGISTRY, [codec.encode(steps[0])], length_max=10)
    bus.append(streams.stream(story.run, "steps"), [codec.encode(step) for step in steps], length_max=100)
    process = start("--port", "0", "--json", GRADLOC_REDIS_URL=redis_url)
    ready = json.loads(process.stderr.readline())
    assert "detector ready" in ready["message"]
    url = ready["message"].split("metrics on ")[1].split(";")[0]
    exported = b""
    for _ in range(500):
        exported = urllib.request.urlopen(url, timeout=10).read()
        if bus.length(streams.stream(story.run, "incidents")) and b"gradloc_detector_runs 1.0" in exported:
            break
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=30)
    assert b"gradloc_detector_runs 1.0" in exported
    assert process.returncode == 0
    assert [json.loads(line)["level"] for line in err.splitlines()]
    assert bus.acquire_lease(story.run, "next", ttl_s=1.0)  # given back, not waited for
    bus.close()


# The same service with a short lease, so that its next owner need not wait 15 s after each kill. The
# imports happen once: each line read forks a fresh service, and its pid is answered.
NURSERY = """
import os, signal, sys, threading
from gradloc_detector.service import DetectorService, Settings
from gradloc_proto.redis_bus import RedisBus
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
settings = Settings(lease_ttl_s=0.3, poll_s=0.005, registry_s=0.02, read_count=16, commit_every=8)
for _ in sys.stdin:
    pid = os.fork()
    if pid == 0:
        DetectorService(RedisBus(sys.argv[1]), settings=settings).run(threading.Event())
    print(pid, flush=True)
"""


class Nursery:
    """Starts services and kills them with signal 9."""

    def __init__(self, redis_url: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", NURSERY, redis_url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._pid = 0

    def start(self) -> None:
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        self._pid = int(self._process.stdout.readline())

    def signal(self, number: int) -> None:
        os.kill(self._pid, number)

    def kill(self) -> None:
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
            self._pid = 0

    def close(self) -> None:
        self.kill()
        self._process.kill()
        self._process.communicate(timeout=20)


def killed_again_and_again(redis_url: str, story, *, num_kills: int, on_kill=None) -> list:
    """Incidents of a run whose detector was killed at random moments while the steps came in."""
    dice = random.Random(5)
    bus, nursery = RedisBus(redis_url), Nursery(redis_url)
    steps = streams.stream(story.run, "steps")
    data = [codec.encode(message) for message in tale_of(story)]
    bus.append(streams.REGISTRY, data[:1], length_max=10)
    try:
        for number in range(num_kills):
            nursery.start()
            for item in data[number * len(data) // num_kills : (number + 1) * len(data) // num_kills]:
                bus.append(steps, [item], length_max=100_000)
                time.sleep(dice.random() * 0.02)
            # Most live long enough to take the lease of the one before, some only just.
            time.sleep(0.2 + dice.random() * 0.4)
            nursery.kill()
            if on_kill is not None:
                on_kill()
        assert bus.length(streams.stream(story.run, "incidents")) > 0, "nobody lived long enough to be disturbed"
        nursery.start()
        incidents: list[bytes] = []
        for _ in range(3_000):
            incidents = [entry.data for entry in bus.read_last(streams.stream(story.run, "incidents"), count=1_000)]
            if any(b'"run ended"' in item for item in incidents):
                break
            time.sleep(0.02)
    finally:
        nursery.close()
        bus.close()
    told = [codec.decode(item) for item in incidents]
    # Whether a snapshot came in time is a matter of the clock; the incidents are one of the steps alone.
    return [message for message in told if message.type.startswith("incident_")]


def tale_of(story) -> list:
    tale = [RunStarted(run_id=story.run, ts=1.0), *story.steps(0, 29)]
    for number in range(8):
        first = 30 + 40 * number
        tale += [story.spike(first), story.spike(first + 1, norm=100.0), story.spike(first + 2, norm=5_000.0)]
        tale += story.steps(first + 3, first + 39)
    last = tale[-1].step
    return [*tale, story.spike(last + 1), RunEnded(run_id=story.run, ts=9_000.0, step=last + 1)]


def test_kills_at_random_moments_leave_the_same_incidents(redis_url, story):
    story.tell(*tale_of(story))
    assert killed_again_and_again(redis_url, story, num_kills=8) == story.messages()


def test_an_owner_that_was_paused_for_longer_than_its_lease_wakes_and_writes_nothing(redis_url, story, eventually):
    tale = tale_of(story)
    story.tell(*tale)
    bus, paused, heir = RedisBus(redis_url), Nursery(redis_url), Nursery(redis_url)
    data = [codec.encode(message) for message in tale]
    steps, incidents = streams.stream(story.run, "steps"), streams.stream(story.run, "incidents")
    bus.append(streams.REGISTRY, data[:1], length_max=10)
    try:
        paused.start()
        bus.append(steps, data[:40], length_max=100_000)
        eventually(lambda: bus.length(incidents) > 0)
        paused.signal(signal.SIGSTOP)
        bus.append(steps, data[40:], length_max=100_000)
        heir.start()
        eventually(lambda: bus.length(incidents) == len(story.messages()))
        before = bus.load_checkpoint(story.run)
        paused.signal(signal.SIGCONT)
        time.sleep(1.0)  # it wakes with what it had read before, and tries to commit and to renew
        assert bus.load_checkpoint(story.run) == before
        assert [codec.decode(entry.data) for entry in bus.read_last(incidents, count=1_000)] == story.messages()
    finally:
        paused.close()
        heir.close()
        bus.close()


@pytest.mark.full
@pytest.mark.timeout(900)
def test_200_kills_leave_the_same_incidents(redis_url, story):
    story.tell(*tale_of(story))
    assert killed_again_and_again(redis_url, story, num_kills=200) == story.messages()


@pytest.mark.full
@pytest.mark.timeout(600)
def test_20_restarts_of_redis_leave_the_same_incidents(own_redis, story):
    story.tell(*tale_of(story))
    found = killed_again_and_again(own_redis.url, story, num_kills=20, on_kill=own_redis.restart)
    assert found == story.messages()


class TestRedisUser:
    def test_a_user_is_made_with_a_password_that_the_line_holds_only_as_a_digest(self, own_redis):
        made = json.loads(CliRunner().invoke(redis_user, ["--runs", "team-a-*", "--name", "team-a", "--json"]).output)
        assert made["password"] not in made["line"]
        with redis.Redis(port=own_redis.port) as root:
            try:
                root.execute_command("ACL", "SETUSER", *made["line"].split()[1:])
            except redis.ResponseError:
                pytest.skip("rights to read or to write alone came with Redis 7.0")
        with redis.Redis(port=own_redis.port, username="team-a", password=made["password"]) as user:
            user.xadd("gradloc:{team-a-1}:steps", {"m": b"x"})
            with pytest.raises(redis.exceptions.NoPermissionError):
                user.xadd("gradloc:{team-b-1}:steps", {"m": b"x"})

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            (["--runs", "a*b"], "names no runs"),
            (["--role", "detector", "--runs", "a"], "serves all runs"),
            (["--name", "a b"], "expected 1 to 64"),
        ],
    )
    def test_what_cannot_be_meant_is_refused_in_one_line(self, arguments, says):
        done = CliRunner().invoke(redis_user, arguments)
        assert done.exit_code == 2 and says in done.output and done.output.count("\n") == 1
