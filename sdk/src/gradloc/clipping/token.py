"""TokenClip: bounds on each token's importance ratio. Pure; knows no gradient and no run.

    ratio_i = exp(logp_i - rollout_logp_i)          what the trainer thinks of the token over what the sampler thought
    mask:  factor_i = 1 if low <= ratio_i <= high else 0
    clip:  factor_i = min(1, high / ratio_i)

The factor multiplies the token's coefficient dL/dlogp_i. Sources: GradLoc's article (type A.1, "TokenClip",
whose bounds are published as a picture only); mask with [0.5, 5] is IcePop's (Ant Group, 2025); clip is
truncated importance sampling (Ionides 2008; TIS of Yao et al. 2025). Shapes: B rows, R response positions.
"""

import math
from typing import Literal

import torch
from torch import Tensor

Mode = Literal["clip", "mask"]
LOW, HIGH = 0.5, 5.0


def token_clip(log_ratio_BR: Tensor, low: float = LOW, high: float = HIGH, mode: Mode = "mask") -> Tensor:
    """Factor in [0, 1] of each token: same shape and type as `log_ratio_BR`.

    Never above 1: a token below `low` is left out by "mask" and left alone by "clip", for lifting a
    ratio of 1e-30 to `low` would add a gradient that the loss never had. A ratio that is NaN says
    nothing, so its token is left out. Raises ValueError for bounds that cannot be meant.
    """
    check_bounds("TokenClip", low, high)
    if mode == "mask":
        inside_BR = (log_ratio_BR >= math.log(low)) & (log_ratio_BR <= math.log(high))  # NaN is not inside
        return inside_BR.to(log_ratio_BR.dtype)
    if mode != "clip":
        raise ValueError(f"TokenClip: mode is {mode!r}; expected 'clip' or 'mask'")
    return torch.exp(math.log(high) - log_ratio_BR).clamp(max=1.0).nan_to_num(0.0)


def check_bounds(name: str, low: float, high: float) -> None:
    """Raise ValueError unless 0 < low <= 1 <= high: a healthy ratio of 1 must be inside."""
    if not (0.0 < low <= 1.0 <= high < math.inf):
        raise ValueError(f"{name}: bounds are [{low}, {high}]; expected 0 < low <= 1 <= high, for a healthy ratio is 1")
