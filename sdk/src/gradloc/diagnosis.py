"""Diagnosis: from measured evidence to causes, most trustworthy first. Pure; knows no tensor.

Names follow the literature on RL with verifiable rewards: token-level and sequence-level mismatch
between training and inference (types A.1, A.2), gradients that explode in some layers only (type B).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from gradloc.layers import block_index, block_of, kind_of
from gradloc_proto.messages import Cause

LOG_RATIO_MISMATCH = math.log(5.0)  # TokenClip's upper bound: what it would have clipped
LOG_RATIO_CERTAIN = math.log(20.0)  # a truthful logp gets here once in twenty tokens at most
LOG_RATIO_CALM = math.log(2.0)
SEQUENCE_LOG_RATIO_MISMATCH = math.log(2.0)
BIAS_LOG_RATIO = 0.1  # median over the batch: not a token, a setting (mask, positions, weights)
SHARPNESS = 1.2  # log-odds of all tokens larger or smaller by so much: another temperature
ROW_SCALE_MATERIAL = 3.0  # all tokens of a row count so many times the usual
ROW_SCALE_AGREES = 2.0  # factor between that and the ratio of the whole sequence
SPREAD_LOG_RATIO = math.log(1.5)  # a quarter of all tokens off by so much: the policy moved as a whole
RATE_MATERIAL = 5.0  # of the learning rate over the usual one
REWARD_FELL = 0.6  # of the usual reward
REWARD_FELL_FAR = 0.4
ADVANTAGE_OUTLIER = 8.0  # times the batch's median; a group of 64 cannot exceed 7.9 by normalising
ADVANTAGE_CERTAIN = 50.0
COEFFICIENT_OUTLIER = 10.0
RARE_LOGP = math.log(1e-3)
GROWTH_MATERIAL = 4.0
HETEROGENEITY = 8.0  # weakest exploding block against the strongest calm one
RESIDUAL_COLLAPSE = 0.1  # rms at the position against the batch's median
UNNORMALISED = 0.5  # |c| against |advantage * ratio| per token: a mean over tokens would divide by their number


@dataclass(frozen=True)
class LayerGrowth:
    """Growth of each layer key and block over its healthy norm, and which of them explode."""

    by_key: dict[str, float]
    keys_exploding: tuple[str, ...]
    blocks_exploding: tuple[str, ...]
    kinds_exploding: tuple[str, ...]
    growth_exploding_min: float | None
    growth_calm_max: float | None

    @property
    def is_heterogeneous(self) -> bool:
        """Some transformer blocks explode while others stay calm."""
        if self.growth_exploding_min is None or self.growth_calm_max is None:
            return False
        return self.growth_exploding_min >= HETEROGENEITY * self.growth_calm_max


@dataclass(frozen=True)
class Evidence:
    """What was measured about the step and its leading token. None: not known."""

    norm: float
    limit: float
    kind: str  # what the search ended with: token, sequence, batch-wide, ...
    num_culprits: int
    growth: LayerGrowth
    log_ratio: float | None = None
    sequence_log_ratio: float | None = None
    largest_token_log_ratio_in_sequence: float | None = None
    median_log_ratio: float | None = None
    log_ratio_spread: float | None = None
    coefficient: float | None = None
    median_coefficient: float | None = None
    logp: float | None = None
    advantage: float | None = None
    median_advantage: float | None = None
    coefficient_over_advantage: float | None = None
    in_mask: bool = True
    residual_rms_ratio: float | None = None
    residual_block: str | None = None
    row_scale: float | None = None
    num_other_ids: int = 0
    first_other_id: int | None = None
    other_ids_same_text: bool | None = None
    sharpness: float | None = None
    sharpness_scatter: float | None = None
    odd_rank: int | None = None
    odd_rank_norm: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    metrics_usual: Mapping[str, float] = field(default_factory=dict)
    details: dict[str, float | str | None] = field(default_factory=dict)


def layer_growth(now: Mapping[str, float], healthy: Mapping[str, float]) -> LayerGrowth:
    """Compare layer norms with healthy ones. Exploding: at least GROWTH_MATERIAL, and nearer (on a log scale) to the
    worst layer than to healthy."""
    by_key = {key: _ratio(now[key], healthy[key]) for key in now if key in healthy}
    if not by_key:
        return LayerGrowth({}, (), (), (), None, None)
    blocks: dict[str, tuple[float, float]] = {}
    for key in by_key:
        square_now, square_healthy = blocks.get(block_of(key), (0.0, 0.0))
        blocks[block_of(key)] = (square_now + now[key] ** 2, square_healthy + healthy[key] ** 2)
    by_block = {name: math.sqrt(_ratio(*squares)) for name, squares in blocks.items()}
    bar = max(GROWTH_MATERIAL, math.sqrt(max(by_block.values())))
    exploding = [name for name, growth in by_block.items() if growth >= bar]
    numbered = {name: growth for name, growth in by_block.items() if block_index(name) is not None}
    hot = [growth for name, growth in numbered.items() if name in exploding]
    calm = [growth for name, growth in numbered.items() if name not in exploding]
    kinds = {kind_of(key) for key, growth in by_key.items() if block_of(key) in exploding and growth >= GROWTH_MATERIAL}
    return LayerGrowth(
        by_key=by_key,
        keys_exploding=tuple(key for key, growth in by_key.items() if growth >= bar),
        blocks_exploding=tuple(sorted(exploding, key=_block_order)),
        kinds_exploding=tuple(sorted(kinds)),
        growth_exploding_min=min(hot) if hot else None,
        growth_calm_max=max(calm) if calm else None,
    )


def _ratio(now: float, healthy: float) -> float:
    if healthy > 0:
        return now / healthy
    return math.inf if now > 0 else 1.0


def _block_order(name: str) -> tuple[int, str]:
    index = block_index(name)
    return (-1 if name == "embedding" else 1 << 30 if index is None else index, name)


def diagnose(evidence: Evidence) -> tuple[Cause, ...]:
    """Causes with the numbers they rest on, high confidence first; never empty."""
    found = [
        cause
        for cause in (
            _hardware(evidence),
            _mask_fault(evidence),
            _learning_rate(evidence),
            _other_temperature(evidence),
            _layer_heterogeneity(evidence),
            _other_ids(evidence),
            _token_mismatch(evidence),
            _advantage_outlier(evidence),
            _sequence_mismatch(evidence),
            _batch_bias(evidence),
            _unnormalised_loss(evidence),
            _reward_drop(evidence),
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


def _is_calm(evidence: Evidence) -> bool:
    return evidence.log_ratio is None or abs(evidence.log_ratio) <= LOG_RATIO_CALM


def _layer_heterogeneity(evidence: Evidence) -> Cause | None:
    growth = evidence.growth
    if not growth.is_heterogeneous:
        return None
    collapsed = evidence.residual_rms_ratio is not None and evidence.residual_rms_ratio <= RESIDUAL_COLLAPSE
    confidence = "high" if collapsed else ("medium" if _is_calm(evidence) else "low")
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
    return Cause(
        name="token-mismatch",
        confidence="high" if size >= LOG_RATIO_CERTAIN else "medium",
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
    if not evidence.num_other_ids or evidence.num_culprits == 0 or _is_calm(evidence):
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


def _other_temperature(evidence: Evidence) -> Cause | None:
    slope, scatter = evidence.sharpness, evidence.sharpness_scatter
    if slope is None or scatter is None or not slope > 0 or not abs(math.log(slope)) >= math.log(SHARPNESS):
        return None
    # A copy that is merely inexact scatters around a quotient of one.
    if not scatter <= abs(math.log(slope)):
        return None
    return Cause(
        name="systematic-mismatch",
        confidence="high",
        summary=f"reported log-probabilities are those of temperature {1 / slope:.2g} times the trainer's, of all "
        "tokens: let the sampler report them at the temperature it samples with",
        evidence={"temperature": 1 / slope, "scatter": scatter, "median_log_ratio": evidence.median_log_ratio},
    )


def _hardware(evidence: Evidence) -> Cause | None:
    if evidence.kind != "not-reproduced" or evidence.odd_rank is None or evidence.odd_rank_norm is None:
        return None
    return Cause(
        name="hardware",
        confidence="high",
        summary=f"rank {evidence.odd_rank} holds another gradient (norm {evidence.odd_rank_norm:.3g}) than its peers "
        "and the replay: its memory or arithmetic failed; take the machine out and test it",
        evidence={
            "rank": float(evidence.odd_rank),
            "rank_norm": evidence.odd_rank_norm,
            "replayed_norm": evidence.norm,
        },
    )


def _learning_rate(evidence: Evidence) -> Cause | None:
    now, usual = evidence.metrics.get("lr"), evidence.metrics_usual.get("lr")
    if now is None or usual is None or not usual > 0 or not now >= RATE_MATERIAL * usual:
        return None
    spread = evidence.log_ratio_spread
    if evidence.kind != "batch-wide" and not (
        evidence.kind in ("token", "sequence") and spread is not None and spread >= SPREAD_LOG_RATIO
    ):
        return None  # one token out of line in a batch that is not: the rate did not do that
    return Cause(
        name="learning-rate",
        confidence="high",
        summary=f"the learning rate is {now:.2g}, {now / usual:.3g} times the usual {usual:.2g}: updates overshoot; "
        "set it back and go on from a checkpoint of before",
        evidence={"lr": now, "lr_usual": usual, "log_ratio_spread": spread},
    )


def _reward_drop(evidence: Evidence) -> Cause | None:
    now, usual = evidence.metrics.get("reward_mean"), evidence.metrics_usual.get("reward_mean")
    if now is None or usual is None or not usual > 0 or evidence.kind != "batch-wide" or not now <= REWARD_FELL * usual:
        return None
    return Cause(
        name="reward-drop",
        confidence="high" if now <= REWARD_FELL_FAR * usual else "medium",
        summary=f"the mean reward is {now:.2g} where {usual:.2g} was usual, and no token is out of line: look at the "
        "verifier and the solutions it compares with",
        evidence={"reward_mean": now, "reward_mean_usual": usual},
    )


def _batch_bias(evidence: Evidence) -> Cause | None:
    if evidence.median_log_ratio is None or not abs(evidence.median_log_ratio) >= BIAS_LOG_RATIO:
        return None
    return Cause(
        name="systematic-mismatch",
        confidence="high" if evidence.kind == "batch-wide" else "low",
        summary="logps of trainer and inference differ over the whole batch: temperature, mask, positions or weights",
        evidence={"median_log_ratio": evidence.median_log_ratio},
    )


def _unnormalised_loss(evidence: Evidence) -> Cause | None:
    size = evidence.coefficient_over_advantage
    if size is None or not size >= UNNORMALISED or evidence.kind not in ("batch-wide", "accounting"):
        return None
    return Cause(
        name="unnormalised-loss",
        confidence="medium",
        summary="each token counts by its whole advantage: the loss was not divided by the number of tokens",
        evidence={"coefficient_over_advantage": size},
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
        "inconclusive": "the numbers did not add up well enough to blame anyone",
    }
    return Cause(
        name="unknown" if evidence.kind not in summaries else evidence.kind,
        confidence="low" if evidence.kind not in ("accounting", "not-reproduced") else "medium",
        summary=summaries.get(evidence.kind, "no known cause fits: ratios, advantages and layers are calm"),
        evidence=dict(evidence.details),
    )


def _exp(log_value: float) -> float:
    try:
        return math.exp(log_value)
    except OverflowError:
        return math.inf
