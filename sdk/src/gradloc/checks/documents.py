"""Checks of a layer on a JSON document: numbers of one step, as bug reports and loggers have them.

A document is an object of known names (see NAMES below and docs/checks.md); NaN, Infinity and null are
understood. For snapshots and bundles see `sources`.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradloc.checks import advantages, gradients, losses, optimizer_state, ratios, rewards, row_lists, token_count
from gradloc.checks.finding import CheckFinding, Report, Skipped, finding, joined
from gradloc.checks.row_text import ids_of, number_of, numbers_of
from gradloc.common_causes import FRESH_TOLERANCE
from gradloc.diagnosis import LOG_RATIO_MISMATCH, SEQUENCE_LOG_RATIO_MISMATCH
from gradloc_proto.plain_text import visible

DOCUMENT_BYTES_MAX = 256 << 20
Document = Mapping[str, Any]


class DocumentRejected(ValueError):
    """A document that cannot be read or holds nothing that the layer's checks know."""


def read_document(path: Path) -> Document:
    """A JSON object from a file. Raises DocumentRejected."""
    try:
        if path.stat().st_size > DOCUMENT_BYTES_MAX:
            raise DocumentRejected(f"{path.name} is larger than {DOCUMENT_BYTES_MAX >> 20} MiB; expected one step")
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise DocumentRejected(f"cannot read {path}: {error.strerror}; give a file") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, DocumentRejected):
            raise
        raise DocumentRejected(f"{path.name} is not JSON: {str(error)[:80]}; expected an object") from None
    if not isinstance(document, dict):
        raise DocumentRejected(
            f"{path.name} is a JSON {type(document).__name__}; expected an object of named numbers "
            "(rows of data: one a line)"
        )
    return document


def check_document(layer: str, document: Document) -> Report:
    """Run the layer's checks on what the document holds. Raises DocumentRejected where that is nothing."""
    checks = _CHECKS.get(layer)
    if checks is None:
        raise DocumentRejected(f"no layer {layer!r}; expected one of {', '.join(_CHECKS)}")
    reports = [report for check in checks if (report := check(document)) is not None]
    if not reports:
        names = visible(", ".join(sorted(document)), 120)
        raise DocumentRejected(
            f"the document holds nothing that checks of {layer} know (names: {names}); see docs/checks.md for the names"
        )
    return joined(reports)


def _report(findings: Sequence[CheckFinding], *skipped: Skipped) -> Report:
    return Report(tuple(findings), skipped)


def _number(document: Document, *names: str) -> float | None:
    """The first of these names that is there; a value that is no number is NaN."""
    for name in names:
        if name in document:
            value = number_of(document[name])
            return math.nan if value is None else value
    return None


def _tensor(document: Document, *names: str) -> Tensor | None:
    """[B, R] float64 from a list (one row) or a list of lists, null as NaN. Raises DocumentRejected."""
    name = next((one for one in names if isinstance(document.get(one), list)), None)
    if name is None:
        return None
    given = document[name]
    rows = given if given and all(isinstance(one, list) for one in given) else [given]
    numbers = [numbers_of(row) for row in rows]
    if any(row is None for row in numbers) or len({len(row) for row in numbers if row is not None}) > 1:
        raise DocumentRejected(f"{name!r} is no list of numbers, nor rows of equal length")
    return torch.tensor(numbers, dtype=torch.float64)


def _layer_norms(document: Document, *names: str) -> dict[str, float] | None:
    for name in names:
        given = document.get(name)
        if isinstance(given, dict):
            values = {str(key): number_of(value) for key, value in given.items()}
            return {key: math.nan if value is None else value for key, value in values.items()}
    return None


# --- data -------------------------------------------------------------------------------------------


def _retokenization(document: Document) -> Report | None:
    sampled = ids_of(document.get("sampled_ids"))
    trained = ids_of(document.get("trained_ids"))
    if sampled is None or trained is None:
        return None
    texts = [document.get("sampled_text"), document.get("trained_text")]
    known = [("".join(map(str, one)) if isinstance(one, list) else one) for one in texts if one is not None]
    if sampled == trained:
        return _report(())
    if len(known) == 2 and known[0] != known[1]:
        at = next((i for i, (a, b) in enumerate(zip(sampled, trained, strict=False)) if a != b), 0)
        return _report([finding("data.mask-misaligned", "sampled and trained texts differ", {"token": at})])
    return _report([row_lists.retokenized(sampled, trained)])


# --- reward -----------------------------------------------------------------------------------------


