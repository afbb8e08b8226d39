"""What if: the step's gradient under a remedy or without some tokens, by replay with changed coefficients.

TokenClip, SeqClip and LayerClip are those of `gradloc.clipping`, the very functions that `watch(remedies=...)`
runs, with their defaults: what is foretold is what a trainer would get. Frozen counterfactual: other tokens'
coefficients stay as they were. Knows no cause. Shapes: B rows, R response positions, L layers.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from gradloc.clipping import layer, sequence, token
from gradloc.clipping.layer import LayerLimits
from gradloc.held import Hold
from gradloc.layers import block_of, layer_key
from gradloc.policy import PlacedBatch
from gradloc.replay import Gradient, gradient_of, masked

ADVANTAGE_CLIP = 5.0
Coefficients = Sequence[Tensor]


@dataclass(frozen=True)
class CoefficientChange:
    """Something done to coefficients before the backward pass. `apply` gives None where the batch lacks what it needs
    (`needs`), else one [B, R] tensor a batch."""

    name: str
    apply: Callable[[Sequence[PlacedBatch], Coefficients], list[Tensor] | None]
    needs: str = ""


@dataclass(frozen=True)
class GradientChange:
    """Something done to the finished gradient. holds: where positions are held back before it is finished, how many
    times what enters a layer in a healthy step may enter it; `apply` is then told whether any was."""

    name: str
    apply: Callable[..., Gradient]
    holds: float | None = None


Change = CoefficientChange | GradientChange


@dataclass(frozen=True)
class WhatIf:
    """The step under a change. cosine: to the healthy update, None where there is none or either is zero."""

    name: str
    norm: float
    layer_norms: Mapping[str, float]
    cosine: float | None
    num_changed: int | None  # coefficients; None where the gradient was changed


def foretell(
    change: Change,
    batches: Sequence[PlacedBatch],
    coefficients: Coefficients,
    gradient: Gradient,
    replayed: Callable[[Coefficients], Gradient],
    healthy: Gradient | None = None,
    hold: Hold | None = None,
) -> WhatIf | None:
    """The step under `change`; None where the batch lacks what it needs.

    gradient: of the step as it is. replayed: the gradient under other coefficients (costs a forward and a backward).
    hold: for LayerClip, to hold positions back (costs as much); without it layers alone are clipped.
    """
    num_changed = None
    if isinstance(change, GradientChange):
        if change.holds is not None and hold is not None:
            factor = change.holds
            changed = change.apply(
                *hold.under({name: factor * norm for name, norm in hold.entering_norms.items() if norm > 0})
            )
        else:
            changed = change.apply(gradient)
    else:
        others = change.apply(batches, coefficients)
        if others is None:
            return None
        num_changed = sum(int((~_same(mine, other)).sum()) for mine, other in zip(coefficients, others, strict=True))
        changed = gradient if num_changed == 0 else replayed(others)
    return WhatIf(change.name, changed.norm, changed.layer_norms, cosine(changed, healthy), num_changed)


def cosine(gradient: Gradient, healthy: Gradient | None) -> float | None:
    """Cosine of two gradients of one model, None where one is missing, zero or not finite."""
    if healthy is None or not (gradient.is_finite and healthy.is_finite) or gradient.norm * healthy.norm == 0.0:
        return None
    return gradient.dot(list(healthy.tensors.values())) / (gradient.norm * healthy.norm)


# --- changes ---------------------------------------------------------------------------------------


def leave_out(places: Sequence[tuple[int, int, int]]) -> CoefficientChange:
    """Without the tokens at (batch, row, column)."""
    return CoefficientChange(f"without {len(places)} token(s)", lambda _, coefficients: masked(coefficients, places))


def named(name: str, change: CoefficientChange) -> CoefficientChange:
    """The same change under another name."""
    return replace(change, name=name)


def token_clip(low: float = token.LOW, high: float = token.HIGH, mode: token.Mode = "mask") -> CoefficientChange:
    """TokenClip of `gradloc.clipping`. Raises ValueError for bounds that cannot be meant."""
    token.token_clip(torch.zeros(0), low, high, mode)

    def factor(placed: PlacedBatch, log_ratio_BR: Tensor) -> Tensor:
        return torch.where(placed.batch.mask_BR.bool(), token.token_clip(log_ratio_BR, low, high, mode), 1.0)

    name = f"TokenClip [{low:g}, {high:g}]" + (", clip" if mode == "clip" else "")
    return CoefficientChange(name, _by_ratio(factor), needs="rollout_logp")


def seq_clip(
    low: float = sequence.LOW, high: float = sequence.HIGH, mean: sequence.Mean | Literal["both"] = "both"
) -> CoefficientChange:
    """SeqClip of `gradloc.clipping`. Raises ValueError for bounds or a mean that cannot be meant."""
    sequence.seq_clip(torch.zeros(0, 1), torch.ones(0, 1), low, high, mean)

    def factor(placed: PlacedBatch, log_ratio_BR: Tensor) -> Tensor:
        return sequence.seq_clip(log_ratio_BR, placed.batch.mask_BR, low, high, mean).unsqueeze(1)

    name = f"SeqClip [{low:g}, {high:g}]" + ("" if mean == "both" else f", {mean}")
    return CoefficientChange(name, _by_ratio(factor), needs="rollout_logp")


def advantage_clip(largest: float = ADVANTAGE_CLIP) -> CoefficientChange:
    """c_i * clip(A_i) / A_i."""

    def apply(batches: Sequence[PlacedBatch], coefficients: Coefficients) -> list[Tensor] | None:
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

    return CoefficientChange(f"AdvantageClip {largest:g}", apply, needs="advantage")


def inside_mask() -> CoefficientChange:
    """Coefficients outside the loss mask set to zero, whatever they were."""

    def apply(batches: Sequence[PlacedBatch], coefficients: Coefficients) -> list[Tensor]:
        return [
            torch.where(placed.batch.mask_BR.bool(), coefficient_BR, 0.0)
            for placed, coefficient_BR in zip(batches, coefficients, strict=True)
        ]

    return CoefficientChange("zero the coefficients outside the mask", apply)


def layer_clip(healthy_layer_norms: Mapping[str, float], settings: LayerLimits | None = None) -> GradientChange:
    """LayerClip of `gradloc.clipping`, by block, with healthy norms by layer key for a history: a block's limit is
    `factor_of_median` times its healthy norm, and a position's on its way into one as many times what enters it."""
    settings = settings or LayerLimits()
    healthy = _by_block(healthy_layer_norms)

    def apply(gradient: Gradient, is_struck: bool = False) -> Gradient:
        norms = _by_block(gradient.layer_norms)
        norms_L = np.array(list(norms.values()))
        usual_L = np.array([healthy.get(name) or math.nan for name in norms])  # of 0 nothing is known, as in a history
        scale_L = layer.layer_clip(norms_L, settings.factor_of_median * usual_L, usual_L, settings.power)
        if is_struck or bool((scale_L < 1.0).any()):
            strict = min(settings.suspect_of_median, settings.factor_of_median)
            scale_L = layer.layer_clip(norms_L, strict * usual_L, usual_L, settings.power)
        return _scaled(gradient, dict(zip(norms, scale_L.tolist(), strict=True)))

    return GradientChange("LayerClip", apply, holds=settings.factor_of_median)


