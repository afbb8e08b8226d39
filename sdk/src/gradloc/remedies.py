"""Remedies: the fix that belongs to a cause, and the measured norm of the step under it.

Knows which remedy fits which cause; what remedies do is in whatif.py.
"""

import math
from collections.abc import Mapping, Sequence

from gradloc import whatif
from gradloc.culprits import CulpritSet, Scene
from gradloc.held import Hold, without_culprits
from gradloc.replay import Gradient
from gradloc.whatif import Change, GradientChange, WhatIf
from gradloc_proto.messages import Cause, Fix

NUM_TRIED_MAX = 2  # each costs a replay


def fix_for(
    causes: Sequence[Cause],
    scene: Scene,
    healthy_layer_norms: Mapping[str, float],
    limit: float,
    found: CulpritSet | None,
) -> Fix | None:
    """The first remedy of the likeliest causes under which the norm stays below the limit, else leaving the culprits
    out (measured already); None when nothing applies."""
    tried: list[Fix] = []
    for cause in causes[:NUM_TRIED_MAX]:
        fix = _fix_of(cause.name, scene, healthy_layer_norms, limit, found)
        if fix is not None and fix.holds:
            return fix
        tried += [] if fix is None else [fix]
    if found is not None:
        what = "sequences" if found.rows else "tokens"
        return Fix(name=f"leave out the culprit {what}", norm_after=found.without.norm, holds=found.holds)
    return tried[0] if tried else None


def _fix_of(
    cause: str, scene: Scene, healthy_layer_norms: Mapping[str, float], limit: float, found: CulpritSet | None
) -> Fix | None:
    if cause == "unnormalised-loss":
        # The gradient is linear in the loss: nothing has to be replayed.
        num_tokens = sum(int(placed.batch.mask_BR.sum()) for placed in scene.batches)
        norm = scene.gradient.norm / max(1, num_tokens)
        return Fix(name=f"divide the loss by its {num_tokens:,} tokens", norm_after=norm, holds=norm <= limit)
    change = _change_for(cause, healthy_layer_norms or ({} if found is None else found.without.layer_norms))
    if change is None:
        return None
    hold = None
    if found is not None and isinstance(change, GradientChange) and change.holds is not None:
        with scene.policy.meter.stage("certificate"):
            _, hold = without_culprits(scene.policy, scene.batches, scene.coefficients, found.places)
    told = foretell(scene, change, hold=hold)
    if told is None:
        return None
    return Fix(name=told.name, norm_after=told.norm, holds=math.isfinite(told.norm) and told.norm <= limit)


def _change_for(cause: str, healthy_layer_norms: Mapping[str, float]) -> Change | None:
    if cause == "layer-heterogeneity":
        return whatif.layer_clip(healthy_layer_norms) if healthy_layer_norms else None
    changes: dict[str, Change] = {
        "token-mismatch": whatif.token_clip(),
        "sequence-mismatch": whatif.seq_clip(),
        "advantage-outlier": whatif.advantage_clip(),
        "mask-fault": whatif.inside_mask(),
    }
    return changes.get(cause)


def foretell(scene: Scene, change: Change, healthy: Gradient | None = None, hold: Hold | None = None) -> WhatIf | None:
    """The scene's step under a change; see `whatif.foretell`."""
    return whatif.foretell(
        change,
        scene.batches,
        scene.coefficients,
        scene.gradient,
        lambda coefficients: scene.under(coefficients).gradient,
        healthy,
        hold,
    )