def _rewards(document: Document) -> Report | None:
    given = document.get("rewards", document.get("reward"))
    if not isinstance(given, list):
        return None
    flat = [one for row in given for one in (row if isinstance(row, list) else [row])]
    groups = document.get("groups", document.get("uid"))
    if any(isinstance(row, list) for row in given):
        groups = [index for index, row in enumerate(given) for _ in (row if isinstance(row, list) else [row])]
    size = document.get("group_size")
    bounds = numbers_of(document.get("bounds"))
    try:
        return rewards.check_rewards(
            flat,
            groups=groups if isinstance(groups, list) else None,
            group_size=size if isinstance(size, int) else None,
            bounds=(bounds[0], bounds[1]) if bounds is not None and len(bounds) == 2 else None,
            lengths=numbers_of(document.get("lengths")),
            estimator=document.get("estimator"),
        )
    except ValueError as error:
        raise DocumentRejected(str(error)) from None


def _history(document: Document) -> Report | None:
    means = numbers_of(document.get("reward_means", document.get("reward_history")))
    if means is None:
        return None
    stds, accuracies = numbers_of(document.get("reward_stds")), numbers_of(document.get("accuracies"))
    return _report(rewards.check_history(means, stds, accuracies))


def _fixed_scores(document: Document) -> Report | None:
    before, now = numbers_of(document.get("scores_before")), numbers_of(document.get("scores_now"))
    return None if before is None or now is None else _report(rewards.check_fixed_scores(before, now))


# --- policy -----------------------------------------------------------------------------------------


def _tokens(document: Document) -> Report | None:
    logp_BR = _tensor(document, "logp", "trained_logp")
    if logp_BR is None:
        return None
    mask_BR = _tensor(document, "label_mask", "mask", "response_mask", "loss_mask")
    named = {
        "rollout_logp": _tensor(document, "rollout_logp", "rollout_log_probs", "sampling_logp"),
        "old_logp": _tensor(document, "old_logp", "old_log_probs"),
        "mask": mask_BR,
    }
    for name, tensor in named.items():
        if tensor is not None and tensor.shape != logp_BR.shape:
            raise DocumentRejected(
                f"{name} is {tuple(tensor.shape)}, logp {tuple(logp_BR.shape)}; expected equal shapes"
            )
    rate, updates = _number(document, "learning_rate", "lr"), _number(document, "num_updates")
    batch = ratios.TokenBatch(
        logp_BR,
        torch.ones_like(logp_BR, dtype=torch.bool) if mask_BR is None else mask_BR.nan_to_num(0.0) != 0,
        named["rollout_logp"],
        named["old_logp"],
    )
    norm = _number(document, "grad_norm")
    findings = ratios.check_tokens(
        batch, grad_norm=norm, fresh=rate == 0.0 or updates == 0.0, level=str(document.get("level", "token"))
    )
    no_reference = named["rollout_logp"] is None and named["old_logp"] is None
    skipped = [Skipped("importance ratios", "neither rollout_logp nor old_logp")] if no_reference else []
    if not bool(batch.trained_BR.any()):
        skipped.append(Skipped("all checks of tokens", "the mask leaves none, or there is none"))
    return _report(findings, *skipped)


def _drift(document: Document) -> Report | None:
    each, num = _number(document, "per_token_log_ratio"), _number(document, "num_tokens")
    if each is None or num is None or not num >= 1:
        return None
    total = each * num
    if abs(each) >= LOG_RATIO_MISMATCH:
        what = f"every token's log ratio is {each:.3g}"
        return _report([finding("policy.ratio-bias", what, mean_abs_log_ratio=abs(each))])
    if abs(total) < SEQUENCE_LOG_RATIO_MISMATCH:
        return _report(())
    return _report([ratios.sequence_finding("rollout", total, int(num), {"row": 0})])


def _fresh(document: Document) -> Report | None:
    mean = _number(document, "log_ratio_abs_mean", "mean_abs_log_ratio")
    if mean is None:
        return None
    rate, updates = _number(document, "learning_rate", "lr"), _number(document, "num_updates")
    if rate != 0.0 and updates != 0.0:
        return _report((), Skipped("ratio before any update", "neither learning_rate nor num_updates is 0"))
    kind = "old" if document.get("reference") == "old" else "rollout"
    off = not mean <= FRESH_TOLERANCE[kind]
    return _report([ratios.fresh_finding(kind, mean)] if off else ())


