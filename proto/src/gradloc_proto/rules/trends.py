"""Slow faults of a run as a whole: vanished and dead gradients, growth, oscillation, reward and accuracy cliffs.

Each tells its fault once, when it has lasted long enough to be none of the run's habits, and again only
after the run has recovered. Sees one step at a time and remembers a fixed amount. Knows nothing of spikes.
"""

import math
from dataclasses import dataclass, field, replace

import numpy as np

from gradloc_proto.messages import Flag
from gradloc_proto.rules.baseline import NUM_BLOCKS, UNITS_PER_OCTAVE, WINDOW, Baseline, amount_of
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
        change = 0.0 if self.last_units is None else units - self.last_units
        is_rising = change > 0
        is_told = self.num_turns >= OSCILLATION_STEPS
        if abs(change) < _OSCILLATION_UNITS or is_rising == self.is_rising:
            # A single step out of time does not make the same oscillation news again.
            left = self.num_turns - OSCILLATION_STEPS // 4
            return is_rising, left if is_told and left >= OSCILLATION_STEPS else 0
        if self.num_turns + 1 == OSCILLATION_STEPS:
            value, score = amount_of(units), amount_of(abs(change))
            flags.append(Flag(rule="oscillation", series="norm", value=value, score=score, limit=OSCILLATION_FACTOR))
        return is_rising, min(self.num_turns + 1, 2 * OSCILLATION_STEPS)

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
