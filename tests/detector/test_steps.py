"""Steps: what counts as a spike, what is dropped, which limits are published, what poison does."""

import json
import math

import pytest

from gradloc_detector.policy import LAYERS_MAX, STEP_JUMP_MAX
from gradloc_detector.state import dump
from gradloc_proto import rules
from gradloc_proto.messages import OverrideSet, RunEnded, RunStarted, StepObserved


def test_a_jump_of_the_norm_opens_an_incident_with_its_numbers(story):
    story.tell(*story.steps(0, 29), story.spike(30))
    (opened,) = story.messages()
    assert opened.type == "incident_opened"
    assert opened.spike.step == 30
    assert opened.spike.snapshot == story.path(30)
    assert opened.spike.flags[0].rule == "norm"
    assert opened.spike.flags[0].score == pytest.approx(opened.spike.grad_norm / opened.spike.healthy_norm)
    assert opened.spike.limit < 4.0
    assert 0.3 < opened.spike.healthy_norm < 0.5


def test_a_calm_run_opens_nothing(story):
    story.tell(*story.steps(0, 300), RunEnded(run_id=story.run, ts=1.0, step=300))
    assert story.messages() == []


@pytest.mark.parametrize("norm", [math.nan, math.inf, -math.inf])
def test_a_norm_that_is_not_finite_is_a_spike_from_the_first_step_on(story, norm):
    story.tell(StepObserved(run_id=story.run, ts=1.0, step=0, grad_norm=norm))
    (opened,) = story.messages()
    assert opened.spike.flags[0].rule == "non-finite"


def test_one_layer_exploding_under_a_calm_norm_is_a_spike_of_that_layer(story, layer_names):
    exploding = dict.fromkeys(layer_names, 0.2) | {layer_names[1]: 9.0}
    story.tell(*story.steps(0, 29), story.step(30, layer_norms=exploding))
    (opened,) = story.messages()
    assert (opened.spike.flags[0].rule, opened.spike.flags[0].series) == ("layer", layer_names[1])


def test_the_trainers_flag_is_a_spike_where_our_own_rule_is_silent(story):
    story.tell(*story.steps(0, 29), story.spike(30, norm=0.45, limit=0.44))
    (opened,) = story.messages()
    assert [flag.rule for flag in opened.spike.flags] == ["trainer:norm"]
    assert opened.spike.limit == 0.44


def test_a_step_whose_norm_is_healthy_because_something_was_held_back_is_localized(story):
    held = story.step(30, rules_hit=(rules.HELD,), decision="snapshot", snapshot=story.path(30))
    story.tell(*story.steps(0, 29), held)
    (opened,) = story.messages()
    (flag,) = opened.spike.flags
    assert (flag.rule, flag.series, flag.value) == ("trainer:held", "norm", held.grad_norm)
    assert rules.is_about_gradient(opened.spike.flags)
    assert opened.spike.snapshot == story.path(30)


def test_a_rule_that_both_saw_is_told_once(story):
    story.tell(*story.steps(0, 29), story.spike(30))
    assert [flag.rule for flag in story.messages()[0].spike.flags if flag.series == "norm"] == ["norm"]


def test_a_snapshot_without_a_rule_is_a_wish_or_a_reference_not_a_spike(story):
    story.tell(*story.steps(0, 29), story.step(30, decision="snapshot", snapshot=story.path(30)))
    assert story.messages() == []


def test_a_skipped_update_is_a_spike_and_a_streak_of_them_is_told_as_worse(story):
    story.tell(*story.steps(0, 29), *story.steps(30, 34, decision="skip"))
    assert story.kinds() == ["incident_opened", *["incident_joined"] * 3, "incident_worsened"]
    assert "skip-streak" in [flag.rule for flag in story.messages()[-1].spike.flags]


def test_a_spike_that_only_the_trainer_could_see_during_our_warm_up_is_not_learnt(story):
    story.tell(*story.steps(0, 5), story.spike(6), *story.steps(7, 40))
    healthy = story.messages("limits")[-1].limits
    assert healthy.norm < 4.0


def test_a_spike_the_trainer_let_pass_asks_for_its_snapshot(story):
    story.tell(*story.steps(0, 29), story.step(30, norm=640.0))
    (request,) = story.messages("control")
    assert (request.type, request.step, request.by) == ("snapshot_requested", 30, "detector")


