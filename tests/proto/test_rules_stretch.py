"""A stretch learnt at once leaves what its steps leave one by one, and says where it stopped."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradloc_proto import rules
from gradloc_proto.messages import StepObserved

NAMES = tuple(f"layers.{index}.mlp" for index in range(6))


def run_of(seed, num_steps, odd=()):
    """Steps of a made-up run; `odd` are (step, field, value) that replace what is healthy."""
    generator = np.random.default_rng(seed)
    odd = {(step, name): value for step, name, value in odd}
    steps = []
    for step in range(num_steps):
        layers = generator.lognormal(0.0, 0.15, len(NAMES))
        fields = {
            "grad_norm": float(np.linalg.norm(layers)) * math.exp(0.002 * step),
            "energy": float(generator.lognormal(0.0, 0.2)),
            "ratio_max": float(generator.lognormal(0.5, 0.2)),
            "reward_mean": float(generator.normal()),
        }
        for name in ("grad_norm", "energy", "ratio_max", "kl", "reward_mean", "accuracy"):
            if (step, name) in odd:
                fields[name] = odd[step, name]
        norms = dict(zip(NAMES, layers.tolist(), strict=True))
        if (step, "layer") in odd:
            norms[NAMES[step % len(NAMES)]] = odd[step, "layer"]
        steps.append(StepObserved(run_id="r", ts=1.0, step=step, layer_norms=norms, **fields))
    return steps


def one_by_one(state, steps):
    flagged, limits = [], []
    for message in steps:
        observation = rules.observation_of(message)
        flags = rules.judge(state, observation)
        state = rules.learn(state, observation, flags)
        flagged += [message.step] * bool(flags)
        limits.append(rules.limits_of(state))
    return state, flagged, limits


def stretch_of(steps):
    return rules.Stretch(
        steps=[step.step for step in steps],
        norms=[step.grad_norm for step in steps],
        energies=[step.energy for step in steps],
        ratios=[step.ratio_max for step in steps],
        kls=[step.kl for step in steps],
        rewards=[step.reward_mean for step in steps],
        accuracies=[step.accuracy for step in steps],
        layer_names=tuple(steps[0].layer_norms),
        layer_norms_KL=np.array([list(step.layer_norms.values()) for step in steps]),
    )


def in_stretches(state, steps):
    """The same run where each calm stretch is learnt at once; also how many steps were."""
    flagged, limits, num_at_once, start = [], [], 0, 0
    with np.errstate(all="ignore"):
        while start < len(steps):
            lesson = rules.learn_stretch(state, stretch_of(steps[start:]))
            before, state, renewals = state, lesson.state, list(lesson.renewals)
            known = rules.limits_of(before)
            for index in range(lesson.num):
                if renewals and renewals[0].at_step == index:
                    known = rules.limits_of(lesson.state_at(renewals.pop(0)))
                limits.append(known)
            num_at_once += lesson.num
            start += lesson.num
            state, more, more_limits = one_by_one(state, steps[start : start + 1])
            flagged, limits, start = flagged + more, limits + more_limits, start + 1
    return state, flagged, limits, num_at_once


def same(one, other):
    return repr(one) == repr(other)  # NaN is NaN


@pytest.mark.parametrize("odd", [[], [(150, "grad_norm", 90.0)], [(150, "layer", 40.0), (151, "layer", 0.0)]])
def test_stretches_leave_the_state_flags_and_limits_of_single_steps(odd):
    steps = run_of(1, 420, odd)
    state, flagged, limits = one_by_one(rules.RunState(), steps)
    other, other_flagged, other_limits, num_at_once = in_stretches(rules.RunState(), steps)
    assert rules.dump_state(other) == rules.dump_state(state)
    assert other_flagged == flagged
    assert bool(flagged) == bool(odd)
    assert other_limits == limits
    assert num_at_once > 300


ODD_VALUES = {
    "grad_norm": [0.0, math.nan, math.inf, -1.0, 30.0, 1e-6, 300.0],
    "energy": [None, 0.0, math.inf, 500.0],
    "ratio_max": [None, math.nan, 1e4],
    "kl": [0.1, 0.0],
    "reward_mean": [None, math.nan, -50.0],
    "accuracy": [0.5],
    "layer": [0.0, math.nan, math.inf, 50.0],
}


@st.composite
def oddities(draw):
    found = []
    for _ in range(draw(st.integers(0, 12))):
        name = draw(st.sampled_from(sorted(ODD_VALUES)))
        first, value = draw(st.integers(0, 239)), draw(st.sampled_from(ODD_VALUES[name]))
        length = draw(st.sampled_from([1, 1, 1, 2, 5, 12, 40]))
        found += [(step, name, value) for step in range(first, first + length)]
    return found


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1_000), oddities(), st.sampled_from([1.0, 0.5, 2.0]))
def test_whatever_happens_in_a_run_stretches_are_the_same_as_single_steps(seed, odd, scale):
    steps = run_of(seed, 240, odd)
    fresh = rules.RunState(sensitivity=rules.Sensitivity(scale=scale))
    with np.errstate(all="ignore"):
        state, flagged, limits = one_by_one(fresh, steps)
    other, other_flagged, other_limits, _ = in_stretches(fresh, steps)
    assert same(rules.dump_state(other), rules.dump_state(state))
    assert other_flagged == flagged
    assert same(other_limits, limits)


def test_a_run_that_swings_by_turns_is_told_at_the_same_step():
    odd = [(step, "grad_norm", 2.0 if step % 2 else 4.5) for step in range(80, 200)]
    steps = run_of(3, 200, odd)
    state, flagged, _ = one_by_one(rules.RunState(), steps)
    other, other_flagged, _, _ = in_stretches(rules.RunState(), steps)
    assert flagged and other_flagged == flagged
    assert rules.dump_state(other) == rules.dump_state(state)


def test_nothing_is_learnt_at_once_before_the_limits_have_settled_or_for_other_layers():
    steps = run_of(4, 160)
    young, _, _ = one_by_one(rules.RunState(), steps[:40])
    assert rules.learn_stretch(young, stretch_of(steps[40:])).num == 0
    old, _, _ = one_by_one(rules.RunState(), steps[:100])
    renamed = [
        step.model_copy(update={"layer_norms": {f"x{name}": value for name, value in step.layer_norms.items()}})
        for step in steps[100:]
    ]
    assert rules.learn_stretch(old, stretch_of(renamed)).num == 0
    assert rules.learn_stretch(old, stretch_of(steps[100:])).num > 0
