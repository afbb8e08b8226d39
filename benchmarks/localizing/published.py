"""The published bisection, written down from its description: the baseline.

global -> micro-batch -> rank -> token, binary search at each level, two probes a division (a probe is a
forward and backward pass of a segment); greedily into the side with the larger norm, its limit falling with
the segment's size; at the token level depth first with backtracking, which finds more culprits nearby. A
segment of n of N tokens counts as abnormal above k h sqrt(n / N), h the healthy norm. The article gives no k:
the benchmark tries several and reports the best. Of two micro-batches or ranks it follows the larger.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradloc.policy import PlacedBatch, Policy
from gradloc.replay import replay
from gradloc.verification import Place

FACTORS = (1.5, 2.0, 3.0, 4.0)
NUM_PROBES_MAX = 256


@dataclass
class Published:
    policy: Policy
    placed: Sequence[PlacedBatch]
    coefficients: Sequence[Tensor]
    healthy_norm: float
    factor: float
    found: list[Place] = field(default_factory=list)
    num_probes: int = 0

    def search(self, *, scope: int | None = None) -> list[Place]:
        """Tokens found; `scope`: the flat number of the micro-batch that is known already."""
        every = [
            Place(index, row, column)
            for index, coefficient_BR in enumerate(self.coefficients)
            for row, column in (coefficient_BR != 0).nonzero().tolist()
        ]
        self._num_tokens = len(every)
        if scope is None:
            for level in (lambda p: self.placed[p.batch].index, lambda p: self.placed[p.batch].rank):
                every = self._greedy(every, level)
        else:
            every = [place for place in every if place.batch == scope]
        self._descend(every)
        return self.found

    def _greedy(self, places: list[Place], level) -> list[Place]:  # type: ignore[no-untyped-def]
        """Halve the values of a level, always into the side of the larger norm."""
        while len(values := sorted({level(place) for place in places})) > 1:
            low = set(values[: len(values) // 2])
            halves = [[p for p in places if (level(p) in low) == side] for side in (True, False)]
            places = max(halves, key=lambda half: _size(self._probe(half)))
        return places

    def _descend(self, places: list[Place]) -> None:
        if len(places) == 1:
            self.found.append(places[0])
            return
        if self.num_probes + 2 > NUM_PROBES_MAX:
            return
        middle = len(places) // 2
        halves = [places[:middle], places[middle:]]
        probed = sorted(((self._probe(half), half) for half in halves), key=lambda entry: -_size(entry[0]))
        for norm, half in probed:
            if not norm <= self.factor * self.healthy_norm * math.sqrt(len(half) / self._num_tokens):
                self._descend(half)

    def _probe(self, places: Sequence[Place]) -> float:
        self.num_probes += 1
        only = [torch.zeros_like(coefficient) for coefficient in self.coefficients]
        for batch, row, column in places:
            only[batch][row, column] = self.coefficients[batch][row, column]
        return replay(self.policy, self.placed, only).gradient.norm


def _size(norm: float) -> float:
    return math.inf if math.isnan(norm) else norm
