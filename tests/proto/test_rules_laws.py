"""Laws of the baselines that hold for any numbers: scale, order, memory, and what may never count as normal."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradloc_proto import rules

LAWS = settings(max_examples=60, deadline=None)
healthy_values = st.floats(0.6, 1.7)
any_values = st.one_of(healthy_values, st.floats(1e-6, 1e6), st.sampled_from([0.0, math.nan, math.inf, 1e300, 5e-324]))


def observed(step, norm, layers=(), **more):
    names = tuple(f"{index}.mlp" for index in range(len(layers)))
    more = {"energy": None, **more}
    return rules.Observation(step, norm, layer_names=names, layer_norms_L=np.array(layers, dtype=float), **more)


def lived(norms, state=None, layers_of=lambda norm: ()):
    """The state after these norms, and for each the rules that it broke."""
    state = rules.RunState() if state is None else state
    broken = []
    for step, norm in enumerate(norms):
        observation = observed(step, norm, layers_of(norm))
        flags = rules.judge(state, observation)
        broken.append(tuple(flag.rule for flag in flags))
        state = rules.learn(state, observation, flags)
    return state, broken


def noise(num, seed=0, deviation=0.25):
    return np.exp(deviation * np.random.default_rng(seed).normal(size=num)).tolist()


@LAWS
@given(st.lists(any_values, min_size=1, max_size=90), st.integers(-60, 60))
def test_the_unit_of_the_norm_changes_no_flag(norms, exponent):
    factor = 2.0**exponent
    # Beyond what a double holds a scaled norm is another number.
    norms = [norm for norm in norms if not 0 < norm < 1e-250 and not 1e250 < norm < math.inf]
    _, broken = lived(norms, layers_of=lambda norm: (norm, 2 * norm, norm / 2, norm))
    _, scaled = lived([norm * factor for norm in norms], layers_of=lambda norm: (norm, 2 * norm, norm / 2, norm))
    assert broken == scaled


@LAWS
@given(st.lists(healthy_values, min_size=8, max_size=32), st.randoms(use_true_random=False))
def test_the_order_of_up_to_a_window_of_healthy_steps_does_not_matter(norms, random):
    shuffled = norms.copy()
    random.shuffle(shuffled)
    one, broken = lived(norms)
    other, _ = lived(shuffled)
    assert not any(broken)
    # The version says at which step they last changed, and that is a matter of order.
    known, found = rules.limits_of(one), rules.limits_of(other)
    assert found.model_copy(update={"version": known.version}) == known


@LAWS
@given(st.lists(st.sampled_from([math.nan, math.inf, -math.inf, 0.0]), max_size=40), st.integers(0, 60))
def test_nan_infinity_and_exact_zeros_change_no_limit_wherever_they_come(poison, place):
    norms = noise(60)
    clean, _ = lived(norms)
    poisoned, _ = lived([*norms[:place], *poison, *norms[place:]])
    known, found = rules.limits_of(clean), rules.limits_of(poisoned)
    assert (found.norm, found.healthy_norm) == (known.norm, known.healthy_norm)


@LAWS
@given(st.lists(st.floats(50.0, 1e12), min_size=1, max_size=2), st.integers(10, 59), st.integers(0, 1000))
def test_spikes_change_limits_no_more_than_leaving_the_steps_out(spikes, place, seed):
    norms = noise(60, seed)
    without, _ = lived(norms)
    with_spikes, broken = lived([*norms[:place], *spikes, *norms[place:]])
    assert broken[place] == ("norm",)
    known, found = rules.limits_of(without), rules.limits_of(with_spikes)
    # Limits of a grown-up run are renewed at every fourth step, so they may differ by what came in between.
    assert known.norm is not None and found.norm is not None
    assert found.norm <= 1.2 * known.norm


@LAWS
@given(st.lists(any_values, max_size=80), st.integers(0, 80), st.lists(any_values, max_size=30))
def test_a_saved_state_judges_and_learns_exactly_as_the_one_that_was_saved(norms, cut, more):
    def layers_of(norm):
        return (norm, norm / 3, 2 * norm)

    state, _ = lived(norms[:cut], layers_of=layers_of)
    loaded = rules.load_state(json.loads(json.dumps(rules.dump_state(state))))
    state, broken = lived(more, state, layers_of)
    loaded, again = lived(more, loaded, layers_of)
    assert broken == again
    assert json.dumps(rules.dump_state(state)) == json.dumps(rules.dump_state(loaded))


@LAWS
@given(st.lists(any_values, max_size=150))
def test_memory_does_not_grow_with_steps(norms):
    few, _ = lived(noise(70), layers_of=lambda norm: (norm,) * 4)
    many, _ = lived([*noise(70), *norms], layers_of=lambda norm: (norm,) * 4)
    assert len(json.dumps(rules.dump_state(many))) <= len(json.dumps(rules.dump_state(few))) + 100


def test_a_state_of_64_layers_with_four_kinds_each_fits_the_checkpoint():
    names = tuple(
        f"model.layers.{index}.{kind}" for index in range(64) for kind in ("attention", "mlp", "norm", "gate")
    )
    state = rules.RunState()
    for step, norm in enumerate(noise(80)):
        observation = rules.Observation(
            step, norm, norm, names, np.full(len(names), norm), ratio_max=2.0, kl=0.01, reward=norm, accuracy=norm
        )
        state = rules.learn(state, observation, rules.judge(state, observation))
    assert len(json.dumps(rules.dump_state(state))) <= 64 * 1024


def test_the_version_grows_only_when_a_limit_changes():
    state, _ = lived([1.0] * 100)
    limits = rules.limits_of(state)
    for step in range(100, 120):
        observation = observed(step, 1.0)
        state = rules.learn(state, observation, rules.judge(state, observation))
    assert rules.limits_of(state) == limits
    state, _ = lived([3.0] * 24, state)
    assert rules.limits_of(state).version > limits.version


@LAWS
@given(st.lists(any_values, min_size=1, max_size=100))
def test_limits_differ_only_where_the_version_does(norms):
    state, seen = rules.RunState(), {}
    for step, norm in enumerate(norms):
        observation = observed(step, norm, (norm, norm))
        before = state.version
        state = rules.learn(state, observation, rules.judge(state, observation))
        assert state.version >= before
        limits = repr(rules.limits_of(state))
        assert seen.setdefault(state.version, limits) == limits


@pytest.mark.parametrize("scale", [0.5, 2.0, 10.0])
def test_the_scale_is_the_factor_on_every_limit(scale):
    plain, _ = lived(noise(50), layers_of=lambda norm: (norm, norm))
    tolerant, _ = lived(
        noise(50), rules.RunState(sensitivity=rules.Sensitivity(scale=1.0)), layers_of=lambda norm: (norm, norm)
    )
    tolerant = rules.RunState(
        sensitivity=rules.Sensitivity(scale=scale), layer_names=tolerant.layer_names, series=tolerant.series
    )
    one, other = rules.limits_of(plain), rules.limits_of(tolerant)
    assert other.norm == pytest.approx(scale * one.norm)
    assert other.layers["0.mlp"] == pytest.approx(scale * one.layers["0.mlp"])
    assert other.healthy_norm == one.healthy_norm


def test_a_new_scale_is_a_new_version():
    state, _ = lived([1.0] * 50)
    before = state.version
    state = rules.RunState(
        rules.Sensitivity(scale=2.0), state.layer_names, state.series, state.trends, state.version, state.version_scale
    )
    observation = observed(50, 1.0)
    state = rules.learn(state, observation, rules.judge(state, observation))
    assert state.version > before


def test_a_layer_that_appears_late_or_skips_steps_has_its_own_warm_up():
    state = rules.RunState()
    for step in range(40):
        layers = {"a": 1.0} if step < 20 or step % 2 else {"a": 1.0, "b": 3.0}
        observation = rules.Observation(step, 1.0, None, tuple(layers), np.array(list(layers.values())))
        state = rules.learn(state, observation, rules.judge(state, observation))
        if step == 30:
            assert "b" not in rules.limits_of(state).layers
    assert rules.limits_of(state).healthy_layers["b"] == pytest.approx(3.0, rel=0.005)


@pytest.mark.parametrize("seed", range(8))
def test_short_healthy_runs_are_never_flagged(seed):
    """Forty steps of a small GRPO run: noisy, some steps without any advantage, most layers moving together."""
    generator = np.random.default_rng(seed)
    state = rules.RunState()
    for step, norm in enumerate(noise(60, seed, deviation=0.3)):
        norm = 0.0 if generator.random() < 0.1 else norm
        layers = norm * np.exp(0.3 * generator.normal(size=12))
        observation = observed(step, norm, layers.tolist(), energy=norm**2 * float(np.exp(0.3 * generator.normal())))
        flags = rules.judge(state, observation)
        assert not flags, f"step {step}: {flags}"
        state = rules.learn(state, observation, flags)


@pytest.mark.parametrize("num_steps", [8, 9, 10, 16])
def test_a_tenfold_spike_is_seen_from_the_ninth_step_on(num_steps):
    state, _ = lived(noise(num_steps))
    assert [flag.rule for flag in rules.judge(state, observed(num_steps, 10.0))] == ["norm"]
