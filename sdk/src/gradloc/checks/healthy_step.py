"""One step against a healthy one: loss, rewards, ratios and norms; passes only if all are back in range.

The last step of the guide's work flow: after a fix, one step with fixed seed and sample. A step is a JSON
document (loss, rewards, grad_norm, layer_norms) or a snapshot, whose step is then replayed twice with the
same seed, so that a step that does not repeat itself fails as well.
"""

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gradloc.checks.documents import read_document
from gradloc.checks.finding import Skipped
from gradloc.checks.row_text import number_of, numbers_of
from gradloc.policy import Meter, Policy, place
from gradloc.replay import coefficients_of, replay
from gradloc.snapshot import Snapshot, open_snapshot
from gradloc_proto.codec import plain_number

FACTOR = 4.0  # as the detector's limit over healthy
LOSS_FLOOR = 0.01  # on-policy GRPO has a loss of exactly 0, whose range would be empty
REPEATABLE = 1e-5  # relative difference of two replays of one step
LAYER_FLOOR = 1e-3  # of the whole norm: smaller layers are noise
MODELS_GROUP = "gradloc.models"
_SINGLE = ("loss", "reward_mean", "reward_std", "grad_norm")
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class StepNumbers:
    """What is compared; None or empty: not known. loss_scale: mean |advantage * ratio|, where the loss is centred."""

    loss: float | None = None
    loss_scale: float | None = None
    reward_mean: float | None = None
    reward_std: float | None = None
    grad_norm: float | None = None
    layer_norms: Mapping[str, float] = field(default_factory=dict)
    largest_log_ratio: float | None = None
    repeat_error: float | None = None


@dataclass(frozen=True)
class Comparison:
    """One number now, the range that a healthy step allows, and whether it is inside."""

    name: str
    now: float
    low: float
    high: float

    @property
    def is_back(self) -> bool:
        return self.low <= self.now <= self.high

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "now": plain_number(self.now),
            "low": plain_number(self.low),
            "high": plain_number(self.high),
            "is_back": self.is_back,
        }


def not_compared(now: StepNumbers, healthy: StepNumbers) -> tuple[Skipped, ...]:
    """Numbers that the healthy step lacks. One that only the healthy step has is compared: as NaN, out of range."""
    missing = [name for name in _SINGLE if getattr(healthy, name) is None]
    missing += [] if healthy.layer_norms else ["layer norms"]
    why = "the healthy step does not know it"
    return tuple(Skipped(name, why if _known(now, name) else "neither step knows it") for name in missing)


def _known(now: StepNumbers, name: str) -> bool:
    return bool(now.layer_norms) if name == "layer norms" else getattr(now, name) is not None


def compare(now: StepNumbers, healthy: StepNumbers) -> tuple[Comparison, ...]:
    """All numbers of the healthy step; one that the step lacks now is NaN, and so not back in range.

    Raises ValueError where they share none, or the healthy ones are not finite.
    """
    if not any(_known(now, name) and _known(healthy, name) for name in (*_SINGLE, "layer norms")):
        raise ValueError("the step and the healthy one share no number; expected loss, rewards or grad_norm in both")
    lost = {name: math.nan for name in _SINGLE if getattr(now, name) is None}
    now = replace(now, **lost)  # type: ignore[arg-type]
    made: list[Comparison] = []
    if now.loss is not None and healthy.loss is not None:
        size = max(abs(healthy.loss), healthy.loss_scale or 0.0, LOSS_FLOOR)
        made.append(Comparison("loss", now.loss, -FACTOR * size, FACTOR * size))
    if now.reward_mean is not None and healthy.reward_mean is not None:
        reach = FACTOR * max(healthy.reward_std or 0.0, 1e-6)
        made.append(
            Comparison("reward_mean", now.reward_mean, healthy.reward_mean - reach, healthy.reward_mean + reach)
        )
    if now.reward_std is not None and healthy.reward_std is not None:
        made.append(_factor("reward_std", now.reward_std, healthy.reward_std))
    if now.grad_norm is not None and healthy.grad_norm is not None:
        made.append(_factor("grad_norm", now.grad_norm, healthy.grad_norm))
    floor = LAYER_FLOOR * (healthy.grad_norm or 0.0)
    for name, usual in healthy.layer_norms.items():
        if not usual <= floor:
            # A layer may fall quiet in one step; what counts is that none explodes.
            made.append(Comparison(f"layer {name}", now.layer_norms.get(name, math.nan), 0.0, FACTOR * usual))
    if now.largest_log_ratio is not None:
        reach = max(math.log(5.0), healthy.largest_log_ratio or 0.0)
        made.append(Comparison("largest |log ratio|", now.largest_log_ratio, 0.0, reach))
    if now.repeat_error is not None:
        made.append(Comparison("difference of two replays", now.repeat_error, 0.0, REPEATABLE))
    bad = [one.name for one in made if not (math.isfinite(one.low) and math.isfinite(one.high))]
    if bad:
        raise ValueError(f"the healthy step's {bad[0]} is not finite; give one that is healthy")
    return tuple(made)


