"""The service on a real Redis and on the bus in memory: whole stories, poison, stolen leases, outages."""

import json
import threading
import time
import urllib.request
from dataclasses import replace

import pytest
import redis

from gradloc_detector.dispatch import Dispatcher, JobTemplate, RayJobs
from gradloc_detector.metrics import MetricsServer
from gradloc_detector.policy import Policy
from gradloc_detector.service import DetectorService, Settings
from gradloc_proto import codec, streams
from gradloc_proto.bus import BusUnavailable, Commit, CommitResult
from gradloc_proto.memory_bus import MemoryBus
from gradloc_proto.messages import LocalizationFailed, RunEnded, RunStarted, SnapshotFailed, SnapshotRequested
from gradloc_proto.redis_bus import RedisBus

QUICK = Settings(
    plan_s=0.0, lease_ttl_s=1.5, tick_s=0.05, registry_s=0.02, loss_check_s=0.2, poll_s=0.01, poll_idle_max_s=0.05,
    poll_ended_s=0.1, backoff_max_s=0.2, commit_every_s=0.05,
)  # fmt: skip


@pytest.fixture(params=["memory", "redis"])
def bus(request):
    if request.param == "memory":
        yield MemoryBus()
        return
    made = RedisBus(request.getfixturevalue("redis_url"))
    yield made
    made.close()


def publish(bus, run, *messages):
    started = [message for message in messages if isinstance(message, RunStarted)]
    data = [codec.encode(message) for message in messages]
    bus.append(streams.stream(run, "steps"), data, length_max=100_000)
    bus.append(streams.REGISTRY, [codec.encode(message) for message in started], length_max=1_000)


def read(bus, run, name="incidents"):
    entries = bus.read({streams.stream(run, name): "0-0"}, count=10_000)
    return [codec.decode(entry.data) for found in entries.values() for entry in found]


def kinds(bus, run, name="incidents"):
    return [message.type for message in read(bus, run, name)]


def dead_letters(bus, run):
    found = bus.read({streams.dead_letters(run): "0-0"}, count=1_000)
    return [json.loads(entry.data) for entries in found.values() for entry in entries]


def started(run, **fields):
    return RunStarted(run_id=run, ts=1.0, **fields)


def number_of(service, name, **labels):
    return service.metrics.registry.get_sample_value(f"gradloc_detector_{name}", labels)


def turns(service, count=6):
    for _ in range(count):
        service.turn()
        time.sleep(0.03)


class Running:
    """A service on a thread of its own."""

    def __init__(self, bus, **arguments):
        self.service = DetectorService(bus, **{"settings": QUICK, **arguments})
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.service.run, args=(self.stop,))
        self.thread.start()

    def end(self):
        self.stop.set()
        self.thread.join(timeout=30)
        assert not self.thread.is_alive()


@pytest.fixture
def running():
    made = []

    def start(bus, **arguments):
        made.append(Running(bus, **arguments))
        return made[-1]

    yield start
    for item in made:
        item.end()


def test_a_spike_goes_from_the_steps_to_the_incidents_and_limits(bus, story):
    tale = [started(story.run), *story.steps(0, 29), story.spike(30), *story.steps(31, 60)]
    publish(bus, story.run, *tale)
    story.tell(*tale)
    service = DetectorService(bus, settings=QUICK)
    turns(service)
    assert kinds(bus, story.run) == ["incident_opened", "incident_resolved"]
    assert read(bus, story.run, "limits")[-1] == story.messages("limits")[-1]
    service.close()


def test_the_sensitivity_of_the_service_is_that_of_new_runs(bus, story):
    publish(bus, story.run, started(story.run), *story.steps(0, 29), story.step(30, norm=4.0))
    service = DetectorService(bus, settings=QUICK, policy=Policy(sensitivity=10.0))
    turns(service)
    assert kinds(bus, story.run) == []
    publish(bus, story.run, story.step(31, norm=40.0))
    turns(service)
    assert kinds(bus, story.run) == ["incident_opened"]
    service.close()


