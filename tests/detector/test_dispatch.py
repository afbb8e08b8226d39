"""Dispatch over real HTTP: ids are reused, lost, refused; Ray is down and comes back; nothing doubles."""

import shlex
import time
from dataclasses import replace

import pytest

from gradloc_detector.dispatch import Dispatcher, JobRefused, JobServerError, JobTemplate, RayJobs, RayUnavailable
from gradloc_detector.plan import Plan, Submission
from gradloc_proto import codec, streams
from gradloc_proto.memory_bus import MemoryBus

SUBMISSION = Submission("run-a", 0, "inc-0123456789abcdef", 1, "file:///store/run-a/0/30", 1560.0)
JOB = "inc-0123456789abcdef-1"


@pytest.fixture
def jobs(ray_server):
    client = RayJobs(ray_server.address)
    yield client
    client.close()


@pytest.fixture
def bus():
    return MemoryBus()


@pytest.fixture
def dispatcher(bus, ray_server):
    made = Dispatcher(bus, RayJobs(ray_server.address), JobTemplate(), poll_s=0.02)
    made.start()
    yield made
    made.close()


def reports(bus):
    found = bus.read({streams.stream("run-a", "control"): "0-0"}, count=1_000)
    return [codec.decode(entry.data) for entries in found.values() for entry in entries]


def statuses(bus):
    return [report.status for report in reports(bus)]


def test_a_job_asks_for_a_spare_gpu_and_its_command_is_quoted():
    nasty = "file:///a b/run-a/$(reboot);'x'/0/30"
    body = JobTemplate(python="/opt/py thon/bin/python", strategy="bisect").body(
        Submission("run-a", 2, "inc-1", 3, nasty, 1.0)
    )
    assert body["entrypoint_resources"] == {"spare_gpu": 1}
    assert body["submission_id"] == "inc-1-3"
    assert shlex.split(body["entrypoint"]) == [
        *("/opt/py thon/bin/python", "-m", "gradloc_localizer"),
        *("--run", "run-a", "--attempt", "2", "--incident", "inc-1", "--localization-attempt", "3"),
        *("--snapshot", nasty, "--strategy", "bisect"),
    ]
    assert all(isinstance(value, str) for value in body["metadata"].values())


@pytest.mark.parametrize(
    "submission",
    [
        Submission("run a", 0, "inc-1", 1, "file:///x", 1.0),
        Submission("run-a", 0, "inc;rm", 1, "file:///x", 1.0),
        Submission("run-a", 0, "inc/../../../x", 1, "file:///x", 1.0),
        Submission("../run", 0, "inc-1", 1, "file:///x", 1.0),
    ],
)
def test_ids_that_could_not_be_ours_never_reach_ray(submission):
    with pytest.raises(ValueError, match="not usable"):
        JobTemplate().body(submission)


def test_posting_a_job_twice_makes_one(jobs, ray_server):
    body = JobTemplate().body(SUBMISSION)
    jobs.submit(body)
    jobs.submit(body)
    assert list(ray_server.jobs) == [JOB]


def test_a_server_error_without_the_job_is_an_error(jobs, ray_server):
    ray_server.num_failing_posts = 1
    with pytest.raises(JobServerError, match="GCS is not ready"):
        jobs.submit(JobTemplate().body(SUBMISSION))


def test_a_used_id_whose_job_ray_has_lost_is_not_taken_for_submitted(jobs, ray_server):
    jobs.submit(JobTemplate().body(SUBMISSION))
    ray_server.lose_everything()
    with pytest.raises(JobServerError, match="already exists"):
        jobs.submit(JobTemplate().body(SUBMISSION))


def test_a_request_ray_will_not_have_is_refused(jobs, ray_server):
    ray_server.refusal = "no such field"
    with pytest.raises(JobRefused, match="no such field"):
        jobs.submit(JobTemplate().body(SUBMISSION))


def test_the_token_is_sent_and_a_wrong_one_is_named_without_showing_it(ray_server):
    ray_server.token = "s3cret-token"
    right, wrong = RayJobs(ray_server.address, token="s3cret-token"), RayJobs(ray_server.address, token="oth3r-token")
    right.submit(JobTemplate().body(SUBMISSION))
    with pytest.raises(RayUnavailable, match="RAY_AUTH_TOKEN") as caught:
        wrong.status(JOB)
    assert "oth3r" not in str(caught.value)
    right.close()
    wrong.close()


@pytest.mark.parametrize("address", ["", "ray", "ray://h:1", "http://", "ftp://h"])
def test_an_address_that_is_not_a_dashboard_is_refused_in_one_line(address):
    with pytest.raises(ValueError, match="http://host:8265"):
        RayJobs(address)


