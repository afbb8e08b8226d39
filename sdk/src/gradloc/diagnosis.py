"""Diagnosis: from measured evidence to causes, most trustworthy first. Pure; knows no tensor.

Names follow the literature on RL with verifiable rewards: token-level and sequence-level mismatch
between training and inference (types A.1, A.2), gradients that explode in some layers only (type B).
Causes of tokens, rows and layers are here; those that are nobody's in particular in common_causes.py.
"""

import math

from gradloc import common_causes
from gradloc.measured import Evidence
from gradloc_proto.messages import Cause

LOG_RATIO_MISMATCH = math.log(5.0)  # TokenClip's upper bound: what it would have clipped
LOG_RATIO_CERTAIN = math.log(20.0)  # a truthful logp gets here once in twenty tokens at most
SEQUENCE_LOG_RATIO_MISMATCH = math.log(2.0)
ROW_SCALE_MATERIAL = 3.0  # all tokens of a row count so many times the usual
ROW_SCALE_AGREES = 2.0  # factor between that and the ratio of the whole sequence
ADVANTAGE_OUTLIER = 8.0  # times the batch's median; a group of 64 cannot exceed 7.9 by normalising
ADVANTAGE_CERTAIN = 50.0
COEFFICIENT_OUTLIER = 10.0
RARE_LOGP = math.log(1e-3)
RESIDUAL_COLLAPSE = 0.1  # rms at the position against the batch's median
_EVERYBODYS = (
    common_causes.ratio_before_update,
    common_causes.learning_rate,
    common_causes.other_temperature,
)
_LESS_SURE = (
    common_causes.batch_bias,
    common_causes.unnormalised_loss,
    common_causes.rest_dominated,
    common_causes.zero_variance,
    common_causes.reward_drop,
    common_causes.lone_layer,
)


def diagnose(evidence: Evidence) -> tuple[Cause, ...]:
    """Causes with the numbers they rest on, high confidence first; never empty."""
    found = [
        cause
        for cause in (
            common_causes.hardware(evidence),
            _mask_fault(evidence),
            *(name(evidence) for name in _EVERYBODYS),
            _layer_heterogeneity(evidence),
            _other_ids(evidence),
            _token_mismatch(evidence),
            _advantage_outlier(evidence),
            _kl_outlier(evidence),
            _sequence_mismatch(evidence),
            *(name(evidence) for name in _LESS_SURE),
            _rare_token(evidence),
        )
        if cause is not None
    ]
    if all(cause.confidence == "low" for cause in found):
        outlier = _coefficient_outlier(evidence)
        found = found if outlier is None else [outlier, *found]
    order = ("high", "medium", "low")
    found.sort(key=lambda cause: order.index(cause.confidence))
    return tuple(found) or (_unknown(evidence),)


def is_tokens_fault(evidence: Evidence, cause: Cause) -> bool:
    """Whether a row that was taken out as a whole has one wrong token, its others counting as usual."""
    of_a_token = cause.name in ("token-mismatch", "retokenization", "alignment")
    is_usual = evidence.row_scale is None or evidence.row_scale < ROW_SCALE_MATERIAL
    return evidence.kind == "sequence" and of_a_token and is_usual


def _mask_fault(evidence: Evidence) -> Cause | None:
    if evidence.in_mask or evidence.num_culprits == 0:
        return None
    return Cause(
        name="mask-fault",
        confidence="high",
        summary="the gradient comes through a token that the loss mask leaves out: masking happens after a product",
        evidence={"coefficient": evidence.coefficient},
    )


def _layer_heterogeneity(evidence: Evidence) -> Cause | None:
    growth = evidence.growth
    if not growth.is_heterogeneous:
        return None
    collapsed = evidence.residual_rms_ratio is not None and evidence.residual_rms_ratio <= RESIDUAL_COLLAPSE
    confidence = "high" if collapsed else ("medium" if evidence.is_calm else "low")
    where = ", ".join(growth.blocks_exploding)
    because = (
        f": the residual stream nearly cancels after {evidence.residual_block} "
        f"({evidence.residual_rms_ratio:.2g} of its usual size), and the next norm multiplies the gradient below"
        if collapsed
        else ""
    )
    return Cause(
        name="layer-heterogeneity",
        confidence=confidence,
        summary=f"type B: {where} explode together while the other layers stay calm{because}"[:512],
        evidence={
            "growth_exploding_min": growth.growth_exploding_min,
            "growth_calm_max": growth.growth_calm_max,
            "residual_rms_ratio": evidence.residual_rms_ratio,
            "residual_block": evidence.residual_block,
            "ratio": None if evidence.log_ratio is None else _exp(evidence.log_ratio),
        },
    )


def _token_mismatch(evidence: Evidence) -> Cause | None:
    if evidence.log_ratio is None or evidence.num_culprits == 0:
        return None
    size = abs(evidence.log_ratio)
    if not size >= LOG_RATIO_MISMATCH:
        return None
    # Where the policy has run away from its copy, a token's ratio alone says nothing of the copy.
    certain = size >= LOG_RATIO_CERTAIN and not common_causes.moved_by_its_rate(evidence)
    return Cause(
        name="token-mismatch",
        confidence="high" if certain else "medium",
        summary=f"type A.1: token-level train/inference mismatch (IS ratio {_exp(evidence.log_ratio):.2g})",
        evidence={
            "log_ratio": evidence.log_ratio,
            "ratio": _exp(evidence.log_ratio),
            "coefficient": evidence.coefficient,
            "median_coefficient": evidence.median_coefficient,
        },
    )


