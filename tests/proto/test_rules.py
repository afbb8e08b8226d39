"""The laws of the rules, whatever the numbers in them: what is flagged, and what can never poison a baseline."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradloc_proto import rules
from gradloc_proto.messages import StepObserved

HEALTHY = [1.0, 1.2, 0.9, 1.1, 0.8, 1.05, 0.95, 1.15, 1.0, 0.85]
LAYERS = {"0.attention": 0.5, "0.mlp": 0.6, "1.attention": 0.4, "1.mlp": 0.3}


def step(number, norm, *, layers=None, **more):
    return rules.observation_of(
        StepObserved(run_id="r", ts=1.0, step=number, grad_norm=norm, layer_norms=layers or {}, **more)
    )


def lived(norms, state=None, *, layers=None, start=0):
    """The state after these steps, and the flags of each."""
    state = rules.RunState() if state is None else state
    flags = []
    for number, norm in enumerate(norms, start):
        observation = step(number, norm, layers=layers)
        flags.append(rules.judge(state, observation))
        state = rules.learn(state, observation, flags[-1])
    return state, flags


def healthy(num_steps, state=None, *, layers=None, start=0):
    return lived([HEALTHY[number % len(HEALTHY)] for number in range(num_steps)], state, layers=layers, start=start)


def test_a_healthy_run_is_never_flagged():
    _, flags = healthy(300)
    assert not any(flags)


@pytest.mark.parametrize("num_steps", [12, 40, 200])
@pytest.mark.parametrize("norm", [20.0, 640.0, 1e30])
def test_a_spike_is_flagged_from_the_first_tens_of_steps_on(num_steps, norm):
    state, _ = healthy(num_steps)
    flags = rules.judge(state, step(num_steps, norm))
    assert flags
    assert flags[0].value == norm
    assert flags[0].limit is not None and norm > flags[0].limit


@pytest.mark.parametrize("num_steps", [0, 1, 3, 50])
@pytest.mark.parametrize("norm", [math.nan, math.inf, -math.inf])
def test_a_norm_that_is_not_finite_is_flagged_even_at_the_first_step(num_steps, norm):
    state, _ = healthy(num_steps)
    flags = rules.judge(state, step(num_steps, norm))
    assert [flag.rule for flag in flags][:1] == ["non-finite"]
    assert rules.breaches(rules.limits_of(state), norm, {})


def test_an_unknown_baseline_judges_nobody():
    assert rules.judge(rules.RunState(), step(0, 1e9)) == ()
    assert rules.breaches(rules.limits_of(rules.RunState()), 1e9, {"a": 1e9}) == ()


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 0.0, 1e9, 1e-9, 5e-324])
@pytest.mark.parametrize("num_poisoned", [1, 5])
def test_nothing_poisons_the_baseline(poison, num_poisoned):
    state, _ = healthy(60)
    before = rules.limits_of(state)
    state, _ = lived([poison] * num_poisoned, state, start=60)
    state, flags = healthy(60, state, start=60 + num_poisoned)
    assert not any(flags), "healthy steps after the poison are flagged"
    after = rules.limits_of(state)
    assert after.norm is not None and before.norm is not None
    assert after.norm <= 1.5 * before.norm, "the poison raised the limit"
    assert rules.judge(state, step(200, 640.0)), "a spike after the poison is missed"


def test_one_layer_exploding_is_named_though_the_norm_is_calm():
    state, _ = healthy(60, layers=LAYERS)
    flags = rules.judge(state, step(60, 1.0, layers={**LAYERS, "0.mlp": 60.0}))
    assert [flag.series for flag in flags if flag.rule == "layer"][:1] == ["0.mlp"]
    limits = rules.limits_of(state)
    assert "layer" in rules.breaches(limits, 1.0, {**LAYERS, "0.mlp": 60.0})
    assert not rules.breaches(limits, 1.0, LAYERS)


def test_the_worst_layer_comes_first():
    state, _ = healthy(60, layers=LAYERS)
    flags = rules.judge(state, step(60, 1.0, layers={**LAYERS, "0.mlp": 60.0, "1.mlp": 3000.0}))
    assert [flag.series for flag in flags if flag.rule == "layer"][:2] == ["1.mlp", "0.mlp"]


def test_an_exploding_layer_does_not_poison_its_own_baseline():
    state, _ = healthy(60, layers=LAYERS)
    state, _ = lived([1.0], state, layers={**LAYERS, "0.mlp": 1e6}, start=60)
    assert rules.judge(state, step(61, 1.0, layers={**LAYERS, "0.mlp": 60.0}))


def test_a_lasting_new_level_becomes_the_baseline():
    state, _ = healthy(60)
    state, flags = lived([100 * HEALTHY[number % len(HEALTHY)] for number in range(100)], state, start=60)
    assert flags[0], "the first step of the new level is a spike"
    assert not any(flags[-40:]), "the new level is still flagged after a hundred steps of it"
    assert rules.judge(state, step(160, 64_000.0))


def test_trainer_and_detector_agree():
    state, _ = healthy(60, layers=LAYERS)
    limits = rules.limits_of(state)
    for norm, layers in [(1.0, LAYERS), (640.0, LAYERS), (1.0, {**LAYERS, "1.mlp": 99.0}), (math.nan, LAYERS)]:
        flags = rules.judge(state, step(60, norm, layers=layers))
        assert bool(rules.breaches(limits, norm, layers)) == bool(flags), (norm, layers)


norms = st.one_of(
    st.floats(0.5, 2.0),
    st.floats(allow_nan=True, allow_infinity=True),
    st.sampled_from([0.0, math.nan, math.inf, 1e300, 5e-324]),
)


@settings(max_examples=80, deadline=None)
@given(st.lists(norms, max_size=60))
def test_a_saved_state_goes_on_as_if_nothing_had_happened(values):
    state, _ = lived(values, layers=LAYERS)
    loaded = rules.load_state(json.loads(json.dumps(rules.dump_state(state))))
    assert repr(rules.limits_of(loaded)) == repr(rules.limits_of(state))
    _, flags = healthy(20, state, layers=LAYERS, start=len(values))
    _, again = healthy(20, loaded, layers=LAYERS, start=len(values))
    assert repr(flags) == repr(again)


@settings(max_examples=80, deadline=None)
@given(st.lists(norms, max_size=60))
def test_whatever_was_seen_limits_are_known_positive_numbers_or_unknown(values):
    state, _ = lived(values)
    limits = rules.limits_of(state)
    assert limits.norm is None or limits.norm > 0
    assert limits.healthy_norm is None or limits.norm is None or limits.healthy_norm <= limits.norm


@settings(max_examples=50, deadline=None)
@given(st.lists(norms, max_size=60), st.floats(1e-3, 1e3))
def test_judging_changes_nothing(values, norm):
    state, _ = lived(values)
    before = json.dumps(rules.dump_state(state))
    rules.judge(state, step(100, norm))
    assert json.dumps(rules.dump_state(state)) == before


@pytest.mark.parametrize(
    "data",
    [{}, {"sensitivity": 3}, {"sensitivity": {"unknown": 1}, "layer_names": [], "pending_regime": [], "version": 1}],
)
def test_what_is_no_state_is_refused(data):
    with pytest.raises(ValueError, match="not a saved state"):
        rules.load_state(data)
