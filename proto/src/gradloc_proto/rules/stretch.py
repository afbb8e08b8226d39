"""A stretch of calm steps judged and learnt at once: what `judge` and `learn` do one by one, in arrays over time.

A detector that catches up folds thousands of steps of a run; one at a time each costs dozens of small array
calls. Here they are made once for hundreds of steps. Takes the longest beginning of the stretch in which every
step is healthy and ordinary, and leaves the rest to `judge` and `learn`; the state afterwards is theirs to
the last bit (tests/proto/test_rules_stretch.py). Shapes: K steps, S series, L layers, R renewals of limits,
W window, B blocks.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from gradloc_proto.rules.baseline import (
    NUM_BLOCKS,
    NUM_YOUNG,
    RENEW_EVERY,
    UNITS_PER_OCTAVE,
    UPPER_QUANTILE,
    WINDOW,
    Baseline,
    Codes,
    Floats,
    Units,
    codes_of,
    is_empty,
    log_units,
    units_of,
)
from gradloc_proto.rules.judgement import (
    ENERGY,
    GAIN,
    KL,
    NORM,
    NUM_GLOBAL,
    RATIO,
    SPREAD,
    SPREAD_LAYERS_MIN,
    RunState,
    inherit,
)
from gradloc_proto.rules.trends import GROWTH_BLOCKS

_Rows = np.ndarray


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive steps of one run, oldest first, all with the layers of `layer_names` in that order.

    None, and NaN in `layer_norms_KL`, mean "not logged".
    """

    steps: Sequence[int]
    norms: Sequence[float]
    energies: Sequence[float | None]
    ratios: Sequence[float | None]
    kls: Sequence[float | None]
    rewards: Sequence[float | None]
    accuracies: Sequence[float | None]
    layer_names: tuple[str, ...]
    layer_norms_KL: Floats

    def __len__(self) -> int:
        return len(self.steps)


class Renewal(NamedTuple):
    """Limits as they are after step `at_step` of a stretch, counted from 0, until the next renewal."""

    at_step: int
    version: int
    limit_S: Units
    median_S: Units


@dataclass(frozen=True, slots=True)
class Lesson:
    """The first `num` steps of a stretch were healthy; `state` is the one after them."""

    num: int
    state: RunState
    renewals: tuple[Renewal, ...] = ()

    def state_at(self, renewal: Renewal) -> RunState:
        """What `limits_of` needs of the state as it was then; not to be learnt from."""
        series = replace(self.state.series, limit_S=renewal.limit_S, median_S=renewal.median_S)
        state = replace(self.state, series=series, version=renewal.version)
        inherit(state, self.state, "rows", "margin_S")
        return state


def has_settled(state: RunState) -> bool:
    """Whether stretches may be learnt at once: limits are renewed in a fixed rhythm, and nobody turned the knob."""
    return state.series.num_steps >= NUM_YOUNG and state.sensitivity.scale == state.version_scale


def learn_stretch(state: RunState, stretch: Stretch) -> Lesson:
    """Learn the longest healthy and ordinary beginning of `stretch`; 0 steps where one at a time is due."""
    series = state.series
    num = len(stretch)
    if num == 0 or stretch.layer_names != state.layer_names or not has_settled(state):
        return Lesson(0, state)
    value_KS = _values(stretch, num)
    num = _same_kind(value_KS, stretch.layer_norms_KL)
    rows = np.flatnonzero(value_KS[0] > -math.inf)
    if num == 0 or series.num_S[rows].min() < WINDOW:
        return Lesson(0, state)
    renew_at_R = np.array([k for k in range(num) if (series.num_steps + k + 1) % RENEW_EVERY == 0], dtype=np.intp)
    window = _Window(state, value_KS[:num], rows, renew_at_R)
    limit_RS, median_RS = _unrenewed(series, state, rows, len(renew_at_R))
    window.limits(limit_RS, median_RS)
    # Before the first renewal the limits are those of the state.
    at_K = np.searchsorted(renew_at_R, np.arange(num), side="left")

    spread = _spreads(state, value_KS[:num], median_RS, at_K)
    if spread is None and series.num_S[SPREAD] > 0:
        return Lesson(0, state)
    if spread is not None:
        value_KS[:num, SPREAD] = spread
        if series.num_S[SPREAD] < WINDOW:
            return Lesson(0, state)
        own = _Window(state, value_KS[:num], np.array([SPREAD]), renew_at_R)
        own.limits(limit_RS, median_RS)
        window.join(own)

    is_high_K = np.any(value_KS[:num] > limit_RS[at_K] + state.margin_S, axis=1)
    num = _until(is_high_K, num)
    healthy_K = median_RS[at_K, NORM]
    trends, num = state.trends.after_stretch(
        stretch.norms[:num],
        healthy_K[:num],
        window.before_newest(NORM, GROWTH_BLOCKS)[:num],
        int(series.num_S[NORM]),
        stretch.rewards[:num],
        stretch.accuracies[:num],
    )
    if num == 0:
        return Lesson(0, state)
    renewals = _renewals(state, stretch.steps, renew_at_R[renew_at_R < num], limit_RS, median_RS)
    last = renewals[-1] if renewals else Renewal(-1, state.version, series.limit_S, series.median_S)
    after = window.after(num, last)
    learnt = replace(state, series=after, trends=trends, version=last.version)
    inherit(learnt, state, "rows", "margin_S")
    return Lesson(num, learnt, renewals)


