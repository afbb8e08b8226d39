"""What one rank saw of a step, and what all ranks conclude from it: the pure half of inline mode.

A rank testifies to its own tokens; every rank hears all testimonies and concludes the same. Knows no
tensor, no collective and no forward pass.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import Field

from gradloc.culprits import (
    CANCELLING,
    CANCELLING_PART,
    CONCENTRATED,
    GAP,
    NUM_CERTAIN,
    NUM_TOKENS_MAX,
    ROWS_FRACTION_MAX,
    fewest,
    target_share,
)
from gradloc_proto.messages import Culprit, SequenceView, Verdict
from gradloc_proto.parts import Evidence as EvidenceValue
from gradloc_proto.parts import Part

NUM_ROWS_MAX = 64  # of a rank, largest first
REST_MAX = 0.5  # a larger rest is no token's fault: a term that belongs to none, or a scale


class RowShare(Part):
    """Sum of shares of one row; `is_whole`: out of line as a whole, not by single tokens."""

    rank: int
    micro_batch: int
    sequence: int
    share: float
    is_whole: bool = False


class Testimony(Part):
    """One rank's part. `culprits`: its tokens of the largest |share|; `evidence` and `view` are of its first one."""

    failed: str = ""
    share_sum: float = 0.0
    share_sum_up: float = 0.0  # of the difference to one side, and to the other
    share_sum_down: float = 0.0
    culprits: tuple[Culprit, ...] = ()
    rows: tuple[RowShare, ...] = ()
    num_rows: int = 0
    evidence: dict[str, EvidenceValue] = Field(default_factory=dict)
    view: SequenceView | None = None
    non_finite: str = ""  # "coefficient" or "logp": what is not finite at `culprits`
    outside_mask: bool = True


@dataclass(frozen=True)
class Conclusion:
    """Verdict with its culprits (tokens, or the leading token of each row), all ranks alike."""

    verdict: Verdict
    culprits: tuple[Culprit, ...]
    share: float | None
    checksum: float
    num_culprits: int = 0
    num_tokens_lower_bound: int | None = None


def checksum_of(testimonies: Sequence[Testimony]) -> float:
    return math.fsum(one.share_sum for one in testimonies) if testimonies else math.nan


def conclude(testimonies: Sequence[Testimony], norm: float, limit: float, tolerance: float) -> tuple[Conclusion, ...]:
    """The fewest tokens whose shares reach what is above the limit, else the fewest sequences, else nobody.

    More than one: the next explains where the norm without the first is still above the limit.
    """
    checksum = checksum_of(testimonies)
    tokens = sorted((token for one in testimonies for token in one.culprits), key=lambda token: -abs(token.share))
    largest = abs(tokens[0].share) if tokens else 0.0
    error = tolerance * max(1.0, largest)
    if not tokens or not (abs(checksum - 1.0) <= error or _is_rest(testimonies, error)):
        return (Conclusion("inconclusive", tuple(tokens[:NUM_CERTAIN]), None, checksum),)
    if abs(checksum - 1.0) > REST_MAX + error:
        return (Conclusion("accounting", tuple(tokens[:NUM_CERTAIN]), None, checksum),)
    # A rest that was measured counts as one token more, and as taken out.
    rest = 1.0 - checksum if abs(checksum - 1.0) > error else 0.0
    target = target_share(norm, limit) - rest
    rows = sorted((row for one in testimonies for row in one.rows), key=lambda row: -row.share)
    picked, gap = _tokens(tokens, target)
    by_rows = _rows(rows, tokens, testimonies, target)
    by_tokens: Conclusion | None = None
    if picked and (len(picked) <= NUM_CERTAIN or gap >= GAP):
        bound = fewest([token.share for token in tokens], target - (0.0 if rest else abs(checksum - 1.0)))
        by_tokens = Conclusion(
            "token", picked, math.fsum(token.share for token in picked), checksum, len(picked), bound
        )
    order = (by_rows, by_tokens) if rows and rows[0].is_whole else (by_tokens, by_rows)
    found = tuple(one for one in order if one is not None)
    return found or (Conclusion("batch-wide", tuple(tokens[:NUM_CERTAIN]), None, checksum),)


def _is_rest(testimonies: Sequence[Testimony], error: float) -> bool:
    """Whether what is missing from one is missing on both sides alike: then it is not the arithmetic's fault."""
    up = math.fsum(one.share_sum_up for one in testimonies)
    down = math.fsum(one.share_sum_down for one in testimonies)
    return abs(up - down) <= 2 * error * max(1.0, abs(up))


def _tokens(tokens: Sequence[Culprit], target: float) -> tuple[tuple[Culprit, ...], float]:
    """Tokens that reach the target, and the gap to the next one; by size of share where some cancel."""
    if abs(tokens[0].share) > CANCELLING:
        bar = CANCELLING_PART * abs(tokens[0].share)
        picked = tuple(token for token in tokens if abs(token.share) >= bar)
        rest = max((abs(token.share) for token in tokens if abs(token.share) < bar), default=0.0)
        gap = abs(picked[-1].share) / rest if rest > 0 else math.inf
        return (picked, gap) if len(picked) <= NUM_TOKENS_MAX else ((), 0.0)
    order = sorted(tokens, key=lambda token: -token.share)
    needed = fewest([token.share for token in order], target)
    if needed is None or needed > NUM_TOKENS_MAX:
        return (), 0.0
    needed = max(needed, 1)
    following = order[needed].share if needed < len(order) else 0.0
    return tuple(order[:needed]), order[needed - 1].share / following if following > 0 else math.inf


def _rows(
    rows: Sequence[RowShare], tokens: Sequence[Culprit], testimonies: Sequence[Testimony], target: float
) -> Conclusion | None:
    num_max = max(1, int(sum(one.num_rows for one in testimonies) * ROWS_FRACTION_MAX))
    needed = fewest([row.share for row in rows], target)
    if needed is None or max(needed, 1) > num_max:
        return None
    needed = max(needed, 1)
    following = rows[needed].share if needed < len(rows) else 0.0
    if following > 0 and rows[needed - 1].share / following < GAP:
        return None
    leaders = []
    for row in rows[:needed]:
        place = (row.rank, row.micro_batch, row.sequence)
        own = [token for token in tokens if (token.rank, token.micro_batch, token.sequence) == place]
        if not own:
            return None
        leaders.append(max(own, key=lambda token: token.share))
    share = math.fsum(row.share for row in rows[:needed])
    kind: Verdict = "token" if needed == 1 and leaders[0].share >= CONCENTRATED * share else "sequence"
    return Conclusion(kind, tuple(leaders), share, checksum_of(testimonies), needed)


def conclude_non_finite(testimonies: Sequence[Testimony]) -> tuple[Conclusion, str]:
    """The tokens whose coefficient (else logp) is not finite, and which of the two it is ("" for neither)."""
    for what in ("coefficient", "logp"):
        guilty = [one for one in testimonies if one.non_finite == what]
        if guilty:
            culprits = tuple(token for one in guilty for token in one.culprits)
            verdict: Verdict = "mask" if all(one.outside_mask for one in guilty) else "non-finite"
            return Conclusion(verdict, culprits[:NUM_TOKENS_MAX], None, math.nan, len(culprits)), what
    return Conclusion("non-finite", (), None, math.nan), ""


def median_of(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return statistics.median(known) if known else None