def test_a_long_backlog_is_folded_in_turns_that_leave_time_for_leases_and_jobs(new_story):
    now = [0.0]

    def clock():
        now[0] += 0.2  # whoever looks at it has worked meanwhile
        return now[0]

    bus, runs = MemoryBus(), [new_story(run=f"run-{number}") for number in range(30)]
    for told in runs:
        publish(bus, told.run, started(told.run), *told.steps(0, 20))
    service = DetectorService(bus, settings=replace(QUICK, lease_ttl_s=600.0, turn_s=0.5), monotonic=clock)
    read_by_turn = [service.turn() for _ in range(30)]
    assert sum(read_by_turn) == 30 * 22
    assert max(read_by_turn) <= 10 * 22
    service.close()


def test_incidents_do_not_depend_on_how_the_steps_were_cut_into_reads(bus, story, new_story):
    tale = [*story.steps(0, 29), story.spike(30), *story.steps(31, 60), story.spike(61), *story.steps(62, 90)]
    expected = new_story()
    expected.tell(started(story.run), *tale)
    service = DetectorService(bus, settings=QUICK)
    publish(bus, story.run, started(story.run))
    for first in range(0, len(tale), 7):
        publish(bus, story.run, *tale[first : first + 7])
        turns(service, 2)
    turns(service)
    assert read(bus, story.run) == expected.messages()
    service.close()


def test_what_does_not_decode_goes_to_the_dead_letters_with_the_reason_and_harms_nothing(bus, story):
    steps = streams.stream(story.run, "steps")
    publish(bus, story.run, started(story.run), *story.steps(0, 20))
    foreign = RunEnded(run_id="somebody-else", ts=1.0, step=1)
    misplaced = SnapshotRequested(run_id=story.run, ts=1.0, step=1, by="x")
    poison = [b"", b"not json", b'{"type": "bomb"}', b"\xff" * 5_000, codec.encode(foreign), codec.encode(misplaced)]
    bus.append(steps, poison, length_max=100_000)
    publish(bus, story.run, *story.steps(21, 29), story.spike(30))
    service = DetectorService(bus, settings=QUICK)
    turns(service)
    assert kinds(bus, story.run) == ["incident_opened"]
    letters = dead_letters(bus, story.run)
    assert len(letters) == len(poison)
    assert all(letter["stream"] == "steps" and letter["reason"] for letter in letters)
    assert service.metrics.registry.get_sample_value("gradloc_detector_rejected_total", {"stream": "steps"}) == len(
        poison
    )
    service.close()


def test_a_detector_that_starts_again_goes_on_where_the_first_one_stopped(bus, story, new_story):
    tale = [started(story.run), *story.steps(0, 29), story.spike(30), *story.steps(31, 60)]
    publish(bus, story.run, *tale[:40])
    first = DetectorService(bus, settings=QUICK)
    turns(first)
    first.close()
    publish(bus, story.run, *tale[40:])
    second = DetectorService(bus, settings=QUICK)
    turns(second)
    expected = new_story()
    expected.tell(*tale)
    assert read(bus, story.run) == expected.messages()
    second.close()


def test_an_owner_whose_lease_was_taken_cannot_write(bus, story):
    publish(bus, story.run, started(story.run), *story.steps(0, 20))
    paused = DetectorService(bus, settings=QUICK)
    turns(paused)
    # The paused owner has read the spike's steps but not committed them when its lease runs out.
    publish(bus, story.run, *story.steps(21, 29), story.spike(30))
    time.sleep(QUICK.lease_ttl_s + 0.1)
    heir = DetectorService(bus, settings=QUICK)
    turns(heir)
    assert kinds(bus, story.run) == ["incident_opened"]
    turns(paused)
    assert kinds(bus, story.run) == ["incident_opened"]
    assert number_of(paused, "leases_lost_total") == 1.0
    heir.close()
    time.sleep(QUICK.lease_ttl_s / 2)
    publish(bus, story.run, *story.steps(31, 60))
    turns(paused, 40)
    assert kinds(bus, story.run) == ["incident_opened", "incident_resolved"]
    paused.close()


