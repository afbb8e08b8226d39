"""Causes that are no token's in particular: of all tokens, of the loss, of the run, of a machine. Pure; knows no
tensor. Each gives None where the evidence does not carry it.
"""

import math

from gradloc.measured import Evidence
from gradloc_proto.messages import Cause

BIAS_LOG_RATIO = 0.1  # median over the batch: not a token, a setting (mask, positions, weights)
SHARPNESS = 1.2  # log-odds of all tokens larger or smaller by so much: another temperature
SPREAD_LOG_RATIO = math.log(1.5)  # a quarter of all tokens off by so much: the policy moved as a whole
FRESH_TOLERANCE = {"old": 0.02, "rollout": 0.05}  # mean |log ratio| before any update: same engine, another engine
RATE_MATERIAL = 5.0  # of the learning rate over the usual one
REWARD_FELL = 0.6  # of the usual reward
REWARD_FELL_FAR = 0.4
UNNORMALISED = 0.5  # |c| against |advantage * ratio| per token: a mean over tokens would divide by their number
REST_DOMINATES = 0.5  # of the norm²
LONE_CALM = 2.0  # the others' growth where one layer takes over


def hardware(evidence: Evidence) -> Cause | None:
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


def learning_rate(evidence: Evidence) -> Cause | None:
    now, usual = evidence.metrics.get("lr"), evidence.metrics_usual.get("lr")
    if now is None or usual is None or not moved_by_its_rate(evidence):
        return None
    spread = evidence.log_ratio_spread
    everywhere = evidence.kind == "batch-wide" or (spread is not None and spread >= SPREAD_LOG_RATIO)
    if not everywhere and evidence.kind not in ("token", "sequence"):
        return None
    also = "" if everywhere else "; the ratio of the leading token may be no more than that"
    return Cause(
        name="learning-rate",
        confidence="high" if everywhere else "medium",
        summary=f"the learning rate is {now:.2g}, {now / usual:.3g} times the usual {usual:.2g}: updates overshoot"
        f"{also}; set it back and go on from a checkpoint of before",
        evidence={
            "lr": now,
            "lr_usual": usual,
            "log_ratio_spread": spread,
            "mean_log_ratio": evidence.mean_log_ratio,
        },
    )


def moved_by_its_rate(evidence: Evidence) -> bool:
    """Whether the learning rate has jumped and the policy has left its copy, or left it unwatched.

    Before it has, nothing at this step is the rate's doing: it acts from the next one on.
    """
    now, usual = evidence.metrics.get("lr"), evidence.metrics_usual.get("lr")
    if now is None or usual is None or not usual > 0 or not now >= RATE_MATERIAL * usual:
        return False
    mean, spread = evidence.mean_log_ratio, evidence.log_ratio_spread
    if mean is None and spread is None:
        return True
    return (mean or 0.0) > FRESH_TOLERANCE["rollout"] or (spread or 0.0) >= SPREAD_LOG_RATIO


def other_temperature(evidence: Evidence) -> Cause | None:
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


def batch_bias(evidence: Evidence) -> Cause | None:
    if evidence.median_log_ratio is None or not abs(evidence.median_log_ratio) >= BIAS_LOG_RATIO:
        return None
    return Cause(
        name="systematic-mismatch",
        confidence="high" if evidence.kind == "batch-wide" else "low",
        summary="logps of trainer and inference differ over the whole batch: temperature, mask, positions or weights",
        evidence={"median_log_ratio": evidence.median_log_ratio},
    )


def unnormalised_loss(evidence: Evidence) -> Cause | None:
    size = evidence.coefficient_over_advantage
    if size is None or not size >= UNNORMALISED or evidence.kind not in ("batch-wide", "accounting"):
        return None
    return Cause(
        name="unnormalised-loss",
        confidence="medium",
        summary="each token counts by its whole advantage: the loss was not divided by the number of tokens",
        evidence={"coefficient_over_advantage": size},
    )


def reward_drop(evidence: Evidence) -> Cause | None:
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


def ratio_before_update(evidence: Evidence) -> Cause | None:
    """Ratios that are off while nothing is being learnt: then policy and copy see different inputs."""
    if evidence.metrics.get("lr") != 0.0:
        return None
    for name, size in (("old", evidence.mean_old_log_ratio), ("rollout", evidence.mean_log_ratio)):
        if size is not None and size > FRESH_TOLERANCE[name]:
            return Cause(
                name="ratio-before-update",
                confidence="high",
                summary=f"mean |log ratio| to {name} logp is {size:.3g} at a learning rate of 0: mask, position_ids or "
                "padding differ between the two",
                evidence={"mean_log_ratio": size, "lr": 0.0},
            )
    return None


def rest_dominated(evidence: Evidence) -> Cause | None:
    """Most of the gradient is no token's: no search among tokens can find it."""
    share = evidence.rest_share
    if share is None or not share >= REST_DOMINATES or evidence.kind != "accounting":
        return None
    return Cause(
        name="rest-dominated",
        confidence="high",
        summary=f"{100 * share:.3g} % of the norm² belongs to no token: an auxiliary loss (of experts, of a value "
        "head), weight decay in the loss, or a gradient from elsewhere",
        evidence={"rest_share": share},
    )


def zero_variance(evidence: Evidence) -> Cause | None:
    """Answers of equal reward teach nothing; where that is true of all groups, the gradient vanishes."""
    if evidence.largest_advantage != 0.0 or evidence.kind != "batch-wide":
        return None
    return Cause(
        name="zero-variance-groups",
        confidence="high",
        summary="every advantage is zero: in each group all answers got one reward; look at the verifier, or at how "
        "hard the prompts are",
        evidence={"largest_advantage": 0.0},
    )


def lone_layer(evidence: Evidence) -> Cause | None:
    """Embedding, head or last norm grew and no block did: a part of the model learns by itself."""
    growth = evidence.growth
    calm = growth.growth_calm_max
    if not growth.blocks_exploding or growth.growth_exploding_min is not None or calm is None or not calm <= LONE_CALM:
        return None
    grown = {key: growth.by_key[key] for key in growth.keys_exploding}
    names = ", ".join(growth.blocks_exploding)
    return Cause(
        name="layer-growth",
        confidence="medium" if evidence.is_calm else "low",
        summary=f"{names} grew {max(grown.values(), default=math.nan):.3g} times over its usual norm while no block "
        "did: look at its learning rate, weight decay and tied weights"[:512],
        evidence={"growth_max": max(grown.values(), default=math.nan), "growth_calm_max": calm},
    )
