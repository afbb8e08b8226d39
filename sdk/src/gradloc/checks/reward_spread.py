"""What values a stream of rewards spans, in bounded memory, and which lie far outside. Knows no rows' text."""

import heapq
import random
from dataclasses import dataclass, field

SAMPLE_SIZE = 4_096
EXTREMES_KEPT = 8
ROWS_MIN = 16
FAR = 100.0  # times what the middle 98 % span


@dataclass
class Spread:
    """A uniform sample of the values, and the extreme ones with their rows."""

    num: int = 0
    _sample: list[float] = field(default_factory=list)
    _high: list[tuple[float, int]] = field(default_factory=list)
    _low: list[tuple[float, int]] = field(default_factory=list)
    _rng: random.Random = field(default_factory=lambda: random.Random(0))

    def add(self, value: float, row: int) -> None:
        self.num += 1
        if len(self._sample) < SAMPLE_SIZE:
            self._sample.append(value)
        elif (at := self._rng.randrange(self.num)) < SAMPLE_SIZE:
            self._sample[at] = value
        for heap, sign in ((self._high, 1.0), (self._low, -1.0)):
            if len(heap) < EXTREMES_KEPT:
                heapq.heappush(heap, (sign * value, row))
            elif sign * value > heap[0][0]:
                heapq.heapreplace(heap, (sign * value, row))

    def outliers(self) -> tuple[list[tuple[float, int]], float, float]:
        """(value, row) far outside, the median and the span they were compared with.

        The span leaves out a hundredth at each end, at least one value, so an outlier cannot hide itself;
        it is taken as at least 1 or the median's size, so that sparse rewards are none.
        """
        if self.num < ROWS_MIN:
            return [], 0.0, 0.0
        values = sorted(self._sample)
        cut = max(1, len(values) // 100)
        middle = values[len(values) // 2]
        span = max(values[-1 - cut] - values[cut], abs(middle), 1.0)
        far = [(value, row) for value, row in self._high if value - middle > FAR * span]
        far += [(-value, row) for value, row in self._low if middle + value > FAR * span]
        return sorted(far, key=lambda one: one[1]), middle, span