def test_a_commit_under_a_stolen_lease_is_refused_by_the_bus(bus, story):
    publish(bus, story.run, started(story.run), *story.steps(0, 20))
    service = DetectorService(bus, settings=QUICK)
    turns(service)
    checkpoint = bus.load_checkpoint(story.run)
    thief = Commit(run_id=story.run, nonce="guessed", expected_cursor=checkpoint.cursor, new_cursor="{}", state=b"{}")
    assert bus.commit(thief) is CommitResult.LEASE_LOST
    service.close()


def test_a_checkpoint_that_cannot_be_read_is_folded_again_from_the_streams(bus, story, new_story):
    tale = [started(story.run), *story.steps(0, 29), story.spike(30), *story.steps(31, 40)]
    publish(bus, story.run, *tale)
    first = DetectorService(bus, settings=QUICK)
    turns(first)
    first.close()
    cursor = bus.load_checkpoint(story.run).cursor
    assert bus.acquire_lease(story.run, "n", ttl_s=5)
    spoilt = Commit(run_id=story.run, nonce="n", expected_cursor=cursor, new_cursor=cursor, state=b"garbage")
    assert bus.commit(spoilt) is CommitResult.DONE
    bus.release_lease(story.run, "n")
    second = DetectorService(bus, settings=QUICK)
    turns(second)
    # Told again under the same derived ids, which receivers drop; and that something was lost is told.
    assert {message.type for message in read(bus, story.run)} == {"incident_opened", "stream_gap_noticed"}
    assert len({message.key() for message in read(bus, story.run)}) == 2
    publish(bus, story.run, *story.steps(41, 60))
    turns(second)
    assert kinds(bus, story.run)[-1] == "incident_resolved"
    second.close()


def test_the_whole_way_from_a_spike_to_a_ray_job_and_its_retry(bus, story, ray_server, eventually, running):
    dispatcher = Dispatcher(bus, RayJobs(ray_server.address), JobTemplate(), poll_s=0.02)
    dispatcher.start()
    service = running(bus, dispatcher=dispatcher).service
    publish(bus, story.run, started(story.run), *story.steps(0, 29), story.spike(30))
    eventually(lambda: kinds(bus, story.run) == ["incident_opened"])
    assert ray_server.jobs == {}
    publish(bus, story.run, story.committed(30))
    incident = read(bus, story.run)[0].incident_id
    eventually(lambda: f"{incident}-1" in ray_server.jobs)
    assert f"--snapshot {story.path(30)}" in ray_server.jobs[f"{incident}-1"]["entrypoint"]
    ray_server.set_status(f"{incident}-1", "RUNNING")
    eventually(
        lambda: (
            "running"
            in [message.status for message in read(bus, story.run, "control") if message.type == "job_reported"]
        )
    )
    assert service.metrics.registry.get_sample_value("gradloc_detector_localizations_in_flight") == 1.0
    failure = LocalizationFailed(
        run_id=story.run, ts=1.0, incident_id=incident, localization_attempt=1, reason="no such model", retryable=False
    )
    bus.append(streams.stream(story.run, "findings"), [codec.encode(failure)], length_max=100)
    eventually(lambda: number_of(service, "localizations_in_flight") == 0.0)