def test_repeated_steps_are_dropped_and_late_ones_count(story):
    steps = story.steps(0, 29)
    story.tell(*steps[:26], *steps[27:], *steps[:28])
    story.tell(story.spike(31), story.spike(30), story.spike(30))
    assert [message.spike.step for message in story.messages()] == [31, 30]
    # Of steps[:28] only step 26 had been missing; the others and the second spike 30 are repeats.
    assert story.state.book.num_repeated == 28


def test_a_gap_is_told_once_after_its_grace_and_a_late_step_is_still_taken(story):
    story.tell(*story.steps(0, 19), *story.steps(25, 40))
    gaps = [message for message in story.messages() if message.type == "stream_gap_noticed"]
    assert [(gap.first_step, gap.last_step) for gap in gaps] == [(20, 24)]
    story.tell(story.spike(22))
    assert story.messages()[-1].spike.step == 22


def announced(story, first_step, **values):
    return RunStarted(run_id=story.run, ts=1.0, first_step=first_step, **values)


def gaps_of(story):
    found = [message for message in story.messages() if message.type == "stream_gap_noticed"]
    return [(gap.first_step, gap.last_step) for gap in found]


def test_what_was_lost_before_the_first_step_that_came_is_told_where_the_trainer_says_what_was_first(story):
    story.tell(announced(story, 5), *story.steps(30, 45))
    assert gaps_of(story) == [(5, 29)]


def test_it_is_told_as_well_where_the_trainer_says_so_later(story):
    story.tell(*story.steps(30, 45), announced(story, 5), *story.steps(46, 60), announced(story, 5))
    assert gaps_of(story) == [(5, 29)]
    story.tell(story.spike(7))  # late, and taken all the same
    assert story.messages()[-1].spike.step == 7


@pytest.mark.parametrize("first_step", [None, 30])
def test_a_run_from_a_checkpoint_has_lost_nothing(story, first_step):
    story.tell(announced(story, first_step), *story.steps(30, 60), announced(story, 30))
    assert gaps_of(story) == []


def test_an_attempt_has_a_first_step_of_its_own(story):
    story.tell(
        announced(story, 0), *story.steps(0, 29), announced(story, 20, attempt=1), *story.steps(25, 40, attempt=1)
    )
    assert gaps_of(story) == [(20, 24)]


def test_a_gap_of_a_slow_run_is_told_by_the_clock(story):
    story.tell(*story.steps(0, 19), story.step(25), story.tick(100.0), story.tick(110.0))
    assert story.messages() == []
    story.tell(story.tick(130.0))
    assert story.kinds() == ["stream_gap_noticed"]


def test_a_gap_that_the_trainers_queue_made_says_so(story):
    story.tell(*story.steps(0, 19), story.step(30, num_events_dropped=10))
    story.tell(*story.steps(31, 40, num_events_dropped=10))
    assert "queue dropped 10" in story.messages()[0].reason


def test_steps_that_only_changed_places_are_no_gap(story):
    steps = story.steps(0, 40)
    steps[20], steps[22] = steps[22], steps[20]
    story.tell(*steps, RunEnded(run_id=story.run, ts=1.0, step=40))
    assert story.messages() == []


def test_subsampled_logging_is_no_gap(story):
    story.tell(*(story.step(number) for number in range(0, 600, 10)), RunEnded(run_id=story.run, ts=1.0, step=590))
    assert story.messages() == []


def test_a_new_attempt_starts_over_and_an_old_one_is_not_heard(story):
    story.tell(*story.steps(0, 29), story.spike(30))
    story.tell(RunStarted(run_id=story.run, ts=1.0, attempt=1), *story.steps(10, 40, attempt=1))
    story.tell(story.spike(35, attempt=0))
    assert story.kinds() == ["incident_opened", "incident_resolved"]
    assert "attempt 1" in story.messages()[-1].reason
    story.tell(story.spike(41, attempt=1))
    assert (story.messages()[-1].type, story.messages()[-1].attempt) == ("incident_opened", 1)
    assert story.state.book.num_old_attempt == 1


def test_limits_are_published_at_each_early_change_and_then_only_when_they_move(story):
    for step in story.steps(0, 63):
        before = story.state.baselines.version
        published = [effect.message.limits.version for effect in story.tell(step)]
        now = story.state.baselines.version
        if rules.limits_of(story.state.baselines).norm is not None:
            assert published == ([now] if now > before else [])
    early = len(story.messages("limits"))
    assert early >= 16
    story.tell(*story.steps(64, 163))
    assert len(story.messages("limits")) - early <= 12  # a steady run: every 16 steps at most


