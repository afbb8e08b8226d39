"""Bisection: the search that the published method describes, by replays of ever smaller segments.

Global -> micro-batch -> rank -> sequence -> token; the larger side first, then back for further
culprits (depth first); a segment is suspect above its own limit (gradloc_proto.rules.segment_limit), for
independent gradients add like roots. The only strategy for gradients that are not finite: a segment
that holds the cause is not finite either. Knows no cause.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from gradloc.policy import PlacedBatch, Policy
from gradloc.replay import replay
from gradloc.verification import Place
from gradloc_proto import rules

NUM_PROBES_MAX = 256
NUM_FOUND_MAX = 8


class Span(NamedTuple):
    """Columns first..end (exclusive) of one row of one batch."""

    batch: int
    row: int
    first: int
    end: int


@dataclass
class Bisection:
    """What the search found: tokens in the order found, segments whose halves are all harmless, and its work."""

    tokens: list[Place] = field(default_factory=list)
    unresolved: list[tuple[Span, ...]] = field(default_factory=list)
    num_probes: int = 0
    out_of_budget: bool = False


def bisect(
    policy: Policy,
    batches: Sequence[PlacedBatch],
    coefficients: Sequence[Tensor],
    limit: float,
    *,
    num_probes_max: int = NUM_PROBES_MAX,
) -> Bisection:
    """Search from the whole step down. `limit` is the whole step's; inf finds only what is not finite."""
    search = _Search(policy, batches, coefficients, limit, num_probes_max)
    whole = tuple(
        Span(batch, row, 0, coefficient_BR.shape[1])
        for batch, coefficient_BR in enumerate(coefficients)
        for row in range(coefficient_BR.shape[0])
        if bool((coefficient_BR[row] != 0).any())
    )
    if whole:
        search.descend(whole)
    return search.found


class _Search:
    def __init__(
        self,
        policy: Policy,
        batches: Sequence[PlacedBatch],
        coefficients: Sequence[Tensor],
        limit: float,
        num_probes_max: int,
    ) -> None:
        self._policy = policy
        self._batches = batches
        self._coefficients = coefficients
        self._limit = limit
        self._num_probes_max = num_probes_max
        self._num_tokens = max(1, sum(int((coefficient != 0).sum()) for coefficient in coefficients))
        self.found = Bisection()

    def descend(self, segment: tuple[Span, ...]) -> None:
        """Follow a suspect segment; recursion is bounded by the logarithm of the number of tokens."""
        columns = [self._columns(span) for span in segment]
        if sum(len(found) for found in columns) == 1:
            (span, column) = next((s, c[0]) for s, c in zip(segment, columns, strict=True) if c)
            self.found.tokens.append(Place(span.batch, span.row, column))
            return
        halves = self._halves(segment)
        if self.found.num_probes + len(halves) > self._num_probes_max:
            self.found.out_of_budget = True
            self.found.unresolved.append(segment)
            return
        probed = sorted(((self._probe(half), half) for half in halves), key=lambda entry: -_size(entry[0]))
        suspects = [half for norm, half in probed if self._is_suspect(norm, half)]
        if not suspects:
            self.found.unresolved.append(segment)
        for half in suspects:
            if len(self.found.tokens) >= NUM_FOUND_MAX or self.found.out_of_budget:
                return
            self.descend(half)

    def _columns(self, span: Span) -> list[int]:
        row = self._coefficients[span.batch][span.row, span.first : span.end]
        return [span.first + int(column) for column in (row != 0).nonzero().squeeze(-1).tolist()]

    def _halves(self, segment: tuple[Span, ...]) -> list[tuple[Span, ...]]:
        """Split at the coarsest level that still has more than one part."""
        levels: tuple[Callable[[Span], int], ...] = (
            lambda span: self._batches[span.batch].index,
            lambda span: self._batches[span.batch].rank,
            lambda span: span.row,
        )
        for level in levels:
            values = sorted({level(span) for span in segment})
            if len(values) > 1:
                low = set(values[: len(values) // 2])
                return [
                    tuple(span for span in segment if level(span) in low),
                    tuple(span for span in segment if level(span) not in low),
                ]
        (span,) = segment
        columns = self._columns(span)
        middle = columns[len(columns) // 2]
        return [(span._replace(end=middle),), (span._replace(first=middle),)]

    def _probe(self, segment: tuple[Span, ...]) -> float:
        self.found.num_probes += 1
        coefficients = [torch.zeros_like(coefficient) for coefficient in self._coefficients]
        for span in segment:
            source = self._coefficients[span.batch][span.row, span.first : span.end]
            coefficients[span.batch][span.row, span.first : span.end] = source
        return replay(self._policy, self._batches, coefficients).gradient.norm

    def _is_suspect(self, norm: float, segment: tuple[Span, ...]) -> bool:
        if not math.isfinite(norm):
            return True
        if not math.isfinite(self._limit):
            return False
        num_tokens = sum(len(self._columns(span)) for span in segment)
        # The step's own limit says what healthy is: the detector may have learnt it, or a person set it.
        healthy = self._limit / rules.LEVEL_FACTOR["step"]
        return norm > rules.segment_limit(healthy, num_tokens, self._num_tokens, self._level(segment, num_tokens))

    def _level(self, segment: tuple[Span, ...], num_tokens: int) -> rules.Level:
        if num_tokens == 1:
            return "token"
        if len(segment) == 1:
            return "sequence"
        if len({span.batch for span in segment}) == 1:
            return "micro-batch"
        return "rank" if len({self._batches[span.batch].rank for span in segment}) == 1 else "step"


def _size(norm: float) -> float:
    return math.inf if math.isnan(norm) else norm