def test_ray_being_down_does_not_hold_up_incidents(bus, story, ray_server, eventually, running):
    ray_server.down()
    dispatcher = Dispatcher(bus, RayJobs(ray_server.address), JobTemplate(), poll_s=0.02)
    dispatcher.start()
    running(bus, dispatcher=dispatcher)
    publish(bus, story.run, started(story.run), *story.steps(0, 29), story.spike(30), story.committed(30))
    eventually(lambda: kinds(bus, story.run) == ["incident_opened"])
    publish(bus, story.run, *story.steps(31, 60))
    eventually(lambda: kinds(bus, story.run) == ["incident_opened", "incident_resolved"])
    ray_server.start()
    eventually(lambda: len(ray_server.jobs) == 1)


def test_metrics_and_health_are_served(bus, story, running, eventually):
    service = running(bus).service
    server = MetricsServer(service.metrics, host="127.0.0.1", port=0)
    publish(bus, story.run, started(story.run), *story.steps(0, 29), story.spike(30))
    eventually(lambda: kinds(bus, story.run) == ["incident_opened"])

    def get(path):
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}{path}", timeout=10) as reply:
            return reply.read().decode()

    eventually(lambda: 'gradloc_detector_emitted_total{type="incident_opened"} 1.0' in get("/metrics"))
    assert json.loads(get("/healthz")) == {"status": "ok", "bus": "up"}
    with pytest.raises(urllib.error.HTTPError, match="404"):
        get("/secrets")
    server.close()


def test_a_run_whose_keys_are_spoilt_is_set_aside_and_the_others_go_on(redis_url, story, new_story):
    bus, other = RedisBus(redis_url), new_story(run="run-b")
    with redis.Redis.from_url(redis_url) as client:
        client.set(streams.stream(story.run, "steps"), "no stream")
        bus.append(streams.REGISTRY, [codec.encode(started(story.run))], length_max=10)
        publish(bus, other.run, started(other.run), *other.steps(0, 29), other.spike(30))
        service = DetectorService(bus, settings=QUICK)
        turns(service)
        assert kinds(bus, other.run) == ["incident_opened"]
        client.delete(streams.stream(story.run, "steps"))
        publish(bus, story.run, *story.steps(0, 29), story.spike(30))
        time.sleep(1.1)
        turns(service, 20)
        assert kinds(bus, story.run) == ["incident_opened"]
    service.close()
    bus.close()


def test_a_stream_spoilt_between_two_reads_sets_its_run_aside_alone(redis_url, story, new_story):
    bus, other = RedisBus(redis_url), new_story(run="run-b")
    for told in (story, other):
        publish(bus, told.run, started(told.run), *told.steps(0, 29))
    service = DetectorService(bus, settings=replace(QUICK, loss_check_s=1_000.0))
    turns(service)
    with redis.Redis.from_url(redis_url) as client:
        client.set(streams.stream(story.run, "findings"), "no stream")
    publish(bus, other.run, other.spike(30))
    turns(service)
    assert kinds(bus, other.run) == ["incident_opened"]
    service.close()
    bus.close()


class AnswerLost(MemoryBus):
    """Does the first commits, but their answers never arrive: the connection broke in between."""

    num_lost = 2

    def commit(self, commit):
        result = super().commit(commit)
        if self.num_lost > 0:
            self.num_lost -= 1
            raise BusUnavailable("connection reset")
        return result


def test_a_commit_whose_answer_was_lost_doubles_nothing_and_stops_nothing(story, new_story, running, eventually):
    bus = AnswerLost()
    tale = [started(story.run), *story.steps(0, 29), story.spike(30), *story.steps(31, 60)]
    publish(bus, story.run, *tale[:35])
    running(bus, settings=replace(QUICK, lease_ttl_s=60.0))  # no lost lease helps it out
    eventually(lambda: kinds(bus, story.run) == ["incident_opened"])
    publish(bus, story.run, *tale[35:])
    expected = new_story()
    expected.tell(*tale)
    eventually(lambda: read(bus, story.run) == expected.messages() and bus.num_lost == 0)


