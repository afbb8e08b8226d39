"""Localizations: which job should exist, and when the detector gives up."""

import pytest

from gradloc_detector.plan import needs_clock, plan
from gradloc_detector.policy import Policy
from gradloc_proto import rules
from gradloc_proto.messages import (
    Cost,
    Fidelity,
    Finding,
    JobReported,
    LocalizationFailed,
    LocalizationFinished,
    LocalizationStarted,
    RelocalizeRequested,
    RunEnded,
    SnapshotFailed,
)


@pytest.fixture
def spiked(story):
    """A run with an incident whose snapshot is committed."""
    story.tell(*story.steps(0, 29), story.spike(30), story.committed(30))
    return story


def planned(*stories, jobs_max=4):
    return plan([item.state.book for item in stories], jobs_max=jobs_max, policy=stories[0].policy)


def incident_of(story):
    return story.messages()[0].incident_id


def report(story, status, attempt=1, ts=3_000.0, detail=""):
    return JobReported(
        run_id=story.run,
        ts=ts,
        incident_id=incident_of(story),
        localization_attempt=attempt,
        status=status,
        detail=detail,
    )


def finished(story, attempt=1):
    fidelity = Fidelity(reported_norm=1.0, replayed_norm=1.0, rel_error=0.0, tolerance=0.1, reproduced=True)
    finding = Finding(
        verdict="token", strategy="attribution", step=30, summary="a token", fidelity=fidelity, cost=Cost(steps=1.0)
    )
    return LocalizationFinished(
        run_id=story.run, ts=3_100.0, incident_id=incident_of(story), localization_attempt=attempt, finding=finding
    )


def failed(story, attempt=1, retryable=True, reason="out of memory"):
    return LocalizationFailed(
        run_id=story.run,
        ts=3_100.0,
        incident_id=incident_of(story),
        localization_attempt=attempt,
        reason=reason,
        retryable=retryable,
    )


def wish(story, request_id="w1"):
    return RelocalizeRequested(
        run_id=story.run, ts=1.0, incident_id=incident_of(story), request_id=request_id, by="a person"
    )


def test_nothing_is_submitted_before_the_snapshot_exists(story):
    story.tell(*story.steps(0, 29), story.spike(30))
    assert planned(story).ready == ()
    story.tell(story.committed(30))
    (submission,) = planned(story).ready
    assert submission.snapshot == story.path(30)
    assert submission.submission_id == f"{incident_of(story)}-1"


def test_a_snapshot_that_is_read_before_its_step_is_not_forgotten(story):
    story.tell(*story.steps(0, 29), story.committed(30), story.spike(30))
    assert len(planned(story).ready) == 1


def test_the_healthy_reference_is_not_localized(story):
    story.tell(*story.steps(0, 29), story.committed(30, weights="reference"), story.spike(30))
    assert planned(story).ready == ()


def test_a_snapshot_that_never_comes_is_told_after_the_time_out(story):
    story.tell(*story.steps(0, 29), story.spike(30), story.tick(0.0), story.tick(299.0))
    assert story.kinds() == ["incident_opened"] and needs_clock(story.state.book)
    story.tell(story.tick(301.0))
    told = story.messages()[-1]
    assert (told.type, told.localization_attempt, told.retryable) == ("localization_failed", 1, False)
    assert "store" in told.reason
    assert not needs_clock(story.state.book)


def test_a_snapshot_that_failed_is_told_at_once_with_its_reason(story):
    story.tell(*story.steps(0, 29), story.spike(30))
    story.tell(SnapshotFailed(run_id=story.run, ts=1.0, step=30, reason="quota of 10 GB reached"))
    assert "quota of 10 GB" in story.messages()[-1].reason


def test_a_snapshot_that_comes_after_the_time_out_is_used_under_a_new_attempt(story):
    story.tell(*story.steps(0, 29), story.spike(30), story.tick(0.0), story.tick(400.0), story.committed(30))
    (submission,) = planned(story).ready
    assert submission.localization_attempt == 2


