"""Checks of what the loss is divided by. Part of the policy layer.

A wrong count scales every coefficient alike: all shares are ordinary, so no token is to blame.
"""

import math

import torch
from torch import Tensor

from gradloc.checks.finding import CheckFinding, finding

UNNORMALISED = 0.5  # |coefficient| / |advantage * ratio|; a mean over tokens makes it 1 / number of tokens
COUNT_TOLERANCE = 1e-6
TOKENS_MIN = 16


def check_token_count(reported: float, counted: float | None = None) -> tuple[CheckFinding, ...]:
    """Check the divisor of the loss against the tokens that the masks hold (over all ranks)."""
    if not (math.isfinite(reported) and reported >= 1):
        what = f"{reported:g} valid tokens: the loss is not divided, all coefficients are too large alike"
        return (finding("policy.token-count", what, reported=reported),)
    if counted is not None and abs(reported - counted) > COUNT_TOLERANCE * max(counted, 1.0):
        what = f"divided by {reported:,.0f}, masks hold {counted:,.0f}"
        return (finding("policy.token-count", what, reported=reported, counted=counted),)
    return ()


def check_coefficients(coefficient_BR: Tensor, weight_BR: Tensor) -> tuple[CheckFinding, ...]:
    """Check dL/dlogp against |advantage * ratio|: about 1 / number of tokens where the loss is a mean."""
    used = (weight_BR.abs() > 0) & (coefficient_BR != 0) & torch.isfinite(weight_BR) & torch.isfinite(coefficient_BR)
    if int(used.sum()) < TOKENS_MIN:
        return ()
    size = float((coefficient_BR.abs().double() / weight_BR.abs().double())[used].median())
    if size < UNNORMALISED:
        return ()
    what = (
        f"each token counts by {size:.3g} of its advantage: the loss is not divided by its {int(used.sum()):,} tokens"
    )
    return (finding("policy.token-count", what, factor=size, num_tokens=int(used.sum())),)