def test_an_incident_stream_with_an_absurd_id_is_refused_and_the_others_go_on(redis_url, story, new_story):
    bus, other = RedisBus(redis_url), new_story(run="run-b")
    with redis.Redis.from_url(redis_url) as client:
        client.xadd(streams.stream(story.run, "incidents"), {"m": b"x"}, id=f"{2**64 - 1}-{2**64 - 1}")
    for told in (story, other):
        publish(bus, told.run, started(told.run), *told.steps(0, 29), told.spike(30))
    service = DetectorService(bus, settings=QUICK)
    turns(service)
    assert kinds(bus, other.run) == ["incident_opened"]
    service.close()
    bus.close()


@pytest.mark.parametrize("how", [{"id": f"{2**64 - 1}-{2**64 - 1}"}, {"maxlen": 1, "approximate": False}])
def test_a_registry_that_one_user_spoilt_hides_no_other_run(redis_url, story, new_story, how):
    bus, other = RedisBus(redis_url), new_story(run="run-b")
    publish(bus, story.run, started(story.run), *story.steps(0, 29))
    first = DetectorService(bus, settings=QUICK)
    turns(first)
    with redis.Redis.from_url(redis_url) as villain:
        villain.xadd(streams.REGISTRY, {"m": b"x"}, **how)
        if "maxlen" in how:
            villain.xtrim(streams.REGISTRY, maxlen=0, approximate=False)
    time.sleep(QUICK.loss_check_s)
    turns(first, 3)
    assert number_of(first, "losses_noticed_total") == 1
    first.close()
    second = DetectorService(bus, settings=QUICK)  # it knows nothing of before
    publish(bus, other.run, started(other.run), *other.steps(0, 29), other.spike(30))
    publish(bus, story.run, story.spike(30))
    turns(second)
    for run in (story.run, other.run):
        assert kinds(bus, run) == ["incident_opened"]
    second.close()
    bus.close()


@pytest.mark.parametrize(("what", "told"), [("trimmed", "stream_gap_noticed"), ("ended", None)])
def test_what_a_runs_own_user_does_to_its_steps_is_noticed_and_harms_no_other(redis_url, story, new_story, what, told):
    bus, other = RedisBus(redis_url), new_story(run="run-b")
    key = streams.stream(story.run, "steps")
    for tale in (story, other):
        publish(bus, tale.run, started(tale.run), *tale.steps(0, 29))
    service = DetectorService(bus, settings=QUICK)
    turns(service)
    publish(bus, story.run, *story.steps(30, 45))
    with redis.Redis.from_url(redis_url) as villain:
        if what == "trimmed":
            villain.xadd(key, {"m": b"x"}, maxlen=1, approximate=False)
            publish(bus, story.run, *story.steps(46, 60))
        else:
            villain.xadd(key, {"m": b"x"}, id=f"{2**64 - 1}-{2**64 - 1}")
            with pytest.raises(BusUnavailable, match="exhausted"):
                publish(bus, story.run, *story.steps(46, 60))
    publish(bus, other.run, other.spike(30))
    turns(service, 10)
    assert kinds(bus, story.run) == ([told] if told else [])
    assert number_of(service, "rejected_total", stream="steps") == 1
    assert len(dead_letters(bus, story.run)) == 1
    assert kinds(bus, other.run) == ["incident_opened"]
    service.close()
    bus.close()


def test_a_stream_that_lost_its_end_is_noticed_and_read_again(redis_url, story):
    bus = RedisBus(redis_url)
    tale = [started(story.run), *story.steps(0, 29), story.spike(30)]
    publish(bus, story.run, *tale)
    service = DetectorService(bus, settings=QUICK)
    turns(service)
    with redis.Redis.from_url(redis_url) as client:
        # A replica without the last writes: the stream ends before what was read of it.
        client.delete(streams.stream(story.run, "steps"))
        for number, message in enumerate(tale[:25]):
            client.xadd(streams.stream(story.run, "steps"), {"m": codec.encode(message)}, id=f"{number + 1}-0")
    time.sleep(QUICK.loss_check_s)
    turns(service, 10)
    assert kinds(bus, story.run) == ["incident_opened", "stream_gap_noticed"]
    assert "Redis lost" in read(bus, story.run)[1].reason
    service.close()
    bus.close()


