"""Slow faults of a run as a whole: vanished and dead gradients, growth, oscillation, reward and accuracy cliffs.

Each tells its fault once, when it has lasted long enough to be none of the run's habits, and again only
after the run has recovered. Sees one step at a time and remembers a fixed amount. Knows nothing of spikes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from gradloc_proto.messages import Flag
from gradloc_proto.rules.baseline import NUM_BLOCKS, UNITS_PER_OCTAVE, WINDOW, Baseline, Floats, Units, amount_of
from gradloc_proto.rules.observation import Observation

# Quiet phases of real runs (only a KL term left) stay within a hundredth, or last at most 4 steps.
VANISHED_FACTOR = 300.0
VANISHED_STEPS = 6
# Exact zeros are a habit of some runs (59 % of the steps of one): a streak is dead when its chance,
# given how often the run had zeros before, is below one in a million.
DEAD_STEPS_MIN = 8
DEAD_STEPS_MAX = 64
DEAD_CHANCE = 1e-6
GROWTH_FACTOR = 4.0  # median of the last window over everything before ...
GROWTH_BLOCKS = 4  # ... the last four
# A random series turns at two steps of three: 32 in a row have a chance of 3e-6.
OSCILLATION_STEPS = 32
OSCILLATION_FACTOR = 2.0
CLIFF_RECENT = 5
CLIFF_BASE = 64
CLIFF_BASE_MIN = 16
CLIFF_SPREADS = 3.0  # spread: median to the 0.1 quantile

_VANISHED_UNITS = math.log2(VANISHED_FACTOR) * UNITS_PER_OCTAVE
_GROWTH_UNITS = math.log2(GROWTH_FACTOR) * UNITS_PER_OCTAVE
_OSCILLATION_UNITS = math.log2(OSCILLATION_FACTOR) * UNITS_PER_OCTAVE


@dataclass(frozen=True, slots=True)
class Cliff:
    """The last values of a series on a linear scale, such as a reward, oldest first."""

    values: tuple[float, ...] = ()
    is_told: bool = False

    def after(self, value: float | None) -> tuple["Cliff", tuple[float, float, float] | None]:
        """The next state and, where the series has just fallen off a cliff, (score, baseline, limit)."""
        if value is None or not math.isfinite(value):
            return self, None
        values = (*self.values, value)[-(CLIFF_BASE + CLIFF_RECENT) :]
        base, top = values[:-CLIFF_RECENT], max(values[-CLIFF_RECENT:])
        # Most steps end here: a cliff is at least below all that was.
        if len(base) < CLIFF_BASE_MIN or top >= min(base):
            return Cliff(values), None
        low, middle = (float(q) for q in np.quantile(base, (0.1, 0.5)))
        limit = min(min(base), middle - CLIFF_SPREADS * (middle - low))
        if top >= limit:
            return Cliff(values), None
        if self.is_told:
            return Cliff(values, True), None
        # Of a series that never varied any drop is a cliff; its score says only how far it went.
        spread = middle - low if middle > low else max(abs(middle), 1e-12)
        return Cliff(values, True), ((middle - top) / spread, middle, limit)

    def num_calm(self, values: Sequence[float | None]) -> int:
        """How many of these values are logged alike (all, or none of them) and end no fall."""
        first = values[0] if values else None
        is_logged = first is not None
        num = next((index for index, value in enumerate(values) if (value is not None) != is_logged), len(values))
        if not is_logged:
            return num
        if len(self.values) < CLIFF_BASE + CLIFF_RECENT:
            return 0
        all_T = np.array([*self.values, *values[:num]], dtype=np.float64)
        base_K = sliding_window_view(all_T[1:-CLIFF_RECENT], CLIFF_BASE).min(axis=1)
        top_K = sliding_window_view(all_T[CLIFF_BASE + 1 :], CLIFF_RECENT).max(axis=1)
        is_calm_K = np.isfinite(all_T[len(self.values) :]) & (top_K >= base_K)
        return num if is_calm_K.all() else int(is_calm_K.argmin())

    def after_calm(self, values: Sequence[float | None]) -> "Cliff":
        """The state after values of which `num_calm` said that they are calm."""
        length = CLIFF_BASE + CLIFF_RECENT
        known = tuple(value for value in values[-length:] if value is not None)
        return Cliff((*self.values, *known)[-length:]) if known else self


@dataclass(frozen=True, slots=True)
class Trends:
    """Memory of the slow rules."""

    num_tiny: int = 0
    num_zero: int = 0  # in a row, up to now
    num_zero_before: int = 0  # in all before that
    num_positive: int = 0
    last_units: float | None = None
    is_rising: bool = False
    num_turns: int = 0
    told_units: float | None = None  # highest level that was told ...
    told_at: int = 0  # ... and how many values were accepted then
    reward: Cliff = field(default_factory=Cliff)
    accuracy: Cliff = field(default_factory=Cliff)

    def after(
        self, observation: Observation, norms: Baseline, *, row: int, is_high: bool
    ) -> tuple["Trends", tuple[Flag, ...]]:
        """The next state and the faults that this step completes.

        norms: the baselines before the step, the norm's in `row`; is_high: whether the step stands out of it.
        """
        flags: list[Flag] = []
        reward = self._cliff(self.reward, "reward", observation.reward, flags)
        accuracy = self._cliff(self.accuracy, "accuracy", observation.accuracy, flags)
        norm = observation.norm
        if not 0 <= norm < math.inf:
            return replace(self, reward=reward, accuracy=accuracy), tuple(flags)
        healthy_units = float(norms.median_S[row])
        if norm == 0:
            num_zero = self._zero(healthy_units, flags)
            return replace(self, num_zero=num_zero, reward=reward, accuracy=accuracy), tuple(flags)
        units = math.log2(norm) * UNITS_PER_OCTAVE
        is_rising, num_turns = self._turn(units, flags)
        told_units, told_at = self._growth(units, norms, row, is_high, flags)
        trends = Trends(
            num_tiny=self._tiny(units, healthy_units, flags),
            num_zero_before=self.num_zero_before + self.num_zero,
            num_positive=self.num_positive + 1,
            last_units=units,
            is_rising=is_rising,
            num_turns=num_turns,
            told_units=told_units,
            told_at=told_at,
            reward=reward,
            accuracy=accuracy,
        )
        return trends, tuple(flags)

    def after_stretch(
        self,
        norms: Sequence[float],
        healthy_K: Units,
        known_K: Floats,
        num_accepted: int,
        rewards: Sequence[float | None],
        accuracies: Sequence[float | None],
    ) -> tuple["Trends", int]:
        """The state after the first steps of a stretch in which no slow rule speaks, and how many those are.

        norms: positive and not standing out; healthy_K: their median before each step; known_K: what growth is
        compared with, NaN where it is not looked at; num_accepted: norms in the baseline before the first step.
        """
        units_K = np.array([math.log2(norm) * UNITS_PER_OCTAVE for norm in norms])
        is_odd_K = (healthy_K - units_K > _VANISHED_UNITS) | (healthy_K > known_K + _GROWTH_UNITS)
        num = int(is_odd_K.argmax()) if is_odd_K.any() else len(units_K)
        num = min(num, self.reward.num_calm(rewards), self.accuracy.num_calm(accuracies))
        if num == 0:
            return self, 0
        num, is_rising, num_turns = self._turns(units_K[:num])
        if num == 0:
            return self, 0
        is_forgotten = num_accepted + num - 1 - self.told_at > NUM_BLOCKS * WINDOW
        trends = Trends(
            num_zero_before=self.num_zero_before + self.num_zero,
            num_positive=self.num_positive + num,
            last_units=float(units_K[num - 1]),
            is_rising=is_rising,
            num_turns=num_turns,
            told_units=None if is_forgotten else self.told_units,
            told_at=self.told_at,
            reward=self.reward.after_calm(rewards[:num]),
            accuracy=self.accuracy.after_calm(accuracies[:num]),
        )
        return trends, num

    def _cliff(self, cliff: Cliff, series: str, value: float | None, flags: list[Flag]) -> Cliff:
        if value is None:
            return cliff
        cliff, fall = cliff.after(value)
        if fall is not None:
            score, baseline, limit = fall
            rule = f"{series}-cliff"
            flags.append(Flag(rule=rule, series=series, value=value, score=score, baseline=baseline, limit=limit))
        return cliff

    def _zero(self, healthy_units: float, flags: list[Flag]) -> int:
        num_zero = self.num_zero + 1
        habit = (self.num_zero_before + 1) / (self.num_zero_before + self.num_positive + 2)
        needed = math.ceil(math.log(DEAD_CHANCE) / math.log(habit))
        if num_zero == min(max(needed, DEAD_STEPS_MIN), DEAD_STEPS_MAX) and not math.isnan(healthy_units):
            known = {"baseline": amount_of(healthy_units), "limit": 0.0}
            flags.append(Flag(rule="dead", series="norm", value=0.0, score=float(num_zero), **known))
        return num_zero

    def _tiny(self, units: float, healthy_units: float, flags: list[Flag]) -> int:
        drop = healthy_units - units  # NaN before the baseline is known
        if not drop > _VANISHED_UNITS:
            return 0
        if self.num_tiny + 1 == VANISHED_STEPS:
            flags.append(
                Flag(
                    rule="vanished",
                    series="norm",
                    value=amount_of(units),
                    score=amount_of(drop),
                    baseline=amount_of(healthy_units),
                    limit=amount_of(healthy_units - _VANISHED_UNITS),
                )
            )
        return self.num_tiny + 1

    def _turn(self, units: float, flags: list[Flag]) -> tuple[bool, int]:
        is_rising, num_turns = _turned(self.last_units, self.is_rising, self.num_turns, units)
        if num_turns == OSCILLATION_STEPS > self.num_turns:
            value, score = amount_of(units), amount_of(abs(units - (self.last_units or 0.0)))
            flags.append(Flag(rule="oscillation", series="norm", value=value, score=score, limit=OSCILLATION_FACTOR))
        return is_rising, num_turns

    def _turns(self, units_K: Floats) -> tuple[int, bool, int]:
        """How many values come before an oscillation is told; whether the last rises, and its turns in a row."""
        first = units_K[0] if self.last_units is None else self.last_units
        change_K = np.diff(units_K, prepend=first)
        is_turn_possible = bool((np.abs(change_K) >= _OSCILLATION_UNITS).any())
        if not is_turn_possible and self.num_turns < OSCILLATION_STEPS:
            return len(units_K), bool(change_K[-1] > 0), 0
        last_units, is_rising, num_turns = self.last_units, self.is_rising, self.num_turns
        for index, units in enumerate(units_K.tolist()):
            turned = _turned(last_units, is_rising, num_turns, units)
            if turned[1] == OSCILLATION_STEPS > num_turns:
                return index, is_rising, num_turns
            last_units, (is_rising, num_turns) = units, turned
        return len(units_K), is_rising, num_turns

    def _growth(
        self, units: float, norms: Baseline, row: int, is_high: bool, flags: list[Flag]
    ) -> tuple[float | None, int]:
        num = int(norms.num_S[row])
        told = self.told_units
        if told is not None and num - self.told_at > NUM_BLOCKS * WINDOW:
            told = None
        if is_high:  # told as a spike: only what grows beyond it is growth
            return (units if told is None else max(told, units)), num
        if num < (GROWTH_BLOCKS + 2) * WINDOW or num % WINDOW:
            return told, self.told_at
        known = norms.seen_level(row, skip_newest=GROWTH_BLOCKS)
        level = float(norms.median_S[row])
        floor = known if told is None else max(known, told)
        if level <= floor + _GROWTH_UNITS:
            return told, self.told_at
        flags.append(
            Flag(
                rule="growth",
                series="norm",
                value=amount_of(level),
                score=amount_of(level - known),
                baseline=amount_of(known),
                limit=amount_of(floor + _GROWTH_UNITS),
            )
        )
        return level, num


def _turned(last_units: float | None, was_rising: bool, num_turns: int, units: float) -> tuple[bool, int]:
    """Whether the norm rises now, and at how many steps in a row it turned."""
    change = 0.0 if last_units is None else units - last_units
    is_rising = change > 0
    if abs(change) < _OSCILLATION_UNITS or is_rising == was_rising:
        # A single step out of time does not make the same oscillation news again.
        left = num_turns - OSCILLATION_STEPS // 4
        return is_rising, left if num_turns >= OSCILLATION_STEPS and left >= OSCILLATION_STEPS else 0
    return is_rising, min(num_turns + 1, 2 * OSCILLATION_STEPS)