def _factor(name: str, now: float, healthy: float) -> Comparison:
    return Comparison(name, now, healthy / FACTOR, healthy * FACTOR)


def numbers_of_document(path: Path) -> StepNumbers:
    """From a JSON document. Raises DocumentRejected."""
    document = read_document(path)
    rewards = numbers_of(document.get("rewards"))
    layers = document.get("layer_norms", document.get("layer_norms_now"))
    return StepNumbers(
        loss=_optional(document, "loss"),
        reward_mean=_optional(document, "reward_mean") if rewards is None else statistics.fmean(rewards),
        reward_std=_optional(document, "reward_std") if rewards is None else _std(rewards),
        grad_norm=_optional(document, "grad_norm"),
        layer_norms={str(k): _value(v) for k, v in layers.items()} if isinstance(layers, dict) else {},
    )


def _std(values: list[float]) -> float:
    return statistics.pstdev(values) if all(map(math.isfinite, values)) else math.nan


def _optional(document: Mapping[str, Any], name: str) -> float | None:
    return _value(document[name]) if name in document else None


def _value(given: Any) -> float:
    value = number_of(given)
    return math.nan if value is None else value


def numbers_of_snapshot(snapshot: Snapshot, model: nn.Module, *, seed: int = 0) -> StepNumbers:
    """Replay the step twice with one seed. Raises ValueError for a batch that cannot be replayed."""
    manifest = snapshot.manifest
    parts = [(snapshot.micro_batches(part.rank), part.grad_factor) for part in manifest.parts]
    batches = place(parts)
    policy = Policy(
        model,
        Meter(sum(one.batch.ids_BT.numel() for one in batches)),
        autocast_dtype=_DTYPES.get(manifest.autocast_dtype or ""),
        head=manifest.head,
    )
    coefficients = coefficients_of(batches)
    torch.manual_seed(seed)
    first = replay(policy, batches, coefficients)
    torch.manual_seed(seed)
    again = replay(policy, batches, coefficients)
    weighted, sizes, largest = [], [], 0.0
    for placed, logp_BR in zip(batches, first.logp, strict=True):
        one = placed.batch
        used_BR = (one.mask_BR != 0) & torch.isfinite(logp_BR)
        for reference_BR in (one.rollout_logp_BR, one.old_logp_BR):
            if reference_BR is not None and bool(used_BR.any()):
                off = (logp_BR - reference_BR.double())[used_BR].abs()
                largest = max(largest, float(torch.nan_to_num(off, nan=math.inf).max()))
        if one.advantage_BR is not None:
            references = (one.old_logp_BR, one.rollout_logp_BR, one.logp_BR)
            reference = next(known for known in references if known is not None)
            term = (one.advantage_BR.double() * (logp_BR - reference.double()).exp())[used_BR]
            weighted.append(term)
            sizes.append(term.abs())
    known = bool(weighted)
    error = abs(first.gradient.norm - again.gradient.norm) / max(first.gradient.norm, 1e-30)
    return StepNumbers(
        loss=-float(torch.cat(weighted).mean()) if known else None,
        loss_scale=float(torch.cat(sizes).mean()) if known else None,
        reward_mean=manifest.metrics.get("reward_mean"),
        reward_std=manifest.metrics.get("reward_std"),
        grad_norm=first.gradient.norm,
        layer_norms=first.gradient.layer_norms,
        largest_log_ratio=largest,
        repeat_error=error,
    )


def healthy_of_snapshot(snapshot: Snapshot) -> StepNumbers:
    """What the snapshot itself says a healthy step is."""
    manifest = snapshot.manifest
    usual = manifest.metrics_usual
    return StepNumbers(
        reward_mean=usual.get("reward_mean"),
        reward_std=usual.get("reward_std"),
        grad_norm=manifest.healthy_norm,
        layer_norms=manifest.healthy_layer_norms,
    )


def build(snapshot: Snapshot) -> nn.Module:
    """The snapshot's model, by whatever installed distribution can rebuild one. Raises ValueError."""
    points = list(metadata.entry_points(group=MODELS_GROUP))
    if not points:
        raise ValueError("rebuilding a snapshot's model needs the localizer; pip install 'gradloc[local]'")
    builder: Callable[[Snapshot], nn.Module] = points[0].load()
    return builder(snapshot)


def numbers_at(source: str, model: Callable[[Snapshot], nn.Module] = build) -> tuple[StepNumbers, StepNumbers | None]:
    """Numbers of a document or snapshot, and what it says itself of a healthy step, if anything."""
    path = Path(source)
    if "://" not in source and path.is_file():
        return numbers_of_document(path), None
    snapshot = open_snapshot(source)
    own = healthy_of_snapshot(snapshot)
    return numbers_of_snapshot(snapshot, model(snapshot)), own if own.grad_norm is not None else None
