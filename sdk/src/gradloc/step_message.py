"""The step as a message: what all ranks agreed on, in the words of gradloc_proto. Pure."""

import math
from typing import Any

from gradloc.agreement import METRICS, CommonView
from gradloc_proto.messages import Decision, StepObserved, TokenRef

_EXP_ARGUMENT_MAX = 709.0  # exp of more is infinite in float64


def step_message(
    view: CommonView,
    *,
    run_id: str,
    attempt: int,
    step: int,
    ts: float,
    step_s: float,
    stall_s: float,
    decision: Decision,
    rules_hit: tuple[str, ...],
    snapshot: str | None,
    num_events_dropped: int,
    layers_remedied: float | None = None,
) -> StepObserved:
    """StepObserved of one step; ratios are exp of the extremes of log ratios over ranks."""
    metrics: dict[str, Any] = {name: view.mean(name) for name in METRICS}
    zero_variance = metrics.pop("num_zero_variance_groups")
    has_tokens = view.num_tokens > 0
    return StepObserved(
        run_id=run_id,
        attempt=attempt,
        ts=ts,
        step=step,
        grad_norm=view.norm,
        layer_norms=view.layer_norms,
        num_tokens=view.num_tokens,
        energy=view.total("energy") if has_tokens else None,
        coefficient_abs_max=view.ranks[view.worst_rank()]["coefficient_abs_max"] if has_tokens else None,
        coefficient_abs_max_at=_place(view) if has_tokens else None,
        ratio_max=_exp(view.extreme("log_ratio_max", 1)),
        ratio_min=_exp(view.extreme("log_ratio_min", -1)),
        sequence_ratio_max=_exp(view.extreme("sequence_log_ratio_max", 1)),
        num_zero_variance_groups=_count(zero_variance, len(view.ranks)),
        step_s=step_s,
        stall_s=stall_s,
        decision=decision,
        rules_hit=rules_hit,
        limit=view.limits.norm,
        limits_version=view.limits.version,
        snapshot=snapshot,
        num_events_dropped=num_events_dropped,
        layers_remedied=layers_remedied,
        **metrics,
    )


def _place(view: CommonView) -> TokenRef | None:
    rank = view.worst_rank()
    worst = view.ranks[rank]
    if math.isnan(worst["token"]):
        return None
    return TokenRef(
        rank=rank,
        micro_batch=int(worst["micro_batch"]),
        sequence=int(worst["sequence"]),
        token=int(worst["token"]),
    )


def _count(mean_over_ranks: float | None, num_ranks: int) -> int | None:
    if mean_over_ranks is None or not math.isfinite(mean_over_ranks):
        return None
    return max(0, round(mean_over_ranks * num_ranks))


def _exp(log_ratio: float | None) -> float | None:
    if log_ratio is None:
        return None
    return math.exp(log_ratio) if log_ratio < _EXP_ARGUMENT_MAX else math.inf
