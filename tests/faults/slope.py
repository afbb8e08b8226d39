"""The slope of a process's memory, with an interval that memory's own nature does not fool.

What a process has once touched it keeps: its memory is a sum of what happened, not a line with errors about it.
Through a sum of chances that leads nowhere least squares find a slope in three of ten cases, through one that settles
and cannot fall in eight of ten. So the slope is the mean step between the medians of ten equal stretches, and its
interval that of a mean: a leak makes all steps alike.
"""

import math
import statistics
from itertools import pairwise

NUM_STRETCHES = 10
STUDENT_T_975_OF_8 = 2.306  # nine steps


def slope_of(points: list[tuple[float, float]]) -> tuple[float, float]:
    """Mean step between the medians of stretches, by x: slope, and half the width of its interval at 95 %."""
    size = len(points) / NUM_STRETCHES
    stretches = [points[round(n * size) : round((n + 1) * size)] for n in range(NUM_STRETCHES)]
    ys = [statistics.median(y for _, y in one) for one in stretches]
    steps = [after - before for before, after in pairwise(ys)]
    width = (statistics.fmean(x for x, _ in stretches[-1]) - statistics.fmean(x for x, _ in stretches[0])) / len(steps)
    half_width = STUDENT_T_975_OF_8 * statistics.stdev(steps) / math.sqrt(len(steps))
    return statistics.fmean(steps) / width, half_width / width
