"""What is normal for each of many positive series, learnt one value at a time in a fixed amount of memory.

Works on log2 of the values, all series of a run at once. Knows nothing of steps, layers or messages:
a series is a row. Why each part is there, and how little the result depends on the numbers, is told in
docs/algorithm.md ("The detector").

A value stands out of its baseline when it exceeds all of
  * `upper` times the 0.9 quantile of the last 32 accepted values: abnormal for the run as it is now,
    also where it alternates between a floor and an active level;
  * `median` times their median: material, also where the run hardly varies;
  * `seen` times the second largest of the maxima of the last 8 blocks of 32: the level was not there
    twice in the last 256 values, so waking from a quiet phase is no spike.
Accepted are finite positive values that do not stand out. What stands out is accepted only when three of
the last twelve values did: then it is a level, not a spike. The 0.9 quantile of 32 ignores three values
and the block rule ignores one block, so what is accepted that way cannot hide the next spike.

Shapes: S series, W window, B blocks. The unit is 1/256 octave (0.27 %): values are kept as int16 of it,
so that a state is small and a saved one goes on exactly as the one that was saved.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Units = npt.NDArray[np.float32]
Codes = npt.NDArray[np.int16]
Counts = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]

UNITS_PER_OCTAVE = 256
WINDOW = 32
NUM_BLOCKS = 8
NUM_WARMUP = 8  # fewer values say nothing of the next
NUM_SETTLED = 24  # up to here the limits carry a margin that shrinks
EARLY_MARGIN = 0.5  # of a limit known from no value at all
UPPER_QUANTILE = 0.9
NUM_OF_A_LEVEL = 3  # so many of the last LEVEL_SPAN values standing out are a level
LEVEL_SPAN = 12
NEIGHBOUR_UNITS = math.log2(2.5) * UNITS_PER_OCTAVE  # a value is news when it is so far above the middle of three
# Limits are renewed at every step of a young run, then at every fourth: sorting costs more than judging.
NUM_YOUNG = 64
RENEW_EVERY = 4

_EMPTY = np.int16(-32768)
_CODE_MAX = 32_000  # 125 octaves
_LONG_AGO = -1_000_000
_ARRAYS: dict[str, tuple[str, int]] = {
    "window_SW": ("<i2", WINDOW),
    "num_S": ("<i4", 0),
    "blocks_SB": ("<i2", NUM_BLOCKS),
    "seen_S": ("<i4", 0),
    "recent_S3": ("<i2", 3),
    "high_SK": ("<i2", NUM_OF_A_LEVEL),
    "high_at_SK": ("<i4", NUM_OF_A_LEVEL),
    "streak_S": ("<i2", 0),
    "limit_S": ("<f4", 0),
    "median_S": ("<f4", 0),
}


@dataclass(frozen=True, slots=True)
class Factors:
    """How far above its baseline a value must be; `scale` multiplies the limit, the others its parts."""

    scale: float = 1.0
    upper: float = 2.4
    median: float = 4.0
    seen: float = 1.0


@dataclass(frozen=True, slots=True)
class Baseline:
    """Memory of S series; about 125 bytes each. Arrays are never changed in place."""

    window_SW: Codes  # the last accepted values, in no order
    num_S: Counts  # how many were accepted
    blocks_SB: Codes  # maxima of the last full blocks of WINDOW accepted values
    seen_S: Counts  # how many positive values came
    recent_S3: Codes  # the last three of them, accepted or not
    high_SK: Codes  # the last ones that stood out and were not accepted ...
    high_at_SK: Counts  # ... and the count of seen values then
    streak_S: Codes  # how many of the last values stood out in a row
    limit_S: Units  # limit at scale 1; NaN before NUM_WARMUP values
    median_S: Units  # healthy value; NaN before NUM_WARMUP values
    num_steps: int = 0  # that brought a value of any series

    def __len__(self) -> int:
        return len(self.num_S)

    def exceeds(self, value_S: Floats, margin_S: Floats | float) -> Mask:
        """Which values are above their limit moved up by `margin_S` units; False where either is unknown."""
        return np.asarray(value_S > self.limit_S + margin_S)

    def is_news(self, value_S: Floats) -> Mask:
        """Which values stand out of their neighbourhood too: a change of level is told at its first two steps,
        then it has become the neighbourhood. Until three values came every value is news."""
        is_known_S = self.recent_S3.min(axis=1) != _EMPTY
        middle_S = np.sort(self.recent_S3, axis=1)[:, 1]
        return np.asarray(~is_known_S | (value_S > middle_S + NEIGHBOUR_UNITS))

    def seen_level(self, row: int, *, skip_newest: int) -> float:
        """Largest block maximum of a series but for the newest blocks, in units; -inf when there is none."""
        newest = int(self.num_S[row]) // WINDOW - 1
        blocks = range(max(0, newest - NUM_BLOCKS + 1), newest + 1 - skip_newest)
        return max((float(self.blocks_SB[row, block % NUM_BLOCKS]) for block in blocks), default=-math.inf)

    def after(
        self, value_S: Floats, factors: Factors, margin_S: Floats | float, *, is_suspect: bool = False
    ) -> "Baseline":
        """The baseline one step later; NaN and -inf (an exact zero) teach nothing.

        `margin_S` is what `exceeds` judges with. `is_suspect` says that the whole step is abnormal: no
        series accepts its value at once.
        """
        # -inf is an exact zero: no value.
        is_value_S = value_S > -math.inf
        rows = np.flatnonzero(is_value_S)
        code_S = np.full(len(self), _EMPTY)
        code_S[rows] = codes_of(value_S[rows])
        own_S = self.exceeds(value_S, margin_S)
        high_S = is_value_S & (self.num_S >= NUM_WARMUP) if is_suspect else own_S
        has_high = bool(high_S.any())

        seen_S, recent_S3 = self.seen_S.copy(), self.recent_S3.copy()
        recent_S3[rows, seen_S[rows] % 3] = code_S[rows]
        seen_S[rows] += 1
        draft = _Draft(self.window_SW.copy(), self.num_S.copy(), self.blocks_SB)
        draft.push(np.flatnonzero(is_value_S & ~high_S) if has_high else rows, code_S)
        changes: dict[str, Any] = {
            "seen_S": seen_S,
            "recent_S3": recent_S3,
            "num_steps": self.num_steps + (len(rows) > 0),
        }
        is_level = False
        if has_high:
            high_SK = np.where(high_S[:, None], np.column_stack([self.high_SK[:, 1:], code_S]), self.high_SK)
            at_SK = np.where(high_S[:, None], np.column_stack([self.high_at_SK[:, 1:], seen_S]), self.high_at_SK)
            level = np.flatnonzero(high_S & (seen_S - at_SK[:, 0] < LEVEL_SPAN))
            is_level = len(level) > 0
            for column in range(NUM_OF_A_LEVEL):
                draft.push(level, high_SK[:, column])
            at_SK[level] = _LONG_AGO
            changes |= {"high_SK": high_SK, "high_at_SK": at_SK}
        if has_high or self.streak_S.any():
            streak_S = np.where(own_S, np.minimum(self.streak_S, 999) + 1, 0).astype(np.int16)
            changes["streak_S"] = np.where(is_value_S, streak_S, self.streak_S)
        later = replace(self, window_SW=draft.window_SW, num_S=draft.num_S, blocks_SB=draft.blocks_SB, **changes)
        is_due = later.num_steps <= NUM_YOUNG or later.num_steps % RENEW_EVERY == 0
        return later.renewed(factors) if is_due or is_level else later

    def renewed(self, factors: Factors) -> "Baseline":
        """With limits and medians of what it remembers now."""
        sorted_SW = np.sort(self.window_SW, axis=1)
        rows_S = np.arange(len(self))
        n_S = np.minimum(self.num_S, WINDOW)

        def quantile_S(q: float) -> Floats:
            position_S = np.maximum(WINDOW - n_S + q * (n_S - 1), 0.0)
            low_S = position_S.astype(np.intp)
            below_S = sorted_SW[rows_S, np.minimum(low_S, WINDOW - 1)].astype(np.float64)
            above_S = sorted_SW[rows_S, np.minimum(low_S + 1, WINDOW - 1)]
            return np.asarray(below_S + (position_S - low_S) * (above_S - below_S))

        is_unknown_S = n_S < NUM_WARMUP
        median_S = quantile_S(0.5)
        now_S = np.maximum(quantile_S(UPPER_QUANTILE) + log_units(factors.upper), median_S + log_units(factors.median))
        early_S = np.maximum(0.0, (NUM_SETTLED - n_S) / NUM_SETTLED)
        now_S += np.log2(1.0 + EARLY_MARGIN * early_S) * UNITS_PER_OCTAVE
        blocks_SB = np.sort(self.blocks_SB, axis=1)
        seen_S = np.where(self.num_S < 2 * WINDOW, blocks_SB[:, -1], blocks_SB[:, -2])
        limit_S = np.where(seen_S == _EMPTY, now_S, np.maximum(now_S, seen_S + log_units(factors.seen)))
        median_S[is_unknown_S] = math.nan
        limit_S[is_unknown_S] = math.nan
        return replace(self, limit_S=limit_S.astype(np.float32), median_S=median_S.astype(np.float32))

    def grown(self, num_more: int) -> "Baseline":
        """With further series at the end that know nothing yet."""
        more = empty(num_more)
        arrays: dict[str, Any] = {name: np.concatenate([getattr(self, name), getattr(more, name)]) for name in _ARRAYS}
        return replace(self, **arrays)

    def dump(self) -> dict[str, bytes]:
        """The arrays as little-endian bytes; `load` is the inverse."""
        return {name: getattr(self, name).astype(kind).tobytes() for name, (kind, _) in _ARRAYS.items()}


@dataclass(slots=True)
class _Draft:
    """Arrays of the next baseline while values go in."""

    window_SW: Codes
    num_S: Counts
    blocks_SB: Codes

    def push(self, rows: npt.NDArray[np.intp], code_S: Codes) -> None:
        num = self.num_S[rows]
        self.window_SW[rows, num % WINDOW] = code_S[rows]
        num += 1
        self.num_S[rows] = num
        is_full = num % WINDOW == 0
        if is_full.any():
            full = rows[is_full]
            self.blocks_SB = self.blocks_SB.copy()
            self.blocks_SB[full, (num[is_full] // WINDOW - 1) % NUM_BLOCKS] = self.window_SW[full].max(axis=1)


def empty(num_series: int) -> Baseline:
    def codes(*width: int) -> Codes:
        return np.full((num_series, *width), _EMPTY)

    def counts() -> Counts:
        return np.zeros(num_series, np.int32)

    unknown_S = np.full(num_series, math.nan, np.float32)
    return Baseline(
        window_SW=codes(WINDOW),
        num_S=counts(),
        blocks_SB=codes(NUM_BLOCKS),
        seen_S=counts(),
        recent_S3=codes(3),
        high_SK=codes(NUM_OF_A_LEVEL),
        high_at_SK=np.full((num_series, NUM_OF_A_LEVEL), _LONG_AGO, np.int32),
        streak_S=np.zeros(num_series, np.int16),
        limit_S=unknown_S,
        median_S=unknown_S,
    )


def load(data: Mapping[str, bytes], num_series: int, num_steps: int) -> Baseline:
    """Inverse of `dump`. Raises ValueError when an array has another size, KeyError when one is missing."""
    arrays = {}
    for name, (kind, width) in _ARRAYS.items():
        flat = np.frombuffer(data[name], dtype=kind)
        if len(flat) != num_series * max(width, 1):
            raise ValueError(f"{name} holds {len(flat)} numbers, expected {num_series} x {max(width, 1)}")
        arrays[name] = flat.reshape(num_series, width) if width else flat
    if min(arrays["num_S"].min(initial=0), arrays["seen_S"].min(initial=0)) < 0:
        raise ValueError("a count is negative")
    return Baseline(**arrays, num_steps=num_steps)


def units_of(value_S: Floats) -> Floats:
    """log2 of positive values in units; -inf for an exact zero; NaN for what is negative, infinite or NaN."""
    with np.errstate(divide="ignore", invalid="ignore"):
        unit_S = np.log2(value_S)
    unit_S[unit_S == math.inf] = math.nan
    unit_S *= UNITS_PER_OCTAVE
    return unit_S


def codes_of(value: Floats) -> Codes:
    """Values in units, as they are kept. Clipping makes them fit: 125 octaves are beyond every norm."""
    return np.asarray(np.rint(value).clip(-_CODE_MAX, _CODE_MAX).astype(np.int16))


def is_empty(code: Codes) -> Mask:
    """Where no value was kept yet."""
    return np.asarray(code == _EMPTY)


def amount_of(units: float) -> float:
    """Inverse of `units_of` for one number: positive and finite."""
    octaves = min(max(units / UNITS_PER_OCTAVE, -1000.0), 1000.0)
    return float(2.0**octaves)


def log_units(factor: float) -> float:
    """A factor in units."""
    return math.log2(factor) * UNITS_PER_OCTAVE
