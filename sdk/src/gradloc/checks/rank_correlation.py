"""Spearman's rank correlation with its confidence bound. The only door to scipy, which is optional."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

PAIRS_MIN = 8  # with fewer, any correlation may be chance


@dataclass(frozen=True)
class RankCorrelation:
    """rho, its two-sided p-value, and the upper end of its 95 % interval (Fisher's z with variance 1.06/(n-3))."""

    rho: float
    p_value: float
    upper: float
    num: int


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> RankCorrelation | None:
    """None where it has no meaning: fewer than PAIRS_MIN finite pairs, or one side constant.

    Raises ValueError where scipy is not installed.
    """
    try:
        from scipy import stats
    except ImportError:
        raise ValueError("rank correlation needs scipy; pip install 'gradloc[checks]'") from None
    pairs = [(a, b) for a, b in zip(first, second, strict=True) if math.isfinite(a) and math.isfinite(b)]
    if len(pairs) < PAIRS_MIN or len({a for a, _ in pairs}) < 2 or len({b for _, b in pairs}) < 2:
        return None
    result = stats.spearmanr([a for a, _ in pairs], [b for _, b in pairs])
    rho = float(result.statistic)
    z = math.atanh(max(-0.999999, min(0.999999, rho)))
    upper = math.tanh(z + 1.96 * math.sqrt(1.06 / (len(pairs) - 3)))
    return RankCorrelation(rho, float(result.pvalue), upper, len(pairs))
