"""The second counterfactual: what the step would have been had some tokens left the loss, not only its gradient.

Masking c_S = 0 leaves the others' coefficients as they were. Where a row counts by the ratio of the whole
sequence, a token that leaves takes its part of that ratio along, and the others' coefficients change by orders of
magnitude. What the ratio means is read off the batch: with c_i = -w A_i / M, w is the token's own ratio, or
the product (or the geometric mean) of its row's, and M is one number for the batch or the row's own length.
Knows no limit.
Shapes: B rows, R positions with a logp.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gradloc.policy import PlacedBatch
from gradloc.verification import Place
from gradloc.whatif import log_ratio

Kind = Literal["token", "sequence-product", "sequence-mean"]
CLEAR = 0.5  # the best reading of the ratio against the next best: residuals at most this part
COUNTS = 0.05  # M is the number of tokens to within this much, relative
NUM_ORIGINS_MAX = 4
LOG_USUAL = math.log(2.0)  # of a row's remaining ratio: it counts as usual again
_KINDS: tuple[Kind, ...] = ("token", "sequence-product", "sequence-mean")


@dataclass(frozen=True)
class Reading:
    """What a coefficient is made of. `by_row`: divided by its row's length; `counts`: by the number of tokens."""

    kind: Kind
    by_row: bool
    counts: bool

    @property
    def is_of_sequences(self) -> bool:
        return self.kind != "token"


def reading_of(batches: Sequence[PlacedBatch], coefficients: Sequence[Tensor]) -> Reading | None:
    """How this loss weighs its tokens; None where ratios or advantages are not known, or no reading stands out."""
    sizes, weights, lengths = [], {kind: [] for kind in _KINDS}, []  # type: ignore[var-annotated]
    for placed, coefficient_BR in zip(batches, coefficients, strict=True):
        ratios_BR, advantage_BR = log_ratio(placed), placed.batch.advantage_BR
        if ratios_BR is None or advantage_BR is None:
            return None
        mask_BR = placed.batch.mask_BR.bool()
        used_BR = mask_BR & (coefficient_BR != 0) & (advantage_BR != 0) & torch.isfinite(coefficient_BR)
        used_BR &= torch.isfinite(ratios_BR)
        sizes.append((coefficient_BR / advantage_BR.double()).abs().log()[used_BR])
        lengths.append(mask_BR.sum(dim=1, keepdim=True).expand_as(mask_BR)[used_BR].double())
        for kind in _KINDS:
            weights[kind].append(_weight(kind, ratios_BR, mask_BR)[used_BR])
    size_N, length_N = torch.cat(sizes), torch.cat(lengths)
    if not len(size_N):
        return None
    found = []
    for kind in _KINDS:
        for by_row in (False, True):
            rest_N = size_N - torch.cat(weights[kind]) + (length_N.log() if by_row else 0.0)
            middle = float(rest_N.median())
            num = len(size_N)
            counts = by_row or abs(middle + math.log(num)) <= COUNTS
            found.append((float((rest_N - middle).abs().mean()), Reading(kind, by_row, counts)))
    found.sort(key=lambda entry: entry[0])
    # Rows of equal length fit both ways alike: then it makes no difference either.
    rivals = [spread for spread, reading in found[1:] if reading.kind != found[0][1].kind]
    return found[0][1] if found[0][0] <= CLEAR * rivals[0] else None


def relossed(
    batches: Sequence[PlacedBatch], coefficients: Sequence[Tensor], places: Iterable[Place], reading: Reading
) -> list[Tensor]:
    """Coefficients of the loss without these tokens."""
    changed = [coefficient.clone() for coefficient in coefficients]
    gone = sorted(set(places))
    total = sum(int((placed.batch.mask_BR.bool()).sum()) for placed in batches)
    for batch, row in sorted({place[:2] for place in gone}):
        columns = [place.column for place in gone if place[:2] == (batch, row)]
        ratios_BR = log_ratio(batches[batch])
        assert ratios_BR is not None
        before_R = batches[batch].batch.mask_BR[row : row + 1].bool()
        after_R = before_R.clone()
        after_R[0, columns] = False
        own_R = ratios_BR[row : row + 1]
        change_R = _weight(reading.kind, own_R, after_R) - _weight(reading.kind, own_R, before_R)
        scale_R = change_R[0].clamp(-700, 700).exp()
        if reading.by_row:
            scale_R = scale_R * (int(before_R.sum()) / max(1, int(after_R.sum())))
        changed[batch][row] = changed[batch][row] * scale_R
        changed[batch][row, columns] = 0.0
    if reading.counts and not reading.by_row and len(gone) < total:
        changed = [coefficient * (total / (total - len(gone))) for coefficient in changed]
    return changed


def origins_of(batches: Sequence[PlacedBatch], row: tuple[int, int], reading: Reading) -> tuple[Place, ...]:
    """The few tokens whose ratios make that of their row; none where it takes many, or each token has its own."""
    ratios_BR = log_ratio(batches[row[0]])
    if not reading.is_of_sequences or ratios_BR is None:
        return ()
    mask_R = batches[row[0]].batch.mask_BR[row[1]].bool()
    own_R = torch.where(mask_R, ratios_BR[row[1]], 0.0)
    scale = float(mask_R.sum()) if reading.kind == "sequence-mean" else 1.0
    left = float(own_R.sum())
    gone: list[Place] = []
    for column in own_R.argsort(descending=True).tolist()[:NUM_ORIGINS_MAX]:
        if left / scale <= LOG_USUAL:
            break
        gone.append(Place(*row, column))
        left -= float(own_R[column])
    return tuple(gone) if left / scale <= LOG_USUAL else ()


def _weight(kind: Kind, log_ratio_BR: Tensor, mask_BR: Tensor) -> Tensor:
    """log w of each token, float64 [B, R]."""
    if kind == "token":
        return log_ratio_BR
    total_B1 = torch.where(mask_BR, log_ratio_BR, 0.0).sum(dim=1, keepdim=True)
    if kind == "sequence-mean":
        total_B1 = total_B1 / mask_BR.sum(dim=1, keepdim=True).clamp(min=1)
    return total_B1.expand_as(log_ratio_BR)
