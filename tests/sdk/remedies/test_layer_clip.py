"""LayerClip: a limit a layer from its own history that nothing abnormal can poison."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradloc.clipping import LayerClip, layer_clip
from gradloc.clipping.layer import (
    LayerHistory,
    LayerLimits,
    dump_history,
    empty_history,
    learn,
    limits_from,
    load_history,
    medians_from,
    strict_limits_from,
)

SETTINGS = LayerLimits()


def history_of(*steps: list[float]) -> LayerHistory:
    history = empty_history(tuple(f"layer {i}" for i in range(len(steps[0]))), SETTINGS)
    for norms in steps:
        history = learn(history, np.array(norms), SETTINGS)
    return history


def test_a_layer_above_its_limit_is_scaled_and_the_others_are_not() -> None:
    norms, limits = np.array([1.0, 40.0, 3.0]), np.array([4.0, 4.0, math.nan])
    assert layer_clip(norms, limits, power=1.0).tolist() == [1.0, 0.1, 1.0]
    assert layer_clip(norms, limits, np.array([1.0, 2.0, 1.0]), power=1.0).tolist() == [1.0, 0.05, 1.0]


def test_the_more_a_layer_explodes_the_less_is_kept() -> None:
    norms = np.array([4.0, 8.0, 400.0])
    assert (norms * layer_clip(norms, np.full(3, 4.0))).tolist() == pytest.approx([4.0, 2.0, 0.04])
    assert (norms * layer_clip(norms, np.full(3, 4.0), np.full(3, 1.0))).tolist() == pytest.approx([4.0, 0.125, 0.0025])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_layer_that_is_not_finite_gets_nothing_known_limit_or_not(bad: float) -> None:
    assert layer_clip(np.array([bad, bad, 1.0]), np.array([2.0, math.nan, 2.0])).tolist() == [0.0, 0.0, 1.0]


@given(
    st.lists(st.tuples(st.one_of(st.floats(0), st.just(math.nan)), st.floats(1e-30, 1e30)), min_size=0, max_size=9),
    st.floats(1.0, 4.0),
)
def test_no_norm_is_ever_raised(layers: list[tuple[float, float]], power: float) -> None:
    norms = np.array([norm for norm, _ in layers], dtype=np.float64)
    limits = np.array([limit for _, limit in layers], dtype=np.float64)
    scale = layer_clip(norms, limits, limits / 6, power)
    assert bool(((scale >= 0) & (scale <= 1)).all())
    healthy = norms <= limits
    assert bool((scale[healthy] == 1).all())


def test_nothing_is_limited_before_enough_was_seen() -> None:
    history = history_of(*[[1.0]] * (SETTINGS.num_warmup - 1))
    assert math.isnan(limits_from(history, SETTINGS)[0])
    assert limits_from(learn(history, np.array([1.0]), SETTINGS), SETTINGS)[0] == 6.0


@given(st.lists(st.sampled_from([math.nan, math.inf, 0.0, 1e6, 1e300]), max_size=11))
def test_neither_spike_nor_nan_nor_zero_moves_a_limit(bad: list[float]) -> None:
    history = history_of(*[[1.0]] * 20)
    before = limits_from(history, SETTINGS)[0]
    for value in bad:
        history = learn(history, np.array([value]), SETTINGS)
    assert limits_from(history, SETTINGS)[0] == before


@given(st.lists(st.floats(0.5, 1.0), min_size=5, max_size=5), st.floats(0.1, 1.0))
def test_explosions_under_the_limit_do_not_take_it_with_them(healthy: list[float], share_of_limit: float) -> None:
    """Two steps of five as near to the limit as they like, for a hundred: half of the history they never are."""
    history = history_of(*[[norm] for norm in healthy * 4])
    for step in range(100):
        limit = float(limits_from(history, SETTINGS)[0])
        assert limit <= SETTINGS.ceiling_of_median * max(healthy) * (1 + 1e-12)
        history = learn(history, np.array([limit * share_of_limit if step % 5 < 2 else healthy[step % 5]]), SETTINGS)


def test_a_level_that_lasts_becomes_the_history() -> None:
    history = history_of(*[[1.0, 1.0]] * 20, *[[50.0, 1.0]] * SETTINGS.regime_steps)
    assert limits_from(history, SETTINGS).tolist() == [300.0, 6.0]


def test_a_level_that_is_interrupted_does_not() -> None:
    steps = ([[50.0]] * (SETTINGS.regime_steps - 1) + [[1.0]]) * 3
    assert limits_from(history_of(*[[1.0]] * 20, *steps), SETTINGS).tolist() == [6.0]


def test_old_norms_are_forgotten() -> None:
    history = history_of(*[[3.0]] * 32, *[[1.0]] * 32)
    assert limits_from(history, SETTINGS).tolist() == [6.0]


@given(st.lists(st.floats(0, 1e9, allow_nan=False), min_size=1, max_size=60), st.integers(0, 59))
def test_a_saved_history_goes_on_as_if_nothing_had_happened(norms: list[float], cut: int) -> None:
    whole = empty_history(("a",), SETTINGS)
    resumed = whole
    for step, norm in enumerate(norms):
        if step == cut:
            resumed = load_history(json.loads(json.dumps(dump_history(resumed))), ("a",), SETTINGS)
        whole, resumed = learn(whole, np.array([norm]), SETTINGS), learn(resumed, np.array([norm]), SETTINGS)
    assert dump_history(whole) == dump_history(resumed)


def test_a_state_of_another_model_or_window_is_refused() -> None:
    state = dump_history(history_of([1.0, 2.0]))
    with pytest.raises(ValueError, match="another model or version"):
        load_history(state, ("layer 0",), SETTINGS)
    with pytest.raises(ValueError, match="use the settings it was saved with"):
        load_history(state, ("layer 0", "layer 1"), LayerLimits(window=16))
    with pytest.raises(ValueError, match="another model or version"):
        load_history({}, ("layer 0",), SETTINGS)
    with pytest.raises(ValueError, match="negative counts"):
        load_history(state | {"num_accepted": [-1, 0]}, ("layer 0", "layer 1"), SETTINGS)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"factor_of_max": 0.9}, "factors are"),
        ({"factor_of_median": math.nan}, "factors are"),
        ({"ceiling_of_median": 5.0}, "ceiling_of_median is 5.0"),
        ({"ceiling_of_median": math.nan}, "ceiling_of_median is nan"),
        ({"power": 0.5}, "power is 0.5"),
        ({"num_warmup": 0}, "num_warmup is 0"),
        ({"window": 4}, "num_warmup is 8 and window 4"),
        ({"regime_steps": 40}, "regime_steps is 40"),
        ({"by": "parameter"}, "expected 'block' or 'kind'"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(settings: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        LayerClip(**settings)  # type: ignore[arg-type]


def test_no_layers_are_fine() -> None:
    history = empty_history((), SETTINGS)
    assert limits_from(learn(history, np.zeros(0), SETTINGS), SETTINGS).shape == (0,)


class TestTwoThresholds:
    """What struck one layer has reached others: once one is above its limit, the others' is stricter."""

    HISTORY = history_of(*[[1.0, 1.0, 1.0]] * 10, [1.0, 2.5, 1.0])  # the second layer was once at 2.5

    def test_the_strict_limit_is_what_was_accepted_and_twice_the_median(self) -> None:
        assert limits_from(self.HISTORY, SETTINGS).tolist() == [6.0, 7.5, 6.0]
        assert strict_limits_from(self.HISTORY, SETTINGS).tolist() == [2.0, 2.5, 2.0]

    @given(st.lists(st.lists(st.floats(1e-6, 1e6), min_size=2, max_size=2), min_size=0, max_size=40))
    def test_it_is_never_above_the_limit_nor_below_the_median(self, steps: list[list[float]]) -> None:
        history = history_of(*steps) if steps else empty_history(("a", "b"), SETTINGS)
        limits, strict = limits_from(history, SETTINGS), strict_limits_from(history, SETTINGS)
        known = np.isfinite(limits)
        assert np.array_equal(known, np.isfinite(strict))
        assert bool((strict[known] <= limits[known]).all())
        assert bool((strict[known] >= medians_from(history)[known]).all())

    def clip(self, norms: list[float]) -> tuple[LayerClip, list[float]]:
        clip = LayerClip(positions=False)
        parameters = {name: torch.nn.Parameter(torch.ones(1)) for name in ("embed_tokens", "norm", "lm_head")}
        clip.attach(parameters.items())
        for _ in range(10):
            clip.clip(dict.fromkeys(("embedding", "norm", "head"), 1.0))
        for parameter in parameters.values():
            parameter.grad = torch.ones(1)
        clip.clip(dict(zip(("embedding", "norm", "head"), norms, strict=True)))
        return clip, [float(p.grad) for p in parameters.values() if p.grad is not None]

    def test_alone_a_layer_between_the_two_is_left_and_learned_from(self) -> None:
        clip, scales = self.clip([4.0, 1.0, 1.0])
        assert scales == [1.0, 1.0, 1.0]
        assert clip.limits()["embedding"] == 10.0  # three times the largest, and at most ten medians

    def test_beside_an_explosion_it_is_scaled_and_not_learned_from(self) -> None:
        clip, scales = self.clip([4.0, 1.9, 100.0])
        assert scales == pytest.approx([1 / 16, 1.0, 1e-4])
        assert [action.name for action in clip.last] == ["embedding", "head"]
        assert clip.limits()["embedding"] == 6.0
        assert clip.limits()["norm"] == 6.0

    def test_beside_a_layer_that_is_not_finite_too(self) -> None:
        _, scales = self.clip([4.0, 1.9, math.nan])
        assert scales == pytest.approx([1 / 16, 1.0])  # and no gradient for the third

    def test_a_factor_that_would_clip_healthy_layers_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"suspect_of_median is 0\.5; expected 1 or more"):
            LayerClip(suspect_of_median=0.5)