def norm_clip(max_norm: float) -> GradientChange:
    """The trainer's own clipping: the whole gradient scaled down to `max_norm`. Turns nothing."""

    def apply(gradient: Gradient) -> Gradient:
        if not gradient.norm > max_norm:
            return gradient
        return _scaled(gradient, dict.fromkeys(_by_block(gradient.layer_norms), max_norm / gradient.norm))

    return GradientChange(f"clip the norm to {max_norm:.4g}", apply)


def skip_above(max_norm: float) -> GradientChange:
    """The update skipped where the norm is above `max_norm`, or not finite: no gradient at all."""

    def apply(gradient: Gradient) -> Gradient:
        if gradient.norm <= max_norm:
            return gradient
        return _scaled(gradient, dict.fromkeys(_by_block(gradient.layer_norms), 0.0))

    return GradientChange(f"skip above a norm of {max_norm:.4g}", apply)


def log_ratio(placed: PlacedBatch) -> Tensor | None:
    """logp - rollout_logp, float64 [B, R], or None when the trainer did not give it."""
    rollout_BR = placed.batch.rollout_logp_BR
    return None if rollout_BR is None else placed.batch.logp_BR.double() - rollout_BR.double()


def _by_ratio(
    factor: Callable[[PlacedBatch, Tensor], Tensor],
) -> Callable[[Sequence[PlacedBatch], Coefficients], list[Tensor] | None]:
    """Coefficients times a factor of the importance ratio; None when no rank gave rollout logps."""

    def apply(batches: Sequence[PlacedBatch], coefficients: Coefficients) -> list[Tensor] | None:
        changed, known = [], False
        for placed, coefficient_BR in zip(batches, coefficients, strict=True):
            log_ratio_BR = log_ratio(placed)
            if log_ratio_BR is None:
                changed.append(coefficient_BR)
                continue
            known = True
            factor_BR = factor(placed, log_ratio_BR)
            # What is left out takes its NaN along: 0 * NaN would keep it.
            changed.append(torch.where(factor_BR == 0, 0.0, coefficient_BR * factor_BR))
        return changed if known else None

    return apply


def _same(mine: Tensor, other: Tensor) -> Tensor:
    return (mine == other) | (mine.isnan() & other.isnan())


def _by_block(layer_norms: Mapping[str, float]) -> dict[str, float]:
    squares: dict[str, float] = {}
    for key, norm in layer_norms.items():
        squares[block_of(key)] = squares.get(block_of(key), 0.0) + norm * norm
    return {name: math.sqrt(square) for name, square in squares.items()}


def _scaled(gradient: Gradient, scales: Mapping[str, float]) -> Gradient:
    """Each block's part times its scale; scale 0 leaves nothing, not even a NaN."""
    tensors = {}
    for name, tensor in gradient.tensors.items():
        scale = scales[block_of(layer_key(name))]
        tensors[name] = torch.zeros_like(tensor) if scale == 0.0 else tensor * scale
    return gradient_of(tensors)
