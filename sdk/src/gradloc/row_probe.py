"""Logps of single rows at weights moved along a gradient, and their derivative along it.

    logp(theta + eps v)         one forward pass of the rows asked for, v = g / ||g||
    d/deps logp(theta + eps v)  forward-mode differentiation: exact, without any eps, at three forward passes' work

Rows are asked for by (micro-batch, row), so that each may have the eps that suits it and nothing is computed that
nobody needs. Knows no share and no tolerance. Shapes: B rows, R positions with a logp.
"""

import warnings
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from gradloc.perturbation import Perturbation
from gradloc.policy import ActivePart, PlacedBatch, Policy, active_part
from gradloc.replay import Gradient

Row = tuple[int, int]
# y = W x has the derivative W' x + W x': beside the value two products more.
NUM_FORWARDS_OF_DERIVATIVE = 3


class RowProbe:
    """The rows of some micro-batches, under coefficients that say which of their positions count."""

    def __init__(
        self, policy: Policy, batches: Sequence[PlacedBatch], coefficients: Sequence[Tensor], gradient: Gradient
    ) -> None:
        self._policy = policy
        self._batches = batches
        self._coefficients = coefficients
        self._gradient = gradient
        self._perturbation = (
            None
            if policy.team is not None
            else Perturbation(policy.parameters, gradient.tensors, gradient.norm, policy.grid)
        )
        self.rows: tuple[Row, ...] = tuple(
            (batch, row)
            for batch, coefficient_BR in enumerate(coefficients)
            for row in (coefficient_BR != 0).any(dim=1).nonzero().squeeze(-1).tolist()
        )

    def moved(self, rows: Collection[Row], eps: float) -> dict[Row, Tensor]:
        """Logps float64 [R] of these rows at theta + eps v; zero behind the last position that counts."""
        if self._perturbation is None:
            assert self._policy.team is not None
            return self._policy.team.moved(self._coefficients, self._gradient, rows, eps)
        found: dict[Row, Tensor] = {}
        with self._perturbation.moved(eps), torch.no_grad():
            for turn in self._policy.turns(self._parts(rows)):
                logp_BR = self._policy.log_probs_in(turn, hold_routing=True)
                if turn.own:
                    self._take(found, turn.batch, turn.part, logp_BR)
        if self._policy.split is not None:
            known = [(batch, row) for batch, part in self._parts(rows) for row in part.rows.tolist()]
            return self._policy.split.rows_together(found, known, [own.shape[1] for own in self._coefficients])
        return found

    def derivatives(self, rows: Collection[Row]) -> dict[Row, Tensor] | None:
        """d logp / d eps at zero, float64 [R] by row; None where an operation of the model has no such mode."""
        if self._policy.team is not None:
            return self._policy.team.derivatives(self._coefficients, self._gradient, rows)
        if self._policy.split is not None:
            return None  # FSDP2 gathers plain weights for each pass, never dual numbers
        # torch ships these two without types.
        make_dual: Any = forward_ad.make_dual
        unpack_dual: Any = forward_ad.unpack_dual
        found: dict[Row, Tensor] = {}
        gradient = self._gradient
        try:
            for batch, part in self._parts(rows):
                # Only the plain attention kernel has forward-mode derivatives.
                with warnings.catch_warnings(), torch.no_grad(), forward_ad.dual_level(), sdpa_kernel(SDPBackend.MATH):
                    # torch's own table of forward-mode rules still goes through its deprecated script compiler.
                    warnings.simplefilter("ignore", DeprecationWarning)
                    dual = {
                        name: make_dual(parameter, gradient.tensors[name].to(parameter) / gradient.norm)
                        for name, parameter in self._policy.parameters.items()
                    }
                    moved_BR = self._policy.log_probs_of(part, hold_routing=True, instead=dual)
                    self._policy.meter.num_tokens_forward += (NUM_FORWARDS_OF_DERIVATIVE - 1) * part.num_tokens
                    tangent_BR = unpack_dual(moved_BR).tangent
                self._take(found, batch, part, torch.zeros_like(moved_BR) if tangent_BR is None else tangent_BR)
        except (NotImplementedError, RuntimeError):
            return None
        return found

    def record_routing(self, rows: Collection[Row]) -> None:
        """Which experts these rows choose, for a replica that did not replay them: a forward pass, where there are
        experts to choose from."""
        with torch.no_grad():
            for turn in self._policy.turns(self._parts(rows)):
                if self._policy.routing.chooses:
                    self._policy.log_probs_in(turn)

    def _parts(self, rows: Collection[Row]) -> Iterator[tuple[int, ActivePart]]:
        for batch, coefficient_BR in enumerate(self._coefficients):
            wanted = [row for number, row in rows if number == batch]
            if wanted:
                own_BR = torch.zeros_like(coefficient_BR)
                own_BR[wanted] = coefficient_BR[wanted]
                part = active_part(self._batches[batch].batch, own_BR)
                if part is not None:
                    yield batch, part

    def _take(self, found: dict[Row, Tensor], batch: int, part: ActivePart, values_BR: Tensor) -> None:
        values_BR = values_BR.detach().double().cpu()
        for row, values_R in zip(part.rows.tolist(), values_BR, strict=True):
            whole_R = torch.zeros(self._coefficients[batch].shape[1], dtype=torch.float64)
            whole_R[: part.num_columns] = values_R
            found[batch, row] = whole_R
