"""The oracle: every token's gradient by a float64 backward pass of its own, and what follows from them.

n tokens; K is their Gram matrix, with the coefficients in it: the norm without a set S is sqrt of the sum of
K over the others. Nothing is approximated but float64.
"""

import copy
import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from localizing.step import logp_of
from torch import Tensor, nn

from gradloc.policy import PlacedBatch
from gradloc.verification import Place

NUM_TOKENS_MAX = 4  # larger explanations are not looked for
NUM_CANDIDATES = 12


@dataclass(frozen=True)
class Oracle:
    """`unit_nn`: inner products of grad logp; `coefficient_n` turns them into those of token gradients."""

    places: tuple[Place, ...]
    unit_nn: Tensor
    coefficient_n: Tensor

    @classmethod
    def of(cls, model: nn.Module, placed: Sequence[PlacedBatch]) -> "Oracle":
        exact = copy.deepcopy(model).double()
        parameters = [p for p in exact.parameters() if p.requires_grad]
        places, rows = [], []
        for index, one in enumerate(placed):
            logp_BR = logp_of(exact, one.batch)
            for row, column in (one.batch.coefficient_BR != 0).nonzero().tolist():
                gradients = torch.autograd.grad(logp_BR[row, column], parameters, retain_graph=True, allow_unused=True)
                flat = [
                    torch.zeros(p.numel(), dtype=torch.float64) if g is None else g.flatten()
                    for p, g in zip(parameters, gradients, strict=True)
                ]
                places.append(Place(index, row, column))
                rows.append(torch.cat(flat))
        unit_nD = torch.stack(rows)
        coefficient_n = torch.tensor([float(placed[p.batch].coefficient_BR()[p.row, p.column]) for p in places])
        return cls(tuple(places), unit_nD @ unit_nD.T, coefficient_n.double())

    def under(self, coefficients: Sequence[Tensor]) -> "Oracle":
        """The same tokens under other coefficients."""
        values = [float(coefficients[p.batch][p.row, p.column]) for p in self.places]
        return Oracle(self.places, self.unit_nn, torch.tensor(values, dtype=torch.float64))

    @property
    def gram_nn(self) -> Tensor:
        return self.unit_nn * torch.outer(self.coefficient_n, self.coefficient_n)

    def norm_without(self, out: Collection[Place] = ()) -> float:
        keep_n = torch.tensor([place not in out for place in self.places], dtype=torch.float64)
        return float((keep_n @ self.gram_nn @ keep_n).clamp(min=0).sqrt())

    def shares(self) -> dict[Place, float]:
        gram_nn = self.gram_nn
        share_n = gram_nn.sum(dim=1) / gram_nn.sum()
        return dict(zip(self.places, share_n.tolist(), strict=True))

    def norms(self) -> dict[Place, float]:
        return dict(zip(self.places, self.gram_nn.diagonal().sqrt().tolist(), strict=True))

    def fewest(self, limit: float) -> frozenset[Place] | None:
        """The smallest set of tokens without which the norm is under the limit, by trying; None beyond a few."""
        shares, norms = self.shares(), self.norms()
        by_share = sorted(self.places, key=lambda place: -abs(shares[place]))[:NUM_CANDIDATES]
        by_norm = sorted(self.places, key=lambda place: -norms[place])[:NUM_CANDIDATES]
        candidates = list(dict.fromkeys([*by_norm[: NUM_CANDIDATES // 2], *by_share[: NUM_CANDIDATES // 2]]))
        for size in range(1, NUM_TOKENS_MAX + 1):
            sets = [frozenset(chosen) for chosen in itertools.combinations(candidates, size)]
            best = min(sets, key=self.norm_without, default=None)
            if best is not None and self.norm_without(best) <= limit:
                return best
        return None
