"""Checks of importance ratios: tokens, sequences, whole batch, before any update; masks that hide a NaN.

Part of the policy layer. All in logarithms and float64, so that a ratio of e^89 is a number. A token is
blamed only where its own ratio stands out of its batch. Shapes: B rows, R positions.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gradloc.checks.finding import CheckFinding, Tally, finding
from gradloc.common_causes import FRESH_TOLERANCE
from gradloc.diagnosis import LOG_RATIO_CERTAIN, LOG_RATIO_MISMATCH, SEQUENCE_LOG_RATIO_MISMATCH

BIASED = 0.1  # |log ratio| of a token that differs by more than number formats make it
BIASED_SHARE = 0.3  # of the tokens: then it is a setting, not a token
BIAS_TOKENS_MIN = 8
NOISE_FACTOR = 4.0  # a sum of n independent errors reaches this many of its deviations once in 16,000
LARGEST_LOG = 700.0  # exp() of more is infinite in float64


@dataclass(frozen=True)
class TokenBatch:
    """What a step knows of its tokens. reference: rollout or old logp; NaN where not known."""

    logp_BR: Tensor
    mask_BR: Tensor
    rollout_logp_BR: Tensor | None = None
    old_logp_BR: Tensor | None = None

    @property
    def trained_BR(self) -> Tensor:
        return self.mask_BR.bool()


def check_tokens(
    batch: TokenBatch,
    *,
    grad_norm: float | None = None,
    fresh: bool | None = None,
    level: str = "token",
) -> tuple[CheckFinding, ...]:
    """Check one batch. grad_norm: of its step, if known: decides whether a NaN behind the mask did harm.

    fresh: no update since the rollout (or a learning rate of 0). level: "sequence" where the loss uses
    sequence-level ratios (GSPO): then sums count even if they are only noise.
    """
    tally = Tally()
    for one in _values(batch, grad_norm):
        tally.add(one)
    for name, reference_BR in (("rollout", batch.rollout_logp_BR), ("old", batch.old_logp_BR)):
        if reference_BR is not None:
            for one in _ratios(batch, name, reference_BR, grad_norm, fresh, level):
                tally.add(one, name)
    return tally.findings()


def _values(batch: TokenBatch, grad_norm: float | None) -> list[CheckFinding]:
    """Log-probabilities by themselves."""
    found = []
    logp_BR, trained_BR = batch.logp_BR.double(), batch.trained_BR
    bad = trained_BR & ~torch.isfinite(logp_BR)
    if bool(bad.any()):
        where = _where(bad)
        found.append(finding("policy.logp-non-finite", "logp is not finite", where, num=int(bad.sum())))
    high = trained_BR & (logp_BR > 1e-3)
    if bool(high.any()):
        where = _where(high)
        value = float(logp_BR[high][0])
        found.append(finding("policy.logp-positive", f"logp is {value:.4g}", where, value=value, num=int(high.sum())))
    behind = ~trained_BR & ~_all_finite(batch)
    if bool(behind.any()):
        found.append(_behind_mask(behind, grad_norm))
    return found


def _all_finite(batch: TokenBatch) -> Tensor:
    """Where logp and all references, and the ratio in float32, are finite: bool [B, R]."""
    finite_BR = torch.isfinite(batch.logp_BR)
    for reference_BR in (batch.rollout_logp_BR, batch.old_logp_BR):
        if reference_BR is not None:
            finite_BR &= torch.isfinite(reference_BR)
    return finite_BR


def _behind_mask(behind_BR: Tensor, grad_norm: float | None) -> CheckFinding:
    where, num = _where(behind_BR), int(behind_BR.sum())
    if grad_norm is not None and not math.isfinite(grad_norm):
        what = "not finite behind the mask, and so is the gradient: zero times NaN is NaN"
        return finding("policy.mask-fault", what, where, num=num, grad_norm=grad_norm)
    known = "" if grad_norm is None else "; the gradient is finite, so nothing is harmed yet"
    return finding("policy.masked-non-finite", f"not finite behind the mask{known}", where, num=num)


def _ratios(
    batch: TokenBatch, name: str, reference_BR: Tensor, grad_norm: float | None, fresh: bool | None, level: str
) -> list[CheckFinding]:
    log_ratio_BR = batch.logp_BR.double() - reference_BR.double()
    trained_BR = batch.trained_BR
    usable_BR = trained_BR & torch.isfinite(log_ratio_BR)
    found = []
    overflow_BR = ~trained_BR & (log_ratio_BR > math.log(torch.finfo(torch.float32).max))
    if bool(overflow_BR.any()) and grad_norm is not None and not math.isfinite(grad_norm):
        what = "the ratio overflows behind the mask, and the gradient is not finite"
        found.append(finding("policy.mask-fault", what, _where(overflow_BR), grad_norm=grad_norm))
    broken_BR = trained_BR & torch.isfinite(batch.logp_BR) & ~torch.isfinite(reference_BR)
    if bool(broken_BR.any()):
        what = f"{name} logp is not finite"
        found.append(finding("policy.logp-non-finite", what, _where(broken_BR), num=int(broken_BR.sum())))
    values = log_ratio_BR[usable_BR]
    if not len(values):
        return found
    whole = _whole_batch(name, values, fresh)
    middle = float(values.median()) if whole else 0.0
    found += whole
    tokens = _tokens(name, log_ratio_BR - middle, usable_BR, certain=bool(whole))
    if not whole:
        found += tokens + _sequences(name, log_ratio_BR, usable_BR, level)
    return found


def _whole_batch(name: str, values: Tensor, fresh: bool | None) -> list[CheckFinding]:
    """A setting that is wrong moves many tokens; a token that is wrong moves one."""
    share = float((values.abs() > BIASED).double().mean())
    # Without the largest one: a single absurd token must not pass for a bias.
    rest = values.abs().sort().values[: max(1, len(values) - 1)] if len(values) > 1 else values.abs()
    mean_size = float(rest.mean())
    numbers = {"mean_abs_log_ratio": mean_size, "mean_log_ratio": float(values.mean()), "share_off": share}
    if fresh and mean_size > FRESH_TOLERANCE[name]:
        return [fresh_finding(name, mean_size)]
    if len(values) >= BIAS_TOKENS_MIN and share >= BIASED_SHARE and float(rest.median()) > BIASED / 10:
        what = f"{share:.0%} of {len(values)} tokens are off by more than {BIASED:.0%} against {name} logp"
        return [finding("policy.ratio-bias", what, None, None, **numbers)]
    return []


def fresh_finding(name: str, mean_size: float) -> CheckFinding:
    """Ratios are off though nothing was updated."""
    what = f"mean |log ratio| to {name} logp is {mean_size:.3g} before any update: mask, position_ids or padding"
    return finding("policy.ratio-before-update", what, mean_abs_log_ratio=mean_size)


def _tokens(name: str, log_ratio_BR: Tensor, usable_BR: Tensor, *, certain: bool) -> list[CheckFinding]:
    limit = LOG_RATIO_CERTAIN if certain else LOG_RATIO_MISMATCH
    off_BR = usable_BR & (log_ratio_BR.abs() >= limit)
    tally = Tally()
    for row, column in off_BR.nonzero().tolist():
        log_ratio = float(log_ratio_BR[row, column])
        text = f"{math.exp(log_ratio):.3g}" if abs(log_ratio) < LARGEST_LOG else f"e^{log_ratio:.4g}"
        single = "" if abs(log_ratio) < math.log(torch.finfo(torch.float32).max) else ", infinite in float32"
        what = f"importance ratio {text} to {name} logp{single}"
        tally.add(finding("policy.token-mismatch", what, {"row": row, "token": column}, log_ratio=log_ratio))
    return list(tally.findings())


def _sequences(name: str, log_ratio_BR: Tensor, usable_BR: Tensor, level: str) -> list[CheckFinding]:
    """Rows whose harmless tokens add up. Independent errors add up as their root; what exceeds that drifts."""
    tally = Tally()
    for row in range(len(log_ratio_BR)):
        values = log_ratio_BR[row][usable_BR[row]]
        if len(values) < 2 or float(values.abs().max()) >= LOG_RATIO_MISMATCH:
            continue
        total = float(values.sum())
        noise = float(values.std()) * math.sqrt(len(values))
        drifts = abs(total) > NOISE_FACTOR * noise or level == "sequence"
        if abs(total) >= SEQUENCE_LOG_RATIO_MISMATCH and drifts:
            tally.add(sequence_finding(name, total, len(values), {"row": row}, noise))
    return list(tally.findings())


def sequence_finding(
    name: str, total: float, num_tokens: int, where: dict[str, int | str], noise: float = 0.0
) -> CheckFinding:
    """Every token harmless, the product of their ratios not. total: sum of log ratios."""
    each = total / num_tokens
    ratio = math.exp(min(total, LARGEST_LOG))
    what = f"{num_tokens} tokens off by {math.expm1(each):.1%} each: sequence ratio {ratio:.3g} to {name} logp"
    return finding("policy.sequence-mismatch", what, where, ratio=ratio, log_ratio=total, per_token=each, noise=noise)


def _where(bad_BR: Tensor) -> dict[str, int | str]:
    row, column = bad_BR.nonzero()[0].tolist()
    return {"row": row, "token": column}
