"""Incidents: opened once, joined, worsened, resolved; a storm is one; nothing is swallowed."""

import math

from gradloc_proto import identities
from gradloc_proto.messages import RunEnded, RunStarted, StepObserved


def test_spikes_close_together_are_one_incident(story):
    story.tell(*story.steps(0, 29), story.spike(30), *story.steps(31, 40), story.spike(41, norm=600.0))
    opened, joined = story.messages()
    assert (opened.type, joined.type) == ("incident_opened", "incident_joined")
    assert opened.incident_id == joined.incident_id


def test_ids_are_derived_so_that_two_detectors_tell_the_same_incident(story, new_story):
    other = new_story()
    for told in (story, other):
        told.tell(*told.steps(0, 29), told.spike(30))
    first, second = story.messages()[0], other.messages()[0]
    assert first == second
    assert first.spike.spike_id == identities.spike_id(story.run, 0, 30, "norm")
    assert first.incident_id == identities.incident_id(story.run, 0, first.spike.spike_id)


def test_only_a_materially_worse_spike_is_told_as_worse(story):
    story.tell(*story.steps(0, 29))
    story.tell(story.spike(30, norm=100.0), story.spike(31, norm=150.0), story.spike(32, norm=300.0))
    story.tell(story.spike(33, norm=200.0))
    assert story.kinds() == ["incident_opened", "incident_joined", "incident_worsened", "incident_joined"]


def test_a_second_nan_is_no_worse_than_the_first(story):
    def nan(step):
        return StepObserved(run_id=story.run, ts=1.0, step=step, grad_norm=math.nan)

    story.tell(*story.steps(0, 29), story.spike(30), nan(31), nan(32))
    assert story.kinds() == ["incident_opened", "incident_worsened", "incident_joined"]


def test_calm_resolves_and_the_next_spike_opens_a_new_incident(story):
    story.tell(*story.steps(0, 29), story.spike(30), *story.steps(31, 49))
    assert story.kinds() == ["incident_opened"]
    story.tell(story.step(50), *story.steps(51, 60), story.spike(61))
    assert story.kinds() == ["incident_opened", "incident_resolved", "incident_opened"]
    assert "20 healthy steps" in story.messages()[1].reason
    assert story.messages()[0].incident_id != story.messages()[2].incident_id


def test_a_spike_begins_the_count_of_healthy_steps_anew(story):
    story.tell(*story.steps(0, 29), story.spike(30), *story.steps(31, 45), story.spike(46), *story.steps(47, 65))
    assert "incident_resolved" not in story.kinds()
    story.tell(story.step(66))
    assert story.kinds()[-1] == "incident_resolved"


def test_the_end_of_the_run_resolves(story):
    story.tell(*story.steps(0, 29), story.spike(30), RunEnded(run_id=story.run, ts=1.0, step=30))
    assert story.kinds() == ["incident_opened", "incident_resolved"]


def test_a_late_spike_of_a_run_that_is_over_is_told_and_does_not_stay_open(story):
    story.tell(*story.steps(0, 29), RunEnded(run_id=story.run, ts=1.0, step=31), story.spike(30))
    assert story.kinds() == ["incident_opened", "incident_resolved"]


def test_a_storm_is_one_incident_until_it_has_been_calm_for_long(story):
    story.tell(*story.steps(0, 29))
    for number in range(20):
        first = 30 + 30 * number
        story.tell(story.spike(first), *story.steps(first + 1, first + 29))
    assert story.kinds().count("incident_opened") == story.policy.storm_incidents
    last = story.state.book.last_step
    story.tell(*story.steps(last + 1, last + 200))
    assert story.kinds()[-1] == "incident_resolved"


def test_an_incident_carries_the_runs_labels(story):
    story.tell(RunStarted(run_id=story.run, ts=1.0, labels={"team": "reasoning"}))
    story.tell(*story.steps(0, 29), story.spike(30))
    assert story.messages()[0].labels == {"team": "reasoning"}