def _sequence_mismatch(evidence: Evidence) -> Cause | None:
    total, largest = evidence.sequence_log_ratio, evidence.largest_token_log_ratio_in_sequence
    if total is None or largest is None or evidence.num_culprits == 0:
        return None
    scale = evidence.row_scale
    agrees = (
        scale is not None and scale >= ROW_SCALE_MATERIAL and abs(math.log(scale) - total) <= math.log(ROW_SCALE_AGREES)
    )
    if not abs(total) >= SEQUENCE_LOG_RATIO_MISMATCH or (largest >= LOG_RATIO_MISMATCH and not agrees):
        return None
    because = "every token harmless, but their ratios add up"
    if largest >= LOG_RATIO_MISMATCH:
        because = f"one token's ratio ({_exp(largest):.2g}) makes that of its sequence, by which all its tokens count"
    return Cause(
        name="sequence-mismatch",
        confidence="high" if agrees else "medium" if evidence.kind == "sequence" else "low",
        summary=f"type A.2: {because} (sequence IS ratio {_exp(total):.3g})",
        evidence={
            "sequence_log_ratio": total,
            "ratio": _exp(total),
            "largest_token_log_ratio": largest,
            "row_scale": scale,
        },
    )


def _advantage_outlier(evidence: Evidence) -> Cause | None:
    if evidence.advantage is None or not evidence.median_advantage or evidence.num_culprits == 0:
        return None
    times = abs(evidence.advantage) / evidence.median_advantage
    if not times >= ADVANTAGE_OUTLIER:
        return None
    return Cause(
        name="advantage-outlier",
        confidence="high" if times >= ADVANTAGE_CERTAIN else "medium",
        summary=f"advantage {evidence.advantage:.3g} is {times:.3g} times the batch's median: look at the reward",
        evidence={"advantage": evidence.advantage, "median_advantage": evidence.median_advantage},
    )


def _other_ids(evidence: Evidence) -> Cause | None:
    """A ratio between two tokens: what was trained on is not what was sampled and scored."""
    if not evidence.num_other_ids or evidence.num_culprits == 0 or evidence.is_calm:
        return None
    same = bool(evidence.other_ids_same_text)
    what = (
        "retokenization: the answer's text was encoded again, to other ids"
        if same
        else "the trained ids are not the sampled ones"
    )
    return Cause(
        name="retokenization" if same else "alignment",
        confidence="high",
        summary=f"{what} ({evidence.num_other_ids} up to this token, the first at {evidence.first_other_id}); reported "
        "log-probabilities belong to others. Train on the ids that were sampled",
        evidence={
            "num_other_ids": float(evidence.num_other_ids),
            "first_other_id": None if evidence.first_other_id is None else float(evidence.first_other_id),
            "log_ratio": evidence.log_ratio,
        },
    )


def _kl_outlier(evidence: Evidence) -> Cause | None:
    """The k3 estimate of the KL divergence has exp(reference - policy) in it, and so its gradient: it alone is
    unbounded. Whether it was that and not the policy term shows in a coefficient which ratio and advantage do not
    explain."""
    size = evidence.reference_log_ratio
    if size is None or not size >= LOG_RATIO_MISMATCH or evidence.num_culprits == 0 or not evidence.is_calm:
        return None
    return Cause(
        name="kl-outlier",
        confidence="high" if size >= LOG_RATIO_CERTAIN else "medium",
        summary=f"the reference policy gives the token {_exp(size):.3g} times the probability: the gradient of the k3 "
        "estimate of the KL term grows with that ratio; clip its logarithm, or use k2",
        evidence={"reference_log_ratio": size, "coefficient": evidence.coefficient, "logp": evidence.logp},
    )


def _coefficient_outlier(evidence: Evidence) -> Cause | None:
    """A coefficient that neither ratio nor advantage explains: another term of the loss, such as KL."""
    if evidence.coefficient is None or not evidence.median_coefficient or evidence.num_culprits == 0:
        return None
    times = abs(evidence.coefficient) / evidence.median_coefficient
    if not times >= COEFFICIENT_OUTLIER:
        return None
    return Cause(
        name="coefficient-outlier",
        confidence="low",
        summary=f"the token counts {times:.3g} times the batch's median in the loss",
        evidence={"coefficient": evidence.coefficient, "median_coefficient": evidence.median_coefficient},
    )


def _rare_token(evidence: Evidence) -> Cause | None:
    if evidence.logp is None or not evidence.logp <= RARE_LOGP or evidence.num_culprits == 0:
        return None
    return Cause(
        name="rare-token",
        confidence="low",
        summary=f"the policy gives this token a probability of {math.exp(evidence.logp):.1e}: its gradient is large",
        evidence={"logp": evidence.logp},
    )


def _unknown(evidence: Evidence) -> Cause:
    summaries = {
        "batch-wide": "no few tokens or sequences: the whole batch is larger than usual (learning rate, reward, data)",
        "not-reproduced": "the replay is calm: hardware, nondeterminism, or a loss term that is not per token",
        "accounting": "the replay differs from the step by one common factor: a scale in the loss or in averaging",
        "norm-overflow": "squares of a gradient that is finite overflow in the norm's number format: accumulate them "
        "in float64",
        "inconclusive": "the numbers did not add up well enough to blame anyone",
    }
    return Cause(
        name="unknown" if evidence.kind not in summaries else evidence.kind,
        confidence={"accounting": "medium", "not-reproduced": "medium", "norm-overflow": "high"}.get(
            evidence.kind, "low"
        ),
        summary=summaries.get(evidence.kind, "no known cause fits: ratios, advantages and layers are calm"),
        evidence=dict(evidence.details),
    )


def _exp(log_value: float) -> float:
    try:
        return math.exp(log_value)
    except OverflowError:
        return math.inf