def limits_in_time(state: RunState, renewals: Sequence[Renewal]) -> Floats:
    """Limits of norm, energy, gain and each layer as `limits_of` tells them after each renewal; NaN where unknown."""
    amount_RS = np.exp2((np.stack([renewal.limit_S for renewal in renewals]) + state.margin_S) / UNITS_PER_OCTAVE)
    amount_RS[:, [ENERGY, GAIN]] **= 2
    return amount_RS[:, [NORM, ENERGY, GAIN, *range(NUM_GLOBAL, amount_RS.shape[1])]]


class _Window:
    """The accepted values of N series: the last ones before the stretch, then those of the stretch; their blocks."""

    def __init__(self, state: RunState, value_KS: Floats, rows: _Rows, renew_at_R: _Rows) -> None:
        self._state, self._rows, self._renew_at_R = state, rows, renew_at_R
        series = state.series
        self._num_N = series.num_S[rows]
        order_NW = (self._num_N[:, None] + np.arange(WINDOW)) % WINDOW
        old_NW = np.take_along_axis(series.window_SW[rows], order_NW, axis=1)
        self._code_NK = codes_of(np.ascontiguousarray(value_KS[:, rows].T))
        self._all_NT = np.concatenate([old_NW, self._code_NK], axis=1)
        self._blocks_NB = self._blocks()

    def _blocks(self) -> Codes:
        """Maxima of the blocks in the order of time: those remembered, then those that the stretch fills.

        What lies beyond the end of the stretch is not full and is never looked at.
        """
        order_NB = (self._num_N[:, None] // WINDOW + np.arange(NUM_BLOCKS)) % NUM_BLOCKS
        old_NB = np.take_along_axis(self._state.series.blocks_SB[self._rows], order_NB, axis=1)
        num_times = self._all_NT.shape[1]
        num_new = (num_times - 1) // WINDOW
        # The first new block began before the stretch.
        begin_N = WINDOW - self._num_N % WINDOW
        at_NT = np.minimum(begin_N[:, None] + np.arange(num_new * WINDOW), num_times - 1)
        new_NT = np.take_along_axis(self._all_NT, at_NT, axis=1)
        new_NB = new_NT.reshape(len(new_NT), num_new, WINDOW).max(axis=2)
        return np.concatenate([old_NB, new_NB], axis=1)

    def _num_full(self, num_steps: _Rows | int) -> _Rows:
        """How many blocks each series has filled after so many steps of the stretch."""
        return np.asarray((self._num_N[:, None] % WINDOW + num_steps) // WINDOW)

    def join(self, other: "_Window") -> None:
        """Take the other's series in."""
        for name in ("_rows", "_num_N", "_code_NK", "_all_NT", "_blocks_NB"):
            setattr(self, name, np.concatenate([getattr(self, name), getattr(other, name)]))

    def limits(self, limit_RS: Units, median_RS: Units) -> None:
        """Write the limits and medians of these series after each renewal into rows 1 to R."""
        if len(self._renew_at_R) == 0:
            return
        factors, rows = self._state.sensitivity, self._rows
        first = int(self._renew_at_R[0]) + 1
        sorted_NRW = sliding_window_view(self._all_NT, WINDOW, axis=1)[:, first::RENEW_EVERY].copy()
        sorted_NRW.sort(axis=2)

        def quantile_NR(q: float) -> Floats:
            position = q * (WINDOW - 1)
            low = int(position)
            below_NR = sorted_NRW[:, :, low].astype(np.float64)
            return np.asarray(below_NR + (position - low) * (sorted_NRW[:, :, low + 1] - below_NR))

        median_NR = quantile_NR(0.5)
        now_NR = np.maximum(
            quantile_NR(UPPER_QUANTILE) + log_units(factors.upper), median_NR + log_units(factors.median)
        )
        level_NR = self._levels()
        seen_NR = np.maximum(now_NR, level_NR + log_units(factors.seen))
        limit_NR = np.where(is_empty(level_NR), now_NR, seen_NR)
        limit_RS[1:, rows] = limit_NR.T.astype(np.float32)
        median_RS[1:, rows] = median_NR.T.astype(np.float32)

    def _levels(self) -> Codes:
        """The level that was there before, at each renewal: the second largest block, the largest of one. [N, R]"""
        sorted_NMB = np.sort(sliding_window_view(self._blocks_NB, NUM_BLOCKS, axis=1), axis=2)
        num_full_NR = self._num_full(self._renew_at_R + 1)
        second_NR = np.take_along_axis(sorted_NMB[:, :, -2], num_full_NR, axis=1)
        first_NR = np.take_along_axis(sorted_NMB[:, :, -1], num_full_NR, axis=1)
        return np.where(self._num_N[:, None] // WINDOW + num_full_NR < 2, first_NR, second_NR)

    def before_newest(self, row: int, num_newest: int) -> Floats:
        """Of one series, the largest block but for the newest ones, before each step where a block has just
        become full and enough are known; NaN at all other steps. [K]"""
        index = int(np.flatnonzero(self._rows == row)[0])
        num, num_steps = int(self._num_N[index]), self._code_NK.shape[1]
        known_K = np.full(num_steps, math.nan)
        for step in range(-num % WINDOW, num_steps, WINDOW):
            if num + step >= (num_newest + 2) * WINDOW:
                first = (num % WINDOW + step) // WINDOW
                known_K[step] = self._blocks_NB[index, first : first + NUM_BLOCKS - num_newest].max()
        return known_K

    def after(self, num: int, last: Renewal) -> Baseline:
        """The baseline after the first `num` steps."""
        series, rows = self._state.series, self._rows
        window_SW, blocks_SB, recent_S3 = series.window_SW.copy(), series.blocks_SB.copy(), series.recent_S3.copy()
        num_S, seen_S = series.num_S.copy(), series.seen_S.copy()
        order_NW = (self._num_N[:, None] + num + np.arange(WINDOW)) % WINDOW
        window_NW = np.empty((len(rows), WINDOW), window_SW.dtype)
        np.put_along_axis(window_NW, order_NW, self._all_NT[:, num : num + WINDOW], axis=1)
        window_SW[rows] = window_NW
        newest_NB = np.take_along_axis(self._blocks_NB, self._num_full(num) + np.arange(NUM_BLOCKS), axis=1)
        order_NB = ((self._num_N[:, None] + num) // WINDOW + np.arange(NUM_BLOCKS)) % NUM_BLOCKS
        blocks_NB = np.empty_like(newest_NB)
        np.put_along_axis(blocks_NB, order_NB, newest_NB, axis=1)
        blocks_SB[rows] = blocks_NB
        for k in range(max(0, num - 3), num):
            recent_S3[rows, (seen_S[rows] + k) % 3] = self._code_NK[:, k]
        num_S[rows] += num
        seen_S[rows] += num
        streak_S = series.streak_S
        if streak_S.any():
            streak_S = streak_S.copy()
            streak_S[rows] = 0
        return replace(
            series,
            window_SW=window_SW,
            num_S=num_S,
            blocks_SB=blocks_SB,
            seen_S=seen_S,
            recent_S3=recent_S3,
            streak_S=streak_S,
            limit_S=last.limit_S,
            median_S=last.median_S,
            num_steps=series.num_steps + num,
        )


def _unrenewed(series: Baseline, state: RunState, rows: _Rows, num_renewals: int) -> tuple[Units, Units]:
    """Limits and medians as they are before the stretch, once more for each renewal. [R+1, S] twice"""
    limit_RS = np.repeat(series.limit_S[None], num_renewals + 1, axis=0)
    median_RS = np.repeat(series.median_S[None], num_renewals + 1, axis=0)
    # Series that the stretch does not log are renewed as well: their limits may be a few values old.
    is_idle_S = series.num_S > 0
    is_idle_S[rows] = False
    is_idle_S[SPREAD] = False  # made of the layers: its own are still to come
    if is_idle_S.any():
        renewed = series.renewed(state.sensitivity)
        limit_RS[1:], median_RS[1:] = renewed.limit_S, renewed.median_S
    return limit_RS, median_RS


def _values(stretch: Stretch, num: int) -> Floats:
    """Each step's value of each series in units, as `judge` sees them; the spread is still to come. [K, S]"""
    value_KS = np.full((num, NUM_GLOBAL + len(stretch.layer_names)), math.nan)
    norm_K = np.array(stretch.norms[:num])
    energy_K = _known(stretch.energies[:num])
    gain_K = np.where((energy_K > 0) & (energy_K < math.inf), norm_K * norm_K / energy_K, math.nan)
    amounts = {NORM: norm_K, ENERGY: energy_K, GAIN: gain_K, RATIO: _known(stretch.ratios[:num])}
    for row, amount_K in (*amounts.items(), (KL, _known(stretch.kls[:num]))):
        value_KS[:, row] = units_of(amount_K)
    value_KS[:, [ENERGY, GAIN]] *= 0.5
    value_KS[:, NUM_GLOBAL:] = units_of(stretch.layer_norms_KL[:num])
    return value_KS


def _known(values: Sequence[float | None]) -> Floats:
    return np.array([math.nan if value is None else value for value in values])


def _same_kind(value_KS: Floats, layer_norms_KL: Floats) -> int:
    """How many steps from the first on have a norm, log the same series and have no infinite layer."""
    num = len(value_KS)
    is_value_KS = value_KS > -math.inf
    is_odd_K = ~is_value_KS[:, NORM] | (is_value_KS != is_value_KS[0]).any(axis=1)
    is_odd_K |= np.isinf(layer_norms_KL[:num]).any(axis=1)
    return _until(is_odd_K, num)


def _spreads(state: RunState, value_KS: Floats, median_RS: Units, at_K: _Rows) -> Floats | None:
    """How far the layer that grew most is above the middle one, step by step; None with too few layers."""
    growth_KL = value_KS[:, NUM_GLOBAL:] - median_RS[at_K, NUM_GLOBAL:]
    growth_KL = growth_KL[:, np.isfinite(growth_KL[0])]
    num_layers = growth_KL.shape[1]
    if num_layers < SPREAD_LAYERS_MIN:
        return None
    growth_KL.sort(axis=1)
    return np.asarray(growth_KL[:, -1] - growth_KL[:, num_layers // 2])


def _renewals(
    state: RunState, steps: Sequence[int], renew_at_R: _Rows, limit_RS: Units, median_RS: Units
) -> tuple[Renewal, ...]:
    """The renewals that were reached; a version grows where limits or medians changed."""
    version = state.version
    num = len(renew_at_R)
    is_new_R = _differ(limit_RS[: num + 1]) | _differ(median_RS[: num + 1])
    renewals = []
    for number, (index, is_new) in enumerate(zip(renew_at_R.tolist(), is_new_R.tolist(), strict=True), 1):
        if is_new:
            version = max(version, steps[index]) + 1
        renewals.append(Renewal(index, version, limit_RS[number], median_RS[number]))
    return tuple(renewals)


def _differ(values_RS: Units) -> _Rows:
    """Which rows, but for the first, differ from the one before; NaN is NaN. [R-1]"""
    before_RS, after_RS = values_RS[:-1], values_RS[1:]
    is_same_RS = (before_RS == after_RS) | (np.isnan(before_RS) & np.isnan(after_RS))
    return np.asarray(~is_same_RS.all(axis=1))


def _until(is_hit_K: _Rows, num: int) -> int:
    return int(is_hit_K.argmax()) if is_hit_K.any() else num
