"""Why a gradient is not finite: the first number on the way to it that is not. Pure; knows no tensor."""

import math
from collections.abc import Sequence
from typing import Any

from gradloc.diagnosis import LOG_RATIO_CERTAIN
from gradloc_proto.messages import Cause, Culprit

FLOAT32_MAX = 3.4e38  # an importance ratio beyond it is infinite in the trainer, though not here


def nonfinite_cause(
    what: str | None,
    culprits: Sequence[Culprit],
    *,
    outside_mask: bool = False,
    num_tokens: int = 0,
    module: str | None = None,
    position: int | None = None,
) -> Cause:
    """what: "coefficient", "logp" or "network" (with the module and the position where it begins); None: no token."""
    if what is None:
        return Cause(
            name="non-finite-weights",
            confidence="medium",
            summary="the gradient is not finite whichever tokens are left out: look at the weights before this step",
        )
    evidence: dict[str, Any] = {"num_tokens": float(num_tokens)}
    if culprits:
        evidence |= {"coefficient": culprits[0].coefficient, "logp": culprits[0].logp, "ratio": culprits[0].ratio}
    if what == "network":
        where = f"in {module} at position {position}" if module else "inside the network"
        return Cause(
            name="non-finite-network",
            confidence="high",
            summary=f"coefficients and log-probabilities are finite; the first value that is not arises {where}"[:512],
            evidence=evidence | {"module": module, "position": None if position is None else float(position)},
        )
    if outside_mask:
        return Cause(
            name="mask-fault",
            confidence="high",
            summary=f"{what} not finite at a position that the loss mask leaves out: zero times NaN is NaN; "
            "select with where() before the product",
            evidence=evidence,
        )
    first = culprits[0] if culprits else None
    if first is not None and first.advantage is not None and not math.isfinite(first.advantage):
        return Cause(
            name="non-finite-advantage",
            confidence="high",
            summary=f"the token's advantage is {first.advantage}: a reward is missing or is no number, or its group "
            "was divided by zero; leave such answers out before the group is normalised",
            evidence=evidence | {"advantage": first.advantage},
        )
    if first is not None and first.ratio is not None and first.ratio >= math.exp(LOG_RATIO_CERTAIN):
        certain = first.ratio >= FLOAT32_MAX
        return Cause(
            name="token-mismatch",
            confidence="high" if certain else "medium",
            summary="type A.1: the importance ratio of the token overflows"
            if certain
            else f"type A.1: the importance ratio of the token is {first.ratio:.3g}, and the {what} is not finite",
            evidence=evidence,
        )
    return Cause(
        name=f"non-finite-{what}",
        confidence="high",
        summary=f"the {what} of the token is not finite before any gradient is computed",
        evidence=evidence,
    )