def test_a_state_that_was_lost_while_its_cursor_survived_is_folded_again_and_told(redis_url, story):
    bus = RedisBus(redis_url)
    publish(bus, story.run, started(story.run), *story.steps(0, 40))
    first = DetectorService(bus, settings=QUICK)
    turns(first)
    first.close()
    with redis.Redis.from_url(redis_url) as client:
        client.delete(streams.state(story.run))
    publish(bus, story.run, story.spike(41))
    second = DetectorService(bus, settings=QUICK)
    turns(second)
    # Nothing of this is refused as "cursor-moved" for ever.
    gap, opened = read(bus, story.run)
    assert (gap.type, opened.type) == ("stream_gap_noticed", "incident_opened")
    assert "state" in gap.reason and gap.last_step == 41
    assert number_of(second, "commits_total", result="cursor-moved") is None
    assert number_of(second, "losses_noticed_total") == 1.0
    second.close()
    bus.close()


@pytest.mark.parametrize("attempt", [0, 1], ids=["the-run-goes-on", "the-trainer-died-too"])
def test_what_was_lost_with_a_checkpoint_of_another_is_told(redis_url, story, eventually, attempt):
    bus = RedisBus(redis_url)
    publish(bus, story.run, started(story.run), *story.steps(0, 40))
    first = DetectorService(bus, settings=QUICK)
    turns(first)
    first.close()
    second = DetectorService(bus, settings=replace(QUICK, loss_check_s=1_000.0))
    turns(second)
    with redis.Redis.from_url(redis_url) as client:
        client.flushall()
    publish(bus, story.run, started(story.run, attempt=attempt), *story.steps(50, 60, attempt=attempt))

    def gaps():
        turns(second, 1)
        told = [message for message in read(bus, story.run) if message.type == "stream_gap_noticed"]
        return [(message.attempt, message.first_step, message.last_step) for message in told]

    eventually(lambda: len(gaps()) == 2, what="the loss")
    assert gaps() == [(0, 40, 40), (0, 0, 49)]
    second.close()
    bus.close()


@pytest.mark.parametrize(("first_step", "gaps"), [(50, [(0, 0, 49)]), (0, [])])
def test_an_attempt_of_which_nothing_was_ever_heard_is_told(redis_url, story, first_step, gaps):
    """Redis, the trainer and all detectors may go within seconds: the next attempt knows that it is not the first."""
    bus = RedisBus(redis_url)
    steps = story.steps(first_step, first_step + 10, attempt=1)
    publish(bus, story.run, started(story.run, attempt=1), *steps)
    service = DetectorService(bus, settings=QUICK)
    turns(service)
    assert [(gap.attempt, gap.first_step, gap.last_step) for gap in read(bus, story.run)] == gaps
    service.close()
    bus.close()


