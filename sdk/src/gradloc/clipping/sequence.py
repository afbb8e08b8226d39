"""SeqClip: bounds on the importance ratio of a whole answer. Pure; knows no gradient and no run.

With l_t = logp_t - rollout_logp_t over the T tokens of an answer that are in the loss:

    product     exp(sum l_t)          the answer's true ratio; grows with its length
    geometric   exp(sum l_t / T)      GSPO's (Zheng et al. 2025); comparable between lengths
    arithmetic  sum exp(l_t) / T      the mean of the tokens' ratios; a few tokens far below 1 cannot hide the rest
    factor = 1 if low <= ratio <= high else 0        "both": by the geometric and by the arithmetic ratio

An answer may be far off although each token is harmless: GradLoc's type A.2, "SeqClip". Its bounds are
published as a picture only; ours are for answers of tens to thousands of tokens, measured on small
models (docs/remedies.md). Shapes: B rows, one answer each, R response positions.
"""

import math
from typing import Literal

import torch
from torch import Tensor

from gradloc.clipping.token import check_bounds

Mean = Literal["product", "geometric", "arithmetic"]
LOW, HIGH = 0.8, 1.25  # of both means; a product needs wider ones


def sequence_log_ratio(log_ratio_BR: Tensor, mask_BR: Tensor, mean: Mean = "geometric") -> Tensor:
    """Log of each answer's ratio: [B]; 0 for an answer without tokens, NaN where a token's ratio is NaN."""
    known_BR = mask_BR.bool()
    num_B = known_BR.sum(dim=1)
    inside_BR = torch.where(known_BR, log_ratio_BR, 0.0)
    if mean == "arithmetic":
        # log of the mean ratio, without leaving the logs: a ratio of 1e300 must not become infinite.
        hidden_BR = torch.where(known_BR, log_ratio_BR, -math.inf)
        total_B = torch.logsumexp(hidden_BR, dim=1) - num_B.clamp(min=1).log()
    elif mean == "geometric":
        total_B = inside_BR.sum(dim=1) / num_B.clamp(min=1)
    elif mean == "product":
        total_B = inside_BR.sum(dim=1)
    else:
        raise ValueError(f"SeqClip: mean is {mean!r}; expected 'product', 'geometric', 'arithmetic' or 'both'")
    return torch.where(num_B > 0, total_B, 0.0)


def seq_clip(
    log_ratio_BR: Tensor,
    mask_BR: Tensor,
    low: float = LOW,
    high: float = HIGH,
    mean: Mean | Literal["both"] = "both",
) -> Tensor:
    """Factor of each answer, 1 (kept) or 0 (left out): [B], type of `log_ratio_BR`.

    An answer without tokens is kept, one with a NaN ratio is left out. Raises ValueError for bounds or a
    mean that cannot be meant.
    """
    check_bounds("SeqClip", low, high)
    means: tuple[Mean, ...] = ("geometric", "arithmetic") if mean == "both" else (mean,)
    inside_B = torch.ones(len(log_ratio_BR), dtype=torch.bool, device=log_ratio_BR.device)
    for one in means:
        log_ratio_B = sequence_log_ratio(log_ratio_BR, mask_BR, one)
        inside_B &= (log_ratio_B >= math.log(low)) & (log_ratio_B <= math.log(high))  # NaN is not inside
    return inside_B.to(log_ratio_BR.dtype)
