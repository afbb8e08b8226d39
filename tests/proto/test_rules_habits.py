"""What a run does by habit is no spike: two levels, quiet phases, exact zeros, drift, new regimes."""

import numpy as np
import pytest

from gradloc_proto import rules


def flagged(norms, **more):
    """Rows with flags."""
    state, rows = rules.RunState(), []
    for step, norm in enumerate(norms):
        known = {name: values[step] for name, values in more.items()}
        observation = rules.Observation(step, float(norm), None, (), np.zeros(0), **known)
        flags = rules.judge(state, observation)
        rows += [step] if flags else []
        state = rules.learn(state, observation, flags)
    return rows


def noise(num, seed=0):
    return np.exp(0.25 * np.random.default_rng(seed).normal(size=num))


@pytest.mark.parametrize("seed", range(4))
def test_a_run_that_alternates_between_a_floor_and_an_active_level_is_healthy_and_its_spikes_are_seen(seed):
    generator = np.random.default_rng(seed)
    norms = noise(300, seed) * np.where(generator.random(300) < 0.5, 1.0, 0.05)
    assert flagged(norms) == []
    norms[200] = 8.0
    assert flagged(norms) == [200]


@pytest.mark.parametrize("length", [20, 50, 100])
def test_waking_from_a_quiet_phase_is_no_spike(length):
    norms = noise(360)
    norms[150 : 150 + length] *= 0.01
    assert flagged(norms) == []


def test_most_steps_exactly_zero_is_a_habit():
    norms = noise(800, 1) * (np.random.default_rng(2).random(800) > 0.6)
    assert flagged(norms) == []
    place = 500 + int(np.flatnonzero(norms[500:])[0])
    norms[place] *= 30
    assert flagged(norms) == [place]


@pytest.mark.parametrize("sign", [-1, 1])
def test_drift_by_a_factor_of_a_hundred_is_healthy(sign):
    assert flagged(noise(1500) * 100 ** np.linspace(0, sign, 1500)) == []


@pytest.mark.parametrize("factor", [0.1, 1 / 3, 10.0, 100.0])
def test_a_lasting_new_level_is_told_at_its_beginning_and_then_is_normal(factor):
    norms = noise(400)
    norms[200:] *= factor
    assert set(flagged(norms)) <= {200, 201}
    assert bool(flagged(norms)) == (factor >= 10)
    norms[390] *= 20
    assert 390 in flagged(norms)


def test_a_level_that_comes_and_goes_for_the_first_time_is_learnt_within_a_few_steps():
    norms = noise(300) * 0.01
    norms[100::3] *= 100
    rows = flagged(norms)
    assert rows and max(rows) < 140


def test_three_spikes_close_together_do_not_hide_a_fourth():
    norms = noise(120)
    for row in (60, 65, 70, 76):
        norms[row] = 50.0
    assert flagged(norms) == [60, 65, 70, 76]


def test_a_burst_is_told_at_its_first_two_steps():
    norms = noise(120)
    norms[60:63] = 40.0
    assert flagged(norms) == [60, 61]


def test_an_initial_transient_hides_no_later_spike():
    norms = noise(200)
    norms[:4] *= (80, 30, 10, 4)
    norms[120] = 9.0
    assert flagged(norms) == [120]


def test_logging_every_fifth_step_only_changes_nothing_in_kind():
    norms = noise(1000)
    norms[500] = 12.0
    assert flagged(norms[::5]) == [100]
