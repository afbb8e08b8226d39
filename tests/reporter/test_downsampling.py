"""Thinning a series keeps what people look for."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradloc_reporter.downsampling import kept

SERIES = st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=400)


@given(SERIES, st.integers(4, 60))
def test_what_is_kept_is_in_order_and_within_the_limit(values: list[float], max_points: int) -> None:
    chosen = kept(values, max_points)
    assert chosen == sorted(set(chosen))
    assert len(chosen) <= max_points
    assert len(values) > max_points or chosen == list(range(len(values)))


@given(SERIES.filter(lambda values: len(values) > 0), st.integers(4, 60))
def test_first_last_least_greatest_and_what_is_not_finite_survive(values: list[float], max_points: int) -> None:
    chosen = kept(values, max_points)
    left = [values[index] for index in chosen]
    finite = [value for value in values if math.isfinite(value)]
    assert {0, len(values) - 1} <= set(chosen)
    if finite:
        assert min(finite) in left
    if len(finite) == len(values):
        assert max(finite) in left
    else:
        assert any(not math.isfinite(value) for value in left)


@pytest.mark.parametrize("spike", [640.0, math.nan, math.inf, 0.0])
def test_a_single_odd_step_among_a_hundred_thousand_survives(spike: float) -> None:
    values = [0.4] * 100_000
    values[73_211] = spike
    assert 73_211 in kept(values, 500)


def test_fewer_than_four_points_are_refused() -> None:
    with pytest.raises(ValueError, match="expected at least 4"):
        kept([1.0], 3)
