"""The seed's adaptive threshold: what a healthy piece of a step may reach, at any level of aggregation.

Derivation. A step's gradient is g = sum of N token gradients. In a space of far more dimensions than
tokens these are nearly orthogonal, so squared norms add: ||g||² = sum ||g_i||², and n tokens of a
healthy step with norm h have a norm of about h sqrt(n/N). Tokens differ, so a healthy piece may be k
times that: the smaller the piece, the less its tokens average out. The limit therefore falls as a
search descends from the step to the token, while the norm of the culprit stays what it is.

Smallest detectable spike. A culprit of n tokens is over its own limit when its norm exceeds
k h sqrt(n/N). It is seen in a whole step (norm about h without it, orthogonal to it) when
sqrt(h² + x²) exceeds the step's limit L, that is from x = sqrt(L² - h²) on.
"""

import math
from typing import Literal

Level = Literal["step", "rank", "micro-batch", "sequence", "token"]

# Measured over h sqrt(n/N) on healthy GRPO batches of a 135M model: sequences reach 2.3, tokens 2.6
# (docs/algorithm.md, "Limits of a segment"); steps by the detector's median factor; the middle levels lie between.
LEVEL_FACTOR: dict[Level, float] = {"step": 4.0, "rank": 4.0, "micro-batch": 4.0, "sequence": 4.6, "token": 5.2}


def segment_limit(
    healthy_norm: float,
    num_tokens_segment: int,
    num_tokens_step: int,
    level: Level = "token",
    *,
    scale: float = 1.0,
) -> float:
    """Largest healthy norm of a piece of `num_tokens_segment` tokens: scale k h sqrt(n/N).

    `healthy_norm` is the norm h of a healthy step of `num_tokens_step` tokens, in the gradient's unit.
    An empty piece has the limit 0: it has no gradient. Raises ValueError when a count or a norm makes no sense.
    """
    if not (math.isfinite(healthy_norm) and healthy_norm > 0):
        raise ValueError(f"healthy norm {healthy_norm}; expected a positive finite number (Limits.healthy_norm)")
    if not 0 <= num_tokens_segment <= num_tokens_step or num_tokens_step == 0:
        raise ValueError(
            f"{num_tokens_segment} of {num_tokens_step} tokens; expected a piece no larger than a step that has tokens"
        )
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"scale {scale}; expected a positive finite number, 1 for the default")
    return scale * LEVEL_FACTOR[level] * healthy_norm * math.sqrt(num_tokens_segment / num_tokens_step)


def smallest_detectable(healthy_norm: float, limit: float) -> float:
    """Norm from which one culprit, orthogonal to the rest, lifts a step of `healthy_norm` over `limit`."""
    return math.sqrt(max(0.0, limit * limit - healthy_norm * healthy_norm))
