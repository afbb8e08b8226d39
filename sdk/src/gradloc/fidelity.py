"""Fidelity: whether a replay gave the step that the trainer reported, and what a mismatch means.

Knows no token. A mismatch may be a loss term that belongs to no token, a wrong scale, dropout,
nondeterminism or bad hardware.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from gradloc.clipping.stream import is_below
from gradloc.replay import Gradient
from gradloc_proto.messages import Fidelity

LIMIT_OVER_HEALTHY = 4.0  # as the detector's median rule, for steps that carry no limit of their own
LIMIT_WITHOUT_BASELINE = 0.5  # of the norm itself: asks what makes up three quarters of its square
# Of a replay alone; where it is missed, the replay of a healthy step of the run says what this run's replays miss by.
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
TOLERANCE_LOW_PRECISION = 2e-2
LAYER_TOLERANCE_FACTOR = 10.0  # layer norms are smaller sums: they wobble more
LAYER_FLOOR = 1e-3  # of the whole norm: smaller layers are compared with this
COMMON_FACTOR_SPREAD = 0.01
HEALTHY_ERROR_FACTOR = 4.0  # a spike's replay may miss by so much more than a healthy step's
TOLERANCE_MEASURED_MAX = (
    0.1  # beyond it replays of the run say nothing: a loss term of no token, dropout, a wrong scale
)
SQUARES_OVERFLOW = 1.8e19  # norms above it overflow when float32 squares them


@dataclass(frozen=True)
class StepFacts:
    """What the trainer and the detector said about the step. `weights`, `held_at`: as in a snapshot's manifest."""

    step: int
    grad_norm: float
    layer_norms: Mapping[str, float] = field(default_factory=dict)
    limit: float | None = None
    healthy_norm: float | None = None
    healthy_layer_norms: Mapping[str, float] = field(default_factory=dict)
    weights: str = "before-update"
    rank_norms: Sequence[float] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    metrics_usual: Mapping[str, float] = field(default_factory=dict)
    held_at: str | None = None

    def compared(self, layer_norms: Mapping[str, float]) -> dict[str, float]:
        """Of a replay's layer norms those that can be compared with the trainer's: where LayerClip held positions back,
        those above. A replay holds nothing back."""
        held_at = self.held_at
        return {key: norm for key, norm in layer_norms.items() if held_at is None or not is_below(key, held_at)}

    def limit_for(self, norm: float) -> float:
        """The step's own limit, else one made from what is known."""
        if self.limit is not None and self.limit > 0 and math.isfinite(self.limit):
            return self.limit
        if self.healthy_norm is not None and self.healthy_norm > 0:
            return LIMIT_OVER_HEALTHY * self.healthy_norm
        return LIMIT_WITHOUT_BASELINE * norm if math.isfinite(norm) and norm > 0 else 1.0


def tolerance_of(grid: torch.dtype) -> float:
    """Relative error of the norm that a replay in this number format may have."""
    return TOLERANCE.get(grid, TOLERANCE_LOW_PRECISION)


def fidelity_of(
    facts: StepFacts, gradient: Gradient, grid: torch.dtype, healthy_rel_error: float | None = None
) -> Fidelity:
    """Replayed norms against the reported ones. `healthy_rel_error`: what the replay of a healthy step missed by."""
    tolerance = tolerance_of(grid)
    if healthy_rel_error is not None and math.isfinite(healthy_rel_error):
        tolerance = min(max(tolerance, HEALTHY_ERROR_FACTOR * healthy_rel_error), TOLERANCE_MEASURED_MAX)
    reported, replayed = facts.grad_norm, gradient.norm
    told = facts.compared(facts.layer_norms)
    if facts.held_at is not None:
        # Without a layer that can be compared nothing shows that this is the step.
        reported = math.hypot(*told.values()) if told else math.inf
        replayed = math.hypot(*facts.compared(gradient.layer_norms).values())
    rel_error = _error(reported, replayed, 1e-30)
    floor = LAYER_FLOOR * abs(reported)
    layers = [_error(norm, gradient.layer_norms.get(key, 0.0), floor) for key, norm in told.items()]
    layer_error = max(layers, default=None)
    return Fidelity(
        reported_norm=facts.grad_norm,
        held_at=facts.held_at,
        replayed_norm=gradient.norm,
        rel_error=rel_error,
        layer_rel_error_max=layer_error,
        tolerance=tolerance,
        reproduced=rel_error <= tolerance and (layer_error or 0.0) <= LAYER_TOLERANCE_FACTOR * tolerance,
        healthy_rel_error=healthy_rel_error,
    )


def healthy_error_of(fidelity: Fidelity) -> float:
    """What the replay of a healthy step missed by, as `fidelity_of` takes it."""
    return max(fidelity.rel_error, (fidelity.layer_rel_error_max or 0.0) / LAYER_TOLERANCE_FACTOR)


def _error(reported: float, replayed: float, floor: float) -> float:
    if not (math.isfinite(reported) and math.isfinite(replayed)):
        return 0.0 if reported == replayed or (math.isnan(reported) and math.isnan(replayed)) else math.inf
    return abs(replayed - reported) / max(abs(reported), floor) if replayed != reported else 0.0


def refusal(facts: StepFacts, fidelity: Fidelity, gradient: Gradient, limit: float) -> str | None:
    """Verdict that the replay's fidelity alone decides, or None."""
    if fidelity.reproduced:
        return None
    if facts.grad_norm == math.inf and gradient.norm > SQUARES_OVERFLOW:
        return "norm-overflow"
    if facts.weights != "before-update":
        return None  # the weights have moved since: the replay cannot match, the finding is approximate
    if gradient.norm > 0 and _differs_by_one_factor(facts, gradient):
        return "accounting"
    healthy = fidelity.healthy_rel_error
    if healthy is not None and not HEALTHY_ERROR_FACTOR * healthy <= TOLERANCE_MEASURED_MAX:
        return "inconclusive"  # not even a healthy step of this run replays: no evidence against the machine
    return "not-reproduced" if gradient.norm <= limit else "inconclusive"


def _differs_by_one_factor(facts: StepFacts, gradient: Gradient) -> bool:
    factors = [
        norm / gradient.layer_norms[key]
        for key, norm in facts.compared(facts.layer_norms).items()
        if gradient.layer_norms.get(key, 0.0) > LAYER_FLOOR * gradient.norm
    ]
    return len(factors) >= 2 and max(factors) - min(factors) <= COMMON_FACTOR_SPREAD * abs(min(factors))
