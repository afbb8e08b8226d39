"""What if: the norm this step would have had under a remedy, by replay with changed coefficients.

The remedies as RL trainers apply them: TokenClip clips each token's importance ratio, SeqClip leaves
out sequences whose ratio left its range, AdvantageClip clips advantages, LayerClip clips each layer
to its own limit. Frozen counterfactual: other tokens' coefficients stay as they were. Knows no cause.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gradloc.policy import PlacedBatch

TOKEN_CLIP = (0.5, 5.0)
SEQUENCE_CLIP = (0.5, 2.0)
ADVANTAGE_CLIP = 5.0


def token_clip(
    batches: Sequence[PlacedBatch], coefficients: Sequence[Tensor], low: float, high: float
) -> list[Tensor] | None:
    """c_i * clip(ratio_i) / ratio_i; None when no rank gave rollout logps. A ratio too large for c loses its token."""
    changed, known = [], False
    for placed, coefficient_BR in zip(batches, coefficients, strict=True):
        log_ratio_BR = log_ratio(placed)
        if log_ratio_BR is None:
            changed.append(coefficient_BR)
            continue
        known = True
        scale_BR = torch.exp(log_ratio_BR.clamp(math.log(low), math.log(high)) - log_ratio_BR)
        scaled_BR = coefficient_BR * torch.where(torch.isfinite(scale_BR), scale_BR, 0.0)
        changed.append(torch.where(torch.isfinite(scaled_BR), scaled_BR, 0.0))
    return changed if known else None


def sequence_clip(
    batches: Sequence[PlacedBatch], coefficients: Sequence[Tensor], low: float, high: float
) -> list[Tensor] | None:
    """Coefficients without the rows whose sequence ratio lies outside [low, high]; None without rollout logps."""
    changed, known = [], False
    for placed, coefficient_BR in zip(batches, coefficients, strict=True):
        log_ratio_BR = log_ratio(placed)
        if log_ratio_BR is None:
            changed.append(coefficient_BR)
            continue
        known = True
        total_B = torch.where(placed.batch.mask_BR, log_ratio_BR, 0.0).sum(dim=1)
        inside_B = (total_B >= math.log(low)) & (total_B <= math.log(high))
        changed.append(torch.where(inside_B.unsqueeze(1), coefficient_BR, 0.0))
    return changed if known else None


def advantage_clip(
    batches: Sequence[PlacedBatch], coefficients: Sequence[Tensor], largest: float
) -> list[Tensor] | None:
    """c_i * clip(A_i) / A_i; None when no rank gave advantages."""
    changed, known = [], False
    for placed, coefficient_BR in zip(batches, coefficients, strict=True):
        advantage_BR = placed.batch.advantage_BR
        if advantage_BR is None:
            changed.append(coefficient_BR)
            continue
        known = True
        size_BR = advantage_BR.double().abs()
        scale_BR = torch.where(size_BR > largest, largest / size_BR, 1.0)
        changed.append(torch.where(torch.isfinite(scale_BR), coefficient_BR * scale_BR, 0.0))
    return changed if known else None


def finite_only(coefficients: Sequence[Tensor]) -> list[Tensor]:
    """Coefficients that are not finite set to zero."""
    return [torch.where(torch.isfinite(coefficient), coefficient, 0.0) for coefficient in coefficients]


def layer_clip_norm(layer_norms: Mapping[str, float], layer_limits: Mapping[str, float]) -> float:
    """Norm after clipping each layer to its own limit; layers without one stay."""
    return math.sqrt(sum(min(norm, layer_limits.get(key, math.inf)) ** 2 for key, norm in layer_norms.items()))


def log_ratio(placed: PlacedBatch) -> Tensor | None:
    """logp - rollout_logp, float64 [B, R], or None when the trainer did not give it."""
    rollout_BR = placed.batch.rollout_logp_BR
    return None if rollout_BR is None else placed.batch.logp_BR.double() - rollout_BR.double()


def inside_mask(batches: Sequence[PlacedBatch], coefficients: Sequence[Tensor]) -> list[Tensor]:
    """Coefficients outside the loss mask set to zero, whatever they were."""
    return [
        torch.where(placed.batch.mask_BR.bool(), coefficient, 0.0)
        for placed, coefficient in zip(batches, coefficients, strict=True)
    ]