def cliff(story, first=40):
    """Steps whose reward falls off a cliff; the norm stays healthy."""
    return [story.step(number, reward_mean=0.9 + 0.01 * (number % 3)) for number in range(first)] + [
        story.step(number, reward_mean=0.0) for number in range(first, first + 5)
    ]


def test_a_cliff_of_rewards_is_localized_from_the_newest_batch_where_its_own_is_gone(story):
    story.tell(*cliff(story))
    assert [flag.rule for flag in story.messages()[0].spike.flags] == ["reward-cliff"]
    (asked,) = story.messages("control")
    assert (asked.step, asked.or_newest) == (story.messages()[0].spike.step, True)
    story.tell(story.committed(60, asked_step=asked.step, weights="after-update"))
    assert [item.snapshot for item in planned(story).ready] == [story.path(60)]


def test_of_a_spike_of_the_norm_no_other_step_will_do(story):
    story.tell(*story.steps(0, 39), story.step(40, norm=640.0))
    (asked,) = story.messages("control")
    assert (asked.step, asked.or_newest) == (40, False)


def vanished(story, first=40):
    """Steps that the trainer says have vanished; it kept them, and the norm of the others is healthy."""
    told = {"decision": "snapshot", "rules_hit": ("vanished",)}
    return [
        *story.steps(0, first - 1),
        *(story.step(number, snapshot=story.path(number), **told) for number in range(first, first + 5)),
    ]


def test_a_fault_of_the_run_starts_no_job_asks_for_no_snapshot_and_waits_for_nothing(story):
    committed = [story.committed(number) for number in range(40, 45)]
    story.tell(*vanished(story), *committed, story.tick(0.0), story.tick(1e6))
    assert [flag.rule for flag in story.messages()[0].spike.flags] == ["trainer:vanished"]
    assert planned(story).ready == () and not needs_clock(story.state.book)
    assert {*story.kinds()} == {"incident_opened", "incident_joined"} and story.messages("control") == []


def test_a_spike_that_joins_a_fault_of_the_run_is_localized(story):
    story.tell(*vanished(story), *(story.committed(number) for number in range(40, 45)), story.spike(45))
    assert needs_clock(story.state.book)
    story.tell(story.committed(45))
    assert [item.snapshot for item in planned(story).ready] == [story.path(45)]


def test_a_person_may_have_a_fault_of_the_run_localized_all_the_same(story):
    story.tell(*vanished(story), story.committed(44))
    story.tell(wish(story))
    assert [item.snapshot for item in planned(story).ready] == [story.path(44)]
    assert [item.localization_attempt for item in planned(story).ready] == [1]


@pytest.mark.parametrize("rule", sorted(rules.RULES_OF_THE_RUN))
def test_the_trainers_word_for_a_fault_of_the_run_starts_no_job_either(story, rule):
    told = story.step(30, decision="snapshot", rules_hit=(rule,), snapshot=story.path(30))
    story.tell(*story.steps(0, 29), told, story.committed(30))
    assert story.kinds() == ["incident_opened"] and planned(story).ready == ()


@pytest.mark.parametrize(
    "rule", ["norm", "layer", "spread", "energy", "gain", "non-finite", "skip", "a rule of tomorrow"]
)
def test_a_rule_about_the_gradient_or_an_unknown_one_starts_a_job(story, rule):
    told = story.step(30, decision="snapshot", rules_hit=(rule,), snapshot=story.path(30))
    story.tell(*story.steps(0, 29), told, story.committed(30))
    assert len(planned(story).ready) == 1


def test_the_newest_healthy_reference_goes_with_the_job_and_an_older_one_changes_nothing(story):
    references = [story.committed(step, weights="reference") for step in (20, 10)]
    story.tell(*story.steps(0, 29), *references, story.spike(30), story.committed(30))
    (submission,) = planned(story).ready
    assert (submission.snapshot, submission.reference) == (story.path(30), story.path(20))
    elsewhere = story.committed(25, weights="reference", path="file:///store/run-b/0/25")
    story.tell(elsewhere)
    assert len(story.rejections()) == 1 and planned(story).ready[0].reference == story.path(20)


