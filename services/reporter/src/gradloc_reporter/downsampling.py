"""Fewer points of a series without losing its extremes. Pure; knows only numbers.

Law: what comes out are points that went in, in order, among them the first, the last, the least and
the greatest; a value that is not finite counts as the greatest, since it is what people look for.
"""

import math
from collections.abc import Sequence

MAX_POINTS_MIN = 4  # first, last, least, greatest


def kept(values: Sequence[float], max_points: int) -> list[int]:
    """Indices of at most `max_points` values to keep, ascending."""
    if max_points < MAX_POINTS_MIN:
        raise ValueError(f"max_points is {max_points}; expected at least {MAX_POINTS_MIN}")
    count = len(values)
    if count <= max_points:
        return list(range(count))
    num_buckets = (max_points - 2) // 2
    chosen = {0, count - 1}
    for bucket in range(num_buckets):
        first, end = bucket * count // num_buckets, (bucket + 1) * count // num_buckets
        heights = values[first:end]
        if not math.isfinite(sum(heights)):  # something is not finite, or the sum overflowed
            heights = [_height(value) for value in heights]
        # max, min and index run at C's speed; a key function would not.
        chosen.add(first + heights.index(max(heights)))
        chosen.add(first + heights.index(min(heights)))
    return sorted(chosen)


def _height(value: float) -> float:
    return value if math.isfinite(value) else math.inf
