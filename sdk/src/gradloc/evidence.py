"""Evidence: what the batch says about the leading token, next to what is usual in it. Knows no cause."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradloc.culprits import Scene
from gradloc.exhibits import Shown, Texts, value_at
from gradloc.fidelity import StepFacts
from gradloc.layer_growth import LayerGrowth
from gradloc.measured import Evidence
from gradloc.policy import PlacedBatch
from gradloc.snapshot import MicroBatch
from gradloc.verification import Place
from gradloc.whatif import log_ratio

SURE_LOGIT = 1.0  # tokens nearer to even odds say nothing about a temperature
NUM_SURE_MIN = 16
RANK_TOLERANCE = 1e-3


def evidence_of(
    scene: Scene,
    limit: float,
    kind: str,
    shown: Shown,
    growth: LayerGrowth,
    num_culprits: int,
    *,
    facts: StepFacts | None = None,
    texts: Texts | None = None,
) -> Evidence:
    """What is known about the leading token and, for comparison, about the batch and the steps before."""
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
        if batch.ref_logp_BR is not None:
            gap_BR = batch.ref_logp_BR.double() - batch.logp_BR.double()
            values["reference_log_ratio"] = float(gap_BR[place.row, place.column])
        values["row_scale"] = _row_scale(scene, place)
        values |= _other_ids(batch, place, texts)
    if facts is not None:
        values |= {"metrics": facts.metrics, "metrics_usual": facts.metrics_usual}
        values |= _odd_rank(facts.rank_norms, scene.gradient.norm)
    sharpness, scatter = _sharpness(scene.batches)
    return Evidence(
        norm=scene.gradient.norm,
        limit=limit,
        kind=kind,
        num_culprits=num_culprits,
        growth=growth,
        in_mask=in_mask,
        median_coefficient=_median(all_c),
        median_log_ratio=_median(log_ratios, positive=False),
        mean_log_ratio=_mean_but_the_worst(log_ratios.abs()),
        mean_old_log_ratio=_mean_but_the_worst(_old_log_ratios(scene.batches).abs()),
        log_ratio_spread=_upper_quartile(log_ratios.abs()),
        median_advantage=_median(advantage),
        largest_advantage=float(advantage.max()) if len(advantage) else None,
        coefficient_over_advantage=_coefficient_over_advantage(scene),
        residual_rms_ratio=shown.residual_ratio,
        residual_block=shown.residual_block,
        sharpness=sharpness,
        sharpness_scatter=scatter,
        **values,
    )


def _old_log_ratios(batches: Sequence[PlacedBatch]) -> Tensor:
    """logp - old logp of all trained tokens, float64 [N]."""
    found = [
        (batch.logp_BR.double() - batch.old_logp_BR.double())[batch.mask_BR.bool()]
        for batch in (placed.batch for placed in batches)
        if batch.old_logp_BR is not None
    ]
    return torch.cat(found) if found else torch.zeros(0)


def _mean_but_the_worst(sizes_N: Tensor) -> float | None:
    """One absurd token must not pass for all of them."""
    sizes_N = sizes_N[torch.isfinite(sizes_N)].sort().values[:-1]
    return float(sizes_N.mean()) if len(sizes_N) else None


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


def _row_scale(scene: Scene, place: Place) -> float | None:
    """Median |c / advantage| of the leading token's row, over the batch's: what all of the row's tokens count by."""
    found, own = [], torch.zeros(0)
    for index, (placed, coefficient_BR) in enumerate(zip(scene.batches, scene.coefficients, strict=True)):
        advantage_BR = placed.batch.advantage_BR
        if advantage_BR is None:
            return None
        size_BR = (coefficient_BR / advantage_BR.double()).abs()
        used_BR = placed.batch.mask_BR.bool() & (coefficient_BR != 0) & torch.isfinite(size_BR)
        found.append(size_BR[used_BR])
        if index == place.batch:
            own = size_BR[place.row][used_BR[place.row]]
    usual = _median(torch.cat(found))
    return float(own.median()) / usual if len(own) and usual else None


def _other_ids(batch: MicroBatch, place: Place, texts: Texts | None) -> dict[str, Any]:
    """How many ids of the row, up to the leading token, are not those that rollout_logp belongs to."""
    rollout_ids_BR = batch.rollout_ids_BR
    if rollout_ids_BR is None:
        return {}
    used_R = batch.mask_BR[place.row].bool()
    ids_R = batch.ids_BT[place.row, batch.first_position :]
    differ_R = (ids_R != rollout_ids_BR[place.row]) & used_R
    num = int(differ_R[: place.column + 1].sum())
    values: dict[str, Any] = {"num_other_ids": num}
    if num:
        values["first_other_id"] = batch.first_position + int(differ_R.nonzero()[0])
        if texts is not None:
            trained, sampled = _text(ids_R[used_R], texts), _text(rollout_ids_BR[place.row], texts)
            # Padding follows the one, the row's end may cut the other.
            values["other_ids_same_text"] = trained.startswith(sampled) or sampled.startswith(trained)
    return values


def _text(ids_R: Tensor, texts: Texts) -> str:
    """The text of ids without blanks, which tokenizers add, drop and mark as they like."""
    return "".join("".join(texts(int(token)).split()) for token in ids_R).replace("\u2581", "").replace("\u0120", "")


def _odd_rank(rank_norms: Sequence[float], replayed_norm: float) -> dict[str, Any]:
    """The one rank whose reduced gradient is not what the replay and all its peers have."""
    if len(rank_norms) < 2:
        return {}
    bar = RANK_TOLERANCE * max(replayed_norm, 1e-30)
    odd = [rank for rank, norm in enumerate(rank_norms) if not abs(norm - replayed_norm) <= bar]
    return {"odd_rank": odd[0], "odd_rank_norm": rank_norms[odd[0]]} if len(odd) == 1 else {}


def _sharpness(batches: Sequence[PlacedBatch]) -> tuple[float | None, float | None]:
    """The rollout's log-odds of its tokens against the policy's: median quotient, and the median distance from it.

    Logits divided by a temperature T have log-odds 1/T times as large, of all tokens alike.
    """
    policies, rollouts = [], []
    for placed in batches:
        batch = placed.batch
        if batch.rollout_logp_BR is None:
            return None, None
        used_BR = batch.mask_BR.bool()
        policies.append(_log_odds(batch.logp_BR[used_BR]))
        rollouts.append(_log_odds(batch.rollout_logp_BR[used_BR]))
    if not policies:
        return None, None
    policy_N, rollout_N = torch.cat(policies), torch.cat(rollouts)
    sure_N = (policy_N.abs() >= SURE_LOGIT) & torch.isfinite(policy_N) & torch.isfinite(rollout_N)
    if int(sure_N.sum()) < NUM_SURE_MIN:
        return None, None
    policy_N, rollout_N = policy_N[sure_N], rollout_N[sure_N]
    slope = float((rollout_N / policy_N).median())
    return slope, float((rollout_N - slope * policy_N).abs().median())


def _log_odds(logp_N: Tensor) -> Tensor:
    logp_N = logp_N.double()
    return logp_N - torch.log(-torch.expm1(logp_N.clamp(max=-1e-12)))


def _upper_quartile(values: Tensor) -> float | None:
    values = values[torch.isfinite(values)]
    return float(values.kthvalue(max(1, round(0.75 * len(values)))).values) if len(values) else None


def _median(values: Tensor, *, positive: bool = True) -> float | None:
    values = values[torch.isfinite(values)]
    if positive:
        values = values[values > 0]
    return float(values.median()) if len(values) else None