def test_a_job_in_flight_is_watched_and_a_finding_settles_it(spiked):
    spiked.tell(report(spiked, "submitted"))
    assert planned(spiked).ready == () and len(planned(spiked).watch) == 1
    started = LocalizationStarted(
        run_id=spiked.run, ts=1.0, incident_id=incident_of(spiked), localization_attempt=1, step=30, snapshot="x"
    )
    spiked.tell(started, finished(spiked), report(spiked, "succeeded"))
    assert planned(spiked).watch == () and planned(spiked).ready == ()
    assert not needs_clock(spiked.state.book)


def test_resolving_does_not_lose_the_finding(spiked):
    spiked.tell(report(spiked, "submitted"), *spiked.steps(31, 60), RunEnded(run_id=spiked.run, ts=1.0, step=60))
    assert len(planned(spiked).watch) == 1
    spiked.tell(finished(spiked))
    assert spiked.state.book.incidents[0].localization.phase == "finished"


def test_a_failed_job_is_tried_again_after_a_backoff_under_a_new_id(spiked):
    spiked.tell(spiked.tick(3_000.0), report(spiked, "submitted"), failed(spiked))
    assert planned(spiked).ready == ()
    spiked.tell(spiked.tick(3_009.0))
    assert planned(spiked).ready == ()
    spiked.tell(spiked.tick(3_011.0))
    assert [item.localization_attempt for item in planned(spiked).ready] == [2]


def test_attempts_have_a_limit_and_the_end_is_told(spiked):
    now = 3_000.0
    for attempt in (1, 2, 3):
        spiked.tell(spiked.tick(now), report(spiked, "submitted", attempt), failed(spiked, attempt))
        now += 1_000.0
        spiked.tell(spiked.tick(now))
    assert planned(spiked).ready == ()
    told = spiked.messages()[-1]
    assert told.type == "localization_failed" and "given up after 3 attempts" in told.reason
    assert "out of memory" in told.reason


def test_a_failure_that_no_retry_helps_is_not_retried(spiked):
    spiked.tell(report(spiked, "submitted"), failed(spiked, retryable=False), spiked.tick(1e6))
    assert planned(spiked).ready == ()
    assert spiked.state.book.incidents[0].localization.phase == "failed"


def test_a_job_that_ends_without_a_finding_counts_as_failed_after_a_grace(spiked):
    spiked.tell(report(spiked, "submitted"), report(spiked, "failed", detail="exit code 137"), spiked.tick(4_000.0))
    spiked.tell(spiked.tick(4_010.0))
    assert len(planned(spiked).watch) == 1
    spiked.tell(spiked.tick(4_021.0), spiked.tick(5_000.0))
    assert [item.localization_attempt for item in planned(spiked).ready] == [2]


def test_a_finding_read_after_the_jobs_end_is_in_time(spiked):
    spiked.tell(report(spiked, "submitted"), report(spiked, "succeeded"), spiked.tick(4_000.0), finished(spiked))
    spiked.tell(spiked.tick(5_000.0))
    assert planned(spiked).ready == ()


def test_a_lost_job_is_submitted_again(spiked):
    spiked.tell(spiked.tick(3_000.0), report(spiked, "submitted"), report(spiked, "lost"), spiked.tick(3_100.0))
    assert [item.localization_attempt for item in planned(spiked).ready] == [2]


def test_a_finding_of_a_job_held_for_lost_spares_the_next_one(spiked):
    spiked.tell(report(spiked, "submitted"), report(spiked, "lost"), finished(spiked), spiked.tick(9_000.0))
    assert planned(spiked).ready == ()


def test_a_refused_job_is_told_and_not_repeated(spiked):
    spiked.tell(report(spiked, "refused", detail="HTTP 400: no such resource"), spiked.tick(9_000.0))
    assert planned(spiked).ready == ()
    assert "no such resource" in spiked.messages()[-1].reason