def _temperature(document: Document) -> Report | None:
    rollout = _number(document, "temperature", "rollout_temperature")
    if rollout is None or "logp" in document:
        return None
    trained = _number(document, "trained_temperature", "train_temperature")
    used = 1.0 if trained is None else trained
    if rollout == used:
        return _report(())
    what = f"rollout at {rollout:g}, training at {used:g}: a bias over the whole batch, not a culprit token"
    return _report([finding("policy.temperature", what, rollout=rollout, trained=used)])


def _loss(document: Document) -> Report | None:
    reports: list[CheckFinding] = []
    known = False
    parts = _layer_norms(document, "loss_parts", "parts")
    if parts is not None:
        known = True
        reports += losses.check_loss_parts(parts, _number(document, "loss"), main=str(document.get("main", "policy")))
    elif (loss := _number(document, "loss")) is not None:
        known = True
        reports += losses.check_loss_parts({"loss": loss})
    if (kl := _number(document, "kl")) is not None:
        known = True
        reports += losses.check_kl(kl, estimator=str(document.get("kl_estimator", "k3")))
    if (entropy := _number(document, "entropy")) is not None:
        known = True
        size = _number(document, "vocabulary_size", "vocab_size")
        reports += losses.check_entropy(entropy, None if size is None or not size >= 1 else int(size))
    ranges = [_number(document, name) for name in ("clip_range", "clip_fraction", "clip_range_high")]
    if any(one is not None for one in ranges):
        known = True
        reports += losses.check_clipping(ranges[0], ranges[1], clip_range_high=ranges[2])
    coefficient, reward_std, kl_std = (_number(document, n) for n in ("kl_coef", "reward_std", "kl_std"))
    if coefficient is not None and reward_std is not None and kl_std is not None:
        known = True
        if reward_std > 0 and kl_std > 0:
            reports += losses.check_kl_coefficient(coefficient, reward_std, kl_std)
    return _report(reports) if known else None


def _advantages(document: Document) -> Report | None:
    given = document.get("advantages")
    if not isinstance(given, list) or any(isinstance(one, list) for one in given):
        return None
    numbers = numbers_of(given)
    if numbers is None:
        raise DocumentRejected("'advantages' is no list of numbers")
    groups = document.get("groups", document.get("uid"))
    size = document.get("group_size")
    try:
        return _report(
            advantages.check_advantages(
                numbers,
                groups=groups if isinstance(groups, list) else None,
                group_size=size if isinstance(size, int) else None,
                estimator=str(document.get("estimator", "group")),
            )
        )
    except ValueError as error:
        raise DocumentRejected(str(error)) from None


def _token_count(document: Document) -> Report | None:
    reported = _number(document, "num_valid_tokens_reported", "num_valid_tokens")
    if reported is None:
        return None
    return _report(token_count.check_token_count(reported, _number(document, "num_tokens_counted")))


# --- gradient, optimizer ----------------------------------------------------------------------------


def _layers(document: Document) -> Report | None:
    now = _layer_norms(document, "layer_norms_now", "layer_norms")
    if now is None:
        return None
    healthy = _layer_norms(document, "layer_norms_healthy", "healthy_layer_norms")
    skipped = [] if healthy else [Skipped("growth of layers", "no layer_norms_healthy")]
    return _report(gradients.check_layers(now, healthy), *skipped)


def _norms(document: Document) -> Report | None:
    history = numbers_of(document.get("grad_norms", document.get("grad_norm_history")))
    if history is not None:
        return _report(gradients.check_norms(history))
    norm = _number(document, "grad_norm")
    return None if norm is None else _report(gradients.check_norms([norm]))


def _coefficients(document: Document) -> Report | None:
    coefficient = _tensor(document, "coefficient", "coefficients")
    if coefficient is None:
        return None
    mask = _tensor(document, "label_mask", "mask")
    return _report(gradients.check_coefficients(coefficient, None if mask is None else mask.bool()))


def _rates(document: Document) -> Report | None:
    history = numbers_of(document.get("learning_rates", document.get("lr_history")))
    if history is not None:
        return _report(optimizer_state.check_lr_history(history))
    rate = _number(document, "learning_rate", "lr")
    return None if rate is None else _report(optimizer_state.check_lr(rate))


_CHECKS: dict[str, tuple[Callable[[Document], Report | None], ...]] = {
    "data": (_retokenization,),
    "reward": (_rewards, _history, _fixed_scores),
    "policy": (_tokens, _drift, _fresh, _temperature, _loss, _advantages, _token_count),
    "gradient": (_layers, _norms, _coefficients),
    "optimizer": (_rates,),
    "accounting": (_token_count,),
}
DOCUMENT_LAYERS = tuple(_CHECKS)