def test_the_life_of_a_job_is_reported_step_by_step(dispatcher, bus, ray_server, eventually):
    dispatcher.put(Plan(ready=(SUBMISSION,), jobs_max=1))
    eventually(lambda: statuses(bus) == ["submitted"])
    dispatcher.put(Plan(watch=(SUBMISSION,), jobs_max=1))
    ray_server.set_status(JOB, "RUNNING")
    eventually(lambda: statuses(bus) == ["submitted", "running"])
    logs = ", last available logs (truncated to 20,000 chars):\na prompt"
    ray_server.set_status(JOB, "FAILED", "entrypoint exited\nwith code 137" + logs)
    eventually(lambda: statuses(bus) == ["submitted", "running", "failed"])
    assert reports(bus)[-1].detail == "entrypoint exited with code 137"
    assert len(ray_server.bodies) == 1


def test_a_job_ray_forgot_is_reported_lost(dispatcher, bus, ray_server, eventually):
    dispatcher.put(Plan(watch=(SUBMISSION,), jobs_max=1))
    eventually(lambda: statuses(bus) == ["lost"])


def test_ray_being_down_loses_nothing_and_blocks_nobody(dispatcher, bus, ray_server, eventually):
    ray_server.down()
    dispatcher.put(Plan(ready=(SUBMISSION,), jobs_max=1))
    eventually(lambda: not dispatcher.is_ray_up)
    assert statuses(bus) == []
    ray_server.start()
    eventually(lambda: statuses(bus) == ["submitted"])
    assert dispatcher.is_ray_up and list(ray_server.jobs) == [JOB]


def test_a_job_at_which_ray_fails_is_tried_again(dispatcher, bus, ray_server, eventually):
    ray_server.num_failing_posts = 2
    dispatcher.put(Plan(ready=(SUBMISSION,), jobs_max=1))
    eventually(lambda: statuses(bus) == ["submitted"])


def test_a_refusal_is_reported(dispatcher, bus, ray_server, eventually):
    ray_server.refusal = "entrypoint_resources: unknown"
    dispatcher.put(Plan(ready=(SUBMISSION,), jobs_max=1))
    eventually(lambda: statuses(bus) == ["refused"])
    assert "unknown" in reports(bus)[0].detail


def test_the_reference_goes_by_the_environment():
    assert JobTemplate().body(SUBMISSION)["runtime_env"] == {}
    submission = replace(SUBMISSION, reference="file:///store/run-a/0/20")
    assert JobTemplate().body(submission)["runtime_env"] == {"env_vars": {"GRADLOC_REFERENCE": submission.reference}}


def test_the_cap_holds_for_all_replicas_together(bus, ray_server, eventually):
    replicas = [Dispatcher(bus, RayJobs(ray_server.address), JobTemplate(), poll_s=0.02) for _ in range(3)]
    for number, replica in enumerate(replicas):
        mine = [Submission(f"run-{number}", 0, f"inc-{number}{index}", 1, "file:///x", 1.0) for index in range(4)]
        replica.put(Plan(ready=tuple(mine), jobs_max=4))
        replica.start()
    try:
        eventually(lambda: len(ray_server.jobs) == 4)
        time.sleep(0.5)
        assert len(ray_server.jobs) == 4
        for job in list(ray_server.jobs)[:3]:
            ray_server.set_status(job, "SUCCEEDED")
        # Each tells of a posted job only once its run's states show it; a fresh plan frees the slots.
        for number, replica in enumerate(replicas):
            fresh = [Submission(f"run-{number}", 0, f"new-{number}{index}", 1, "file:///x", 1.0) for index in range(4)]
            replica.put(Plan(ready=tuple(fresh), jobs_max=4))
        eventually(lambda: len(ray_server.jobs) == 7)
        time.sleep(0.5)
        assert len(ray_server.jobs) == 7
    finally:
        for replica in replicas:
            replica.close()


def test_jobs_of_others_on_the_same_ray_do_not_count(dispatcher, bus, ray_server, eventually):
    ray_server.jobs["raysubmit_x"] = {"submission_id": "raysubmit_x", "status": "RUNNING", "metadata": {"owner": "x"}}
    ray_server.jobs["driver"] = {"submission_id": None, "status": "RUNNING", "metadata": None}
    dispatcher.put(Plan(ready=(SUBMISSION,), jobs_max=1))
    eventually(lambda: statuses(bus) == ["submitted"])


def test_a_job_to_be_stopped_is_stopped_and_said_so(dispatcher, bus, ray_server, eventually):
    dispatcher.put(Plan(stop=(SUBMISSION,), jobs_max=1))
    eventually(lambda: "stopped" in statuses(bus))
    assert ray_server.stopped[0] == JOB


def test_the_cap_holds_while_reports_are_on_their_way(dispatcher, bus, ray_server, eventually):
    others = [Submission("run-a", 0, f"inc-{number}", 1, "file:///x", float(number)) for number in range(3)]
    dispatcher.put(Plan(ready=(others[0],), jobs_max=1))
    eventually(lambda: len(ray_server.jobs) == 1)
    dispatcher.put(Plan(ready=(others[2], others[1], others[0]), jobs_max=1))
    dispatcher.put(Plan(ready=(others[2], others[1], others[0]), watch=(), jobs_max=2))
    eventually(lambda: len(ray_server.jobs) == 2)
    assert sorted(ray_server.jobs) == ["inc-0-1", "inc-2-1"]
