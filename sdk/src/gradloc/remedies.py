"""Remedies: the fix that belongs to a cause, and the measured norm of the step under it.

Knows which remedy fits which cause; what remedies do is in whatif.py.
"""

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from gradloc import whatif
from gradloc.culprits import CulpritSet, Scene
from gradloc_proto.messages import Cause, Fix

LAYER_CLIP_OVER_HEALTHY = 2.0  # LayerClip follows each layer's own history
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
    if cause == "layer-heterogeneity":
        healthy = healthy_layer_norms or (found.without.layer_norms if found is not None else {})
        if not healthy:
            return None
        limits = {key: LAYER_CLIP_OVER_HEALTHY * norm for key, norm in healthy.items()}
        norm = whatif.layer_clip_norm(scene.gradient.layer_norms, limits)
        return Fix(name=f"LayerClip {LAYER_CLIP_OVER_HEALTHY:g} x healthy", norm_after=norm, holds=norm <= limit)
    if cause == "unnormalised-loss":
        # The gradient is linear in the loss: nothing has to be replayed.
        num_tokens = sum(int(placed.batch.mask_BR.sum()) for placed in scene.batches)
        norm = scene.gradient.norm / max(1, num_tokens)
        return Fix(name=f"divide the loss by its {num_tokens:,} tokens", norm_after=norm, holds=norm <= limit)
    changed: list[Tensor] | None = None
    name = ""
    if cause == "token-mismatch":
        low, high = whatif.TOKEN_CLIP
        name = f"TokenClip [{low:g}, {high:g}]"
        changed = whatif.token_clip(scene.batches, scene.coefficients, low, high)
    elif cause == "sequence-mismatch":
        low, high = whatif.SEQUENCE_CLIP
        name = f"SeqClip [{low:g}, {high:g}]"
        changed = whatif.sequence_clip(scene.batches, scene.coefficients, low, high)
    elif cause == "advantage-outlier":
        name = f"AdvantageClip {whatif.ADVANTAGE_CLIP:g}"
        changed = whatif.advantage_clip(scene.batches, scene.coefficients, whatif.ADVANTAGE_CLIP)
    elif cause == "mask-fault":
        name = "zero the coefficients outside the mask"
        changed = whatif.inside_mask(scene.batches, scene.coefficients)
    if changed is None:
        return None
    norm = scene.under(changed).gradient.norm
    return Fix(name=name, norm_after=norm, holds=math.isfinite(norm) and norm <= limit)
