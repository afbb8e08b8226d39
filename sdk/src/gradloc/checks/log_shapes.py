"""Shapes of a metric over steps: plateau, saw-tooth, collapse. Pure functions of finite numbers."""

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

PLATEAU_STEPS = 10
PLATEAU_HISTORY = 20
CALM = 0.02  # of the earlier spread
SAW_STEPS = 20
SAW_ALTERNATION = 0.85  # white noise alternates at two thirds
SAW_GROWTH = 1.5
COLLAPSE_STEPS = 20
COLLAPSE_SHARE = 0.3  # of the whole range
COLLAPSE_NOISE = 4.0


@dataclass(frozen=True)
class Shape:
    """What was seen, from which index on, with the numbers."""

    name: str
    since: int
    numbers: dict[str, float]


def plateau(values: Sequence[float]) -> Shape | None:
    """The last values do not move at all, or a fiftieth of what they did before."""
    if len(values) < PLATEAU_STEPS + 2 or not all(map(math.isfinite, values[-PLATEAU_STEPS:])):
        return None
    last = values[-1]
    since = len(values)
    while since and math.isclose(values[since - 1], last, rel_tol=1e-6, abs_tol=1e-12):
        since -= 1
    if len(values) - since >= PLATEAU_STEPS:
        return Shape("plateau", since, {"value": last, "steps": float(len(values) - since)})
    if len(values) >= 2 * PLATEAU_HISTORY:
        before, after = values[:-PLATEAU_HISTORY], values[-PLATEAU_HISTORY:]
        finite = [value for value in before if math.isfinite(value)]
        if len(finite) >= PLATEAU_HISTORY:
            # Differences of neighbours, so that a slow rise before does not count as spread.
            moved = statistics.median(abs(b - a) for a, b in itertools.pairwise(finite))
            still = statistics.pstdev(after)
            if moved > 0 and still < CALM * moved:
                return Shape("plateau", len(values) - PLATEAU_HISTORY, {"value": last, "std": still, "before": moved})
    return None


def saw_tooth(values: Sequence[float]) -> Shape | None:
    """Ups and downs nearly every step, whose size grows."""
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < SAW_STEPS:
        return None
    steps = [b - a for a, b in itertools.pairwise(finite)]
    turns = sum(a * b < 0 for a, b in itertools.pairwise(steps)) / (len(steps) - 1)
    third = len(steps) // 3
    early = statistics.median(abs(step) for step in steps[:third])
    late = statistics.median(abs(step) for step in steps[-third:])
    if turns < SAW_ALTERNATION or late < SAW_GROWTH * early or late == 0:
        return None
    return Shape("saw-tooth", 0, {"alternation": turns, "step_early": early, "step_late": late})


def collapse(values: Sequence[float]) -> Shape | None:
    """It had risen (or was good from the start) and is back at its floor."""
    if len(values) < COLLAPSE_STEPS or not all(map(math.isfinite, values)):
        return None
    smooth = [statistics.median(values[max(0, i - 2) : i + 3]) for i in range(len(values))]
    best = max(range(len(smooth)), key=smooth.__getitem__)
    end = statistics.median(values[-5:])
    spread = max(values) - min(values)
    noise = 1.4826 * statistics.median(abs(b - a) for a, b in itertools.pairwise(values)) / math.sqrt(2)
    fall = smooth[best] - end
    floor = min(smooth[0], smooth[best]) if best > 2 else min(values)
    if fall <= 0 or fall < COLLAPSE_SHARE * spread or fall < COLLAPSE_NOISE * noise:
        return None
    if end > floor + 0.25 * (smooth[best] - floor):
        return None
    middle = end + 0.5 * fall
    since = next(i for i in range(best, len(smooth)) if smooth[i] <= middle)
    return Shape("collapse", since, {"best": smooth[best], "now": end, "noise": noise})
