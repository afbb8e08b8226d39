"""Faults that last: vanished and dead runs, growth, oscillation, cliffs, drifts, and what each flag says of itself."""

import math

import numpy as np
import pytest

from gradloc_proto import rules

CALM = 100


def noise(num, seed=0, deviation=0.2):
    return np.exp(deviation * np.random.default_rng(seed).normal(size=num))


def told(norms, names=(), layers=None, **series):
    """(row, flag) of every flag."""
    state, found = rules.RunState(), []
    for step, norm in enumerate(norms):
        known = {name: float(values[step]) for name, values in series.items()}
        known.setdefault("energy", None)
        layer_norms = np.zeros(0) if layers is None else layers[step]
        observation = rules.Observation(step, float(norm), layer_names=names, layer_norms_L=layer_norms, **known)
        flags = rules.judge(state, observation)
        found += [(step, flag) for flag in flags]
        state = rules.learn(state, observation, flags)
    return found


def rows_of(found, rule):
    return [row for row, flag in found if flag.rule == rule]


@pytest.mark.parametrize("depth", [1e-3, 1e-6])
def test_a_vanished_gradient_is_told_once_within_ten_steps(depth):
    norms = noise(CALM + 60)
    norms[CALM:] *= depth
    assert len(rows_of(told(norms), "vanished")) == 1
    assert CALM < rows_of(told(norms), "vanished")[0] <= CALM + 10


def test_a_run_that_only_yields_zeros_is_dead_within_ten_steps():
    norms = noise(CALM + 60)
    norms[CALM:] = 0.0
    assert [flag.rule for _, flag in told(norms)] == ["dead"]
    assert rows_of(told(norms), "dead")[0] <= CALM + 10


def test_slow_growth_that_no_step_shows_is_told():
    norms = noise(600) * np.exp(np.maximum(0, np.arange(600) - 200) * 0.02)
    found = told(norms)
    assert rows_of(found, "growth")
    assert rows_of(found, "norm") == []
    assert 200 < rows_of(found, "growth")[0] < 400


def test_ringing_is_told_once():
    norms = noise(CALM + 100) * np.where(np.arange(CALM + 100) % 2, 1.0, 3.5)
    assert len(rows_of(told(norms), "oscillation")) == 1


@pytest.mark.parametrize(("series", "rule"), [("reward", "reward-cliff"), ("accuracy", "accuracy-cliff")])
def test_a_cliff_is_told_once_with_its_baseline_and_limit(series, rule):
    values = 0.5 + 0.1 * np.random.default_rng(0).normal(size=CALM + 50)
    values[CALM:] -= 0.6
    found = told(noise(CALM + 50), **{series: values})
    assert rows_of(found, rule) == [CALM + 4]
    flag = found[0][1]
    assert flag.series == series
    assert flag.value < flag.limit < flag.baseline
    assert flag.score > 1


def test_a_reward_that_falls_on_and_on_is_told_once():
    values = 0.5 + 0.05 * np.random.default_rng(0).normal(size=CALM + 10)
    values[CALM:] -= np.linspace(1, 20, 10)
    assert rows_of(told(noise(CALM + 10), reward=values), "reward-cliff") == [CALM + 4]


@pytest.mark.parametrize("seed", range(4))
def test_noisy_rewards_that_only_slide_are_healthy(seed):
    generator = np.random.default_rng(seed)
    values = np.clip(0.5 + 0.25 * generator.standard_t(5, 500) - np.linspace(0, 0.5, 500), -2, 2)
    values[::7] = math.nan
    assert told(noise(500), reward=values) == []


def test_a_reward_of_a_run_that_never_varied_has_cliffs_too():
    values = np.full(80, 1.0)
    values[60:] = 0.0
    assert rows_of(told(noise(80), reward=values), "reward-cliff") == [64]


@pytest.mark.parametrize(("series", "level", "rule"), [("ratio_max", 2.0, "ratio-drift"), ("kl", 0.01, "kl-drift")])
def test_a_drift_is_told_when_it_lasts_three_steps_and_is_material(series, level, rule):
    values = level * noise(CALM + 20, 3)
    values[50] *= 1000  # one outlier is no drift
    values[CALM:] *= 100
    assert rows_of(told(noise(CALM + 20), **{series: values}), rule) == [CALM + 2]
    assert rows_of(told(noise(CALM + 20), **{series: values * 1e-4}), rule) == []


def test_a_spike_says_whether_energy_or_gain_made_it():
    energies = noise(CALM, 4) ** 2
    norms = np.sqrt(energies)
    loss_side, model_side = norms.copy(), norms.copy()
    loss_side[90] *= 50
    model_side[90] *= 50
    found = told(loss_side, energy=np.where(np.arange(CALM) == 90, energies * 2500, energies))
    assert [flag.rule for _, flag in found] == ["norm", "energy"]
    found = told(model_side, energy=energies)
    assert [flag.rule for _, flag in found] == ["norm", "gain"]
    gain = found[1][1]
    assert gain.score == pytest.approx(2500, rel=0.5)


def test_energy_of_a_step_that_hardly_learns_is_no_fault():
    energies = noise(CALM, 4) ** 2
    norms = np.sqrt(energies)
    norms[80:84] *= 0.1  # the gradient left by a KL term alone has another gain
    energies[80:84] *= 1e-8
    assert told(norms, energy=energies) == []


NAMES = tuple(f"{index}.mlp" for index in range(12))


def layers_of(num, seed=0):
    generator = np.random.default_rng(seed)
    return noise(num, seed)[:, None] * np.exp(0.1 * generator.normal(size=(num, 12)))


def test_a_layer_that_sticks_out_of_the_others_is_told_though_it_stays_within_its_own_range():
    common = np.exp(np.random.default_rng(1).uniform(-2, 2, CALM))[:, None]  # all layers breathe together
    layers = layers_of(CALM) * common
    assert told(np.linalg.norm(layers, axis=1), NAMES, layers) == []
    layers[90] = 1.5
    layers[90, 3] *= 12.0
    found = told(np.linalg.norm(layers, axis=1), NAMES, layers)
    assert [(row, flag.rule, flag.series) for row, flag in found] == [(90, "spread", "3.mlp")]


def test_layers_that_all_move_together_are_no_fault_of_one():
    layers = layers_of(CALM)
    layers[90] *= 6.0
    found = told(np.linalg.norm(layers, axis=1), NAMES, layers)
    assert [(row, flag.rule) for row, flag in found] == [(90, "norm")]


def test_an_infinite_layer_is_told_though_the_norm_is_finite():
    layers = layers_of(CALM)
    norms = np.linalg.norm(layers, axis=1)
    layers[90, 2] = math.inf
    layers[91, 2] = math.nan  # not logged
    assert [(row, flag.rule, flag.series) for row, flag in told(norms, NAMES, layers)] == [(90, "non-finite", "2.mlp")]


def test_every_flag_of_a_spike_names_value_score_baseline_and_limit():
    norms = noise(CALM)
    norms[90] = 64.0
    ((row, flag),) = told(norms)
    assert (row, flag.rule, flag.series, flag.value) == (90, "norm", "norm", 64.0)
    assert flag.score == pytest.approx(flag.value / flag.baseline)
    assert flag.baseline < flag.limit < flag.value
