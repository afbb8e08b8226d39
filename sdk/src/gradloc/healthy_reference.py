"""Which healthy steps are kept to compare with: one after warm-up, then one whenever their number has doubled.

So a run of n steps keeps about log2(n / 64) of them, and the newest is never older than half the run. Every rank
asks with the view that all ranks share, so all answer alike without another collective.
"""

import math
from collections.abc import Collection

from gradloc_proto.messages import Limits

FIRST_AFTER_STEPS = 64  # healthy steps; baselines have settled by then
HEALTHY_OVER_USUAL = 1.5  # a reference is an ordinary step, not one that just missed its limit


class ReferencePlan:
    """Counts healthy steps. `first_after`: how many come before the first reference."""

    def __init__(self, first_after: int = FIRST_AFTER_STEPS) -> None:
        self._num_healthy = 0
        self._next_at = first_after

    def is_due(self, norm: float, limits: Limits, hit: Collection[str]) -> bool:
        """Whether this step, whose norm is `norm` and which broke the limits `hit`, should be kept."""
        usual = limits.healthy_norm
        if hit or usual is None or not (math.isfinite(norm) and 0 < norm <= HEALTHY_OVER_USUAL * usual):
            return False
        self._num_healthy += 1
        return self._num_healthy >= self._next_at

    def taken(self) -> None:
        self._next_at = 2 * self._num_healthy