def test_a_hung_job_is_stopped_and_tried_again(new_story):
    story = new_story(Policy(running_timeout_s=100.0))
    story.tell(*story.steps(0, 29), story.spike(30), story.committed(30))
    story.tell(report(story, "running"), story.tick(0.0), story.tick(101.0), story.tick(200.0))
    assert [item.submission_id for item in planned(story).stop] == [f"{incident_of(story)}-1"]
    assert [item.localization_attempt for item in planned(story).ready] == [2]
    story.tell(report(story, "stopped", attempt=1))
    assert planned(story).stop == ()


def test_a_job_may_wait_for_a_spare_gpu_as_long_as_ray_lets_it(spiked):
    spiked.tell(report(spiked, "submitted"), spiked.tick(0.0), spiked.tick(1e6))
    assert len(planned(spiked).watch) == 1 and planned(spiked).stop == ()


def test_a_wish_to_localize_again_gets_a_new_attempt_once(spiked):
    spiked.tell(report(spiked, "submitted"), finished(spiked), wish(spiked), wish(spiked))
    assert [item.localization_attempt for item in planned(spiked).ready] == [2]
    spiked.tell(report(spiked, "submitted", 2), wish(spiked, "w2"))
    assert planned(spiked).ready == ()
    spiked.tell(finished(spiked, 2))
    assert [item.localization_attempt for item in planned(spiked).ready] == [3]
    spiked.tell(finished(spiked, 3), wish(spiked), wish(spiked, "w2"))
    assert planned(spiked).ready == ()


def test_a_wish_without_a_snapshot_is_answered(story):
    story.tell(*story.steps(0, 29), story.spike(30), story.tick(0.0), story.tick(400.0))
    story.tell(wish(story))
    assert [message.localization_attempt for message in story.messages()[1:]] == [1, 2]


def test_a_wish_for_an_unknown_incident_is_rejected(spiked):
    spiked.tell(
        RelocalizeRequested(run_id=spiked.run, ts=1.0, incident_id="inc-unknown", request_id="w", by="a person")
    )
    assert "inc-unknown" in spiked.rejections()[0]


@pytest.mark.parametrize(
    "path",
    [
        "--help/run-a/0/30",
        "file:///store/run-a/0/30 --redis redis://elsewhere",
        "file:///store/run-a/0/30\n",
        "file:///store/run-b/0/30",
        "file:///store/run-a/../run-b/0/30",
        "",
    ],
)
def test_a_snapshot_path_that_is_not_the_runs_own_is_rejected(story, path):
    story.tell(*story.steps(0, 29), story.spike(30), story.committed(30, path=path))
    assert len(story.rejections()) == 1
    assert planned(story).ready == ()


def test_one_job_a_run_and_a_cap_for_all_with_the_worst_first(new_story):
    stories = []
    for number, norm in enumerate([100.0, 10_000.0, 1_000.0]):
        story = new_story(run=f"run-{number}")
        for first in (30, 60):  # two incidents each
            story.tell(*story.steps(first - 30, first - 1), story.spike(first, norm), story.committed(first))
            story.tell(*story.steps(first + 1, first + 25))
        stories.append(story)
    wanted = planned(*stories, jobs_max=2)
    assert [item.run_id for item in wanted.to_submit(())] == ["run-1", "run-2"]
    assert wanted.to_submit({wanted.ready[0].submission_id})[0].run_id == "run-2"
    stories[1].tell(report(stories[1], "submitted"))
    assert [item.run_id for item in planned(*stories, jobs_max=2).to_submit(())] == ["run-2"]
    assert planned(*stories, jobs_max=1).to_submit(()) == ()


def test_a_clock_that_was_set_back_does_not_stretch_a_wait(spiked):
    spiked.tell(spiked.tick(1e9), report(spiked, "submitted"), failed(spiked), spiked.tick(3_000.0))
    assert len(planned(spiked).ready) == 1


def test_of_several_spikes_the_worst_with_a_snapshot_is_localized(story):
    story.tell(*story.steps(0, 29), story.spike(30, norm=100.0), story.spike(31, norm=900.0), story.spike(32, 5e3))
    story.tell(SnapshotFailed(run_id=story.run, ts=1.0, step=30, reason="busy"), story.committed(31))
    (submission,) = planned(story).ready
    assert submission.snapshot == story.path(31)
