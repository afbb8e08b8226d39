"""Evidence: what the batch says about the leading token, next to what is usual in it. Knows no cause."""

from typing import Any

import torch
from torch import Tensor

from gradloc.culprits import Scene
from gradloc.diagnosis import Evidence, LayerGrowth
from gradloc.exhibits import Shown, value_at
from gradloc.whatif import log_ratio


def evidence_of(
    scene: Scene, limit: float, kind: str, shown: Shown, growth: LayerGrowth, num_culprits: int
) -> Evidence:
    """What is known about the leading token and, for comparison, about the batch."""
    all_c = torch.cat([c.flatten() for c in scene.coefficients]).abs()
    ratios = [(placed, log_ratio(placed)) for placed in scene.batches]
    used = [r[placed.batch.mask_BR.bool()] for placed, r in ratios if r is not None]
    log_ratios = torch.cat(used) if used else torch.zeros(0)
    advantages = [
        p.batch.advantage_BR[p.batch.mask_BR.bool()] for p in scene.batches if p.batch.advantage_BR is not None
    ]
    advantage = torch.cat(advantages).double().abs() if advantages else torch.zeros(0)
    values: dict[str, Any] = {}
    in_mask = True
    if shown.leading is not None:
        place = shown.leading
        batch = scene.batches[place.batch].batch
        in_mask = bool(batch.mask_BR[place.row, place.column])
        own = ratios[place.batch][1]
        values = {
            "coefficient": float(scene.coefficients[place.batch][place.row, place.column]),
            "logp": float(batch.logp_BR[place.row, place.column]),
            "advantage": value_at(batch.advantage_BR, place),
        }
        if own is not None:
            row = torch.where(batch.mask_BR[place.row].bool(), own[place.row], 0.0)
            values["log_ratio"] = float(own[place.row, place.column])
            values["sequence_log_ratio"] = float(row.sum())
            values["largest_token_log_ratio_in_sequence"] = float(row.abs().max())
    return Evidence(
        norm=scene.gradient.norm,
        limit=limit,
        kind=kind,
        num_culprits=num_culprits,
        growth=growth,
        in_mask=in_mask,
        median_coefficient=_median(all_c),
        median_log_ratio=_median(log_ratios, positive=False),
        median_advantage=_median(advantage),
        coefficient_over_advantage=_coefficient_over_advantage(scene),
        residual_rms_ratio=shown.residual_ratio,
        residual_block=shown.residual_block,
        **values,
    )


def _coefficient_over_advantage(scene: Scene) -> float | None:
    """Median of |c| / |advantage * ratio| over trained tokens: about 1 / number of tokens where the loss is a mean."""
    found = []
    for placed, coefficient_BR in zip(scene.batches, scene.coefficients, strict=True):
        advantage_BR = placed.batch.advantage_BR
        if advantage_BR is None:
            return None
        ratios = log_ratio(placed)
        weight_BR = advantage_BR.double().abs() * (1.0 if ratios is None else ratios.exp())
        used = (weight_BR > 0) & (coefficient_BR != 0)
        found.append((coefficient_BR.abs() / weight_BR)[used])
    return _median(torch.cat(found)) if found else None


def _median(values: Tensor, *, positive: bool = True) -> float | None:
    values = values[torch.isfinite(values)]
    if positive:
        values = values[values > 0]
    return float(values.median()) if len(values) else None