def test_a_run_that_is_over_keeps_its_keys_for_a_while_and_is_then_forgotten(redis_url, story, eventually, running):
    bus, steps = RedisBus(redis_url), streams.stream(story.run, "steps")
    first = running(bus, settings=replace(QUICK, rest_ttl_s=600.0))
    with redis.Redis.from_url(redis_url) as client:
        publish(bus, story.run, started(story.run), *story.steps(0, 29), story.spike(30, snapshot=None))
        failed = SnapshotFailed(run_id=story.run, ts=1.0, step=30, reason="no store")
        publish(bus, story.run, failed, RunEnded(run_id=story.run, ts=1.0, step=30))
        eventually(lambda: client.pttl(steps) > 0, what="the keys' expiry")
        assert all(client.pttl(key) > 0 for key in client.keys(f"gradloc:{{{story.run}}}:*"))
        # Training goes on after all: nothing expires any more.
        publish(bus, story.run, started(story.run, attempt=1), *story.steps(10, 20, attempt=1))
        eventually(lambda: client.pttl(steps) == -1, what="keeping the keys")
        first.end()
        second = running(bus, settings=replace(QUICK, rest_ttl_s=1.0)).service
        publish(bus, story.run, RunEnded(run_id=story.run, attempt=1, ts=1.0, step=20))
        eventually(lambda: client.keys(f"gradloc:{{{story.run}}}:*") == [], what="the end of the keys")
    eventually(lambda: number_of(second, "runs") == 0.0, what="forgetting the run")
    assert number_of(second, "losses_noticed_total") == 0.0
    bus.close()


def test_a_silent_run_is_let_go_too_and_an_old_announcement_of_nothing_is_not_taken_up(redis_url, story, eventually):
    bus = RedisBus(redis_url)
    publish(bus, story.run, started(story.run), *story.steps(0, 29))
    settings = replace(QUICK, rest_after_silence_s=0.5, rest_ttl_s=1.0)
    service = DetectorService(bus, settings=settings)
    with redis.Redis.from_url(redis_url) as client:
        for _ in range(200):
            service.turn()
            if not client.keys(f"gradloc:{{{story.run}}}:*"):
                break
            time.sleep(0.02)
        assert client.keys(f"gradloc:{{{story.run}}}:*") == []
    later = DetectorService(bus, settings=settings)
    turns(later)
    assert number_of(later, "runs") == 0.0
    later.close()
    service.close()
    bus.close()


def test_a_stream_whose_writer_sets_no_bound_is_cut_once_it_is_read(bus, story):
    publish(bus, story.run, started(story.run), *story.steps(0, 29))
    service = DetectorService(bus, settings=QUICK)
    turns(service)
    key = streams.stream(story.run, "control")
    wish = SnapshotRequested(run_id=story.run, ts=1.0, step=1, by="somebody")
    bus.append(key, [codec.encode(wish)] * 12_000, length_max=1_000_000)
    deadline = time.monotonic() + 60.0
    while bus.length(key) > 10_200:
        assert time.monotonic() < deadline, f"never cut; {bus.length(key)} entries"
        service.turn()
        time.sleep(0.01)
    assert bus.length(key) > 5_000
    service.close()


def test_a_flushed_redis_is_noticed_and_the_run_goes_on(redis_url, story):
    bus = RedisBus(redis_url)
    publish(bus, story.run, started(story.run), *story.steps(0, 29))
    service = DetectorService(bus, settings=QUICK)
    turns(service)
    with redis.Redis.from_url(redis_url) as client:
        client.flushall()
    publish(bus, story.run, *story.steps(30, 59), story.spike(60))
    turns(service, 60)
    assert kinds(bus, story.run) == ["stream_gap_noticed", "incident_opened"]
    service.close()
    bus.close()


def test_redis_going_away_and_coming_back_costs_one_line_and_nothing_else(
    own_redis, story, new_story, running, eventually, caplog
):
    bus = RedisBus(own_redis.url, timeout_s=1.0)
    running(bus)
    tale = [started(story.run), *story.steps(0, 29), story.spike(30), *story.steps(31, 60)]
    publish(bus, story.run, *tale[:35])
    eventually(lambda: kinds(bus, story.run) == ["incident_opened"])
    for _ in range(3):
        own_redis.stop()
        time.sleep(0.5)
        own_redis.start()
        time.sleep(0.5)
    publish(bus, story.run, *tale[35:])
    expected = new_story()
    expected.tell(*tale)
    eventually(lambda: read(bus, story.run) == expected.messages())
    outages = [record for record in caplog.records if "waiting with backoff" in record.getMessage()]
    assert 1 <= len(outages) <= 6