def test_a_trainer_hears_of_a_new_level_within_a_few_steps(story):
    story.tell(*story.steps(0, 100), *story.steps(101, 160, norm=0.6))
    assert story.messages("limits")[-1].limits.healthy_norm > 0.55


def test_limits_versions_only_grow_whatever_the_order_of_steps(story):
    steps = story.steps(0, 60)
    steps[30], steps[40] = steps[40], steps[30]
    story.tell(*steps)
    versions = [message.limits.version for message in story.messages("limits")]
    assert versions == sorted(set(versions))


@pytest.mark.parametrize("last", [100, 101, 102, 103])
def test_a_sensitivity_override_scales_the_limits_with_the_next_step_and_null_takes_it_back(story, last):
    def override(value, request_id):
        return OverrideSet(
            run_id=story.run, ts=1.0, name="sensitivity", value=value, request_id=request_id, by="a person"
        )

    story.tell(*story.steps(0, last))
    before = story.messages("limits")[-1].limits.norm
    story.tell(override(2.0, "r1"), story.step(last + 1))
    doubled = story.messages("limits")[-1].limits.norm
    story.tell(override(None, "r2"), override(2.0, "r1"), story.step(last + 2))
    after = story.messages("limits")[-1].limits.norm
    assert doubled == pytest.approx(2 * before, rel=0.05)
    assert after == pytest.approx(before, rel=0.05)


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0, -1.0, 1e9])
def test_an_absurd_override_is_rejected_with_the_range(story, value):
    story.tell(OverrideSet(run_id=story.run, ts=1.0, name="sensitivity", value=value, request_id="r", by="a person"))
    assert "0.1 to 1000" in story.rejections()[0]


@pytest.mark.parametrize("number", [1e308, 5e-324, 0.0, -0.0, -7.0, math.nan, math.inf, -math.inf])
def test_absurd_numbers_neither_crash_nor_poison_the_baseline(story, number):
    poison = dict.fromkeys(("a", "b", "c", "d"), number)
    story.tell(*story.steps(0, 29))
    for step in range(30, 40, 2):
        poisoned = dict.fromkeys(("grad_norm", "energy", "limit", "loss", "reward_mean", "kl", "ratio_max"), number)
        message = StepObserved(run_id=story.run, ts=1_000.0, step=step, layer_norms=poison, **poisoned)
        story.tell(message, story.step(step + 1))
    story.tell(*story.steps(40, 60))
    assert story.messages("limits")[-1].limits.norm < 4.0
    story.tell(*story.steps(61, 90), story.spike(91))
    assert story.messages()[-1].spike.step == 91
    dump(story.state)


def test_an_absurd_step_is_rejected_and_does_not_blind_the_run(story):
    story.tell(*story.steps(0, 29), story.step(30 + 2 * STEP_JUMP_MAX), story.step(2**53 - 1, ts=1.0), story.spike(30))
    assert len(story.rejections()) == 2
    assert story.kinds() == ["incident_opened"]


def test_a_message_of_another_run_is_rejected(story, new_story):
    story.tell(new_story(run="run-b").step(0))
    assert "run-b" in story.rejections()[0]


def test_layers_without_end_do_not_grow_the_state_without_end(story):
    for step in range(40):
        layers = {f"layer-{step}-{index}": 1.0 for index in range(100)} | {"x" * 10_000: 1.0}
        story.tell(story.step(step, layer_norms=layers))
    assert len(story.state.baselines.layer_names) == LAYERS_MAX


def test_the_state_of_64_layers_stays_under_64_kib_for_any_length_of_run(story):
    names = [f"model.layers.{index}.self_attention_block" for index in range(64)]

    def layers(step):
        return {name: 0.1234567890123 + 0.001 * ((step * 13 + place) % 17) for place, name in enumerate(names)}

    long_path = f"s3://bucket/{'p' * 400}/{story.run}/0/"
    sizes = []
    for number in range(1_500):
        if number % 60 == 59:
            story.tell(story.spike(number, snapshot=long_path + str(number), layer_norms=layers(number)))
            story.tell(story.committed(number, path=long_path + str(number)))
        elif number % 60 != 40:
            story.tell(story.step(number, layer_norms=layers(number)))
        if number % 100 == 99:
            sizes.append(len(dump(story.state)))
    assert max(sizes) <= 64 * 1024
    assert sizes[-1] <= 1.05 * max(sizes[:-1])


def test_a_checkpoint_is_plain_json(story):
    story.tell(*story.steps(0, 29), StepObserved(run_id=story.run, ts=1.0, step=30, grad_norm=math.nan))
    assert json.loads(dump(story.state))["version"] == 1
