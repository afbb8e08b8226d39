"""Replay: recomputing the step's gradient from its batch and coefficients, whole or with some changed.

g = sum_i c_i grad logp_i over all ranks and micro-batches, by backward of sum(c * logp). A NaN
coefficient makes the gradient NaN, as it did in training. Knows no culprit and no limit.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradloc.layers import layer_key
from gradloc.policy import ActivePart, PlacedBatch, Policy, active_part
from gradloc.shards import local, squares, summed
from gradloc.snapshot import MicroBatch


@dataclass(frozen=True)
class Gradient:
    """A gradient by parameter name, its norm, and norms by layer key (both accumulated in float64)."""

    tensors: dict[str, Tensor]
    norm: float
    layer_norms: dict[str, float]

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.norm)

    def only(self, keys: frozenset[str]) -> "Gradient":
        """The part of the gradient that lies in these layer keys; zero elsewhere."""
        return gradient_of(
            {
                name: tensor if layer_key(name) in keys else torch.zeros_like(tensor)
                for name, tensor in self.tensors.items()
            }
        )

    def dot(self, other: Sequence[Tensor | None]) -> float:
        """Inner product with gradients in the order of `tensors`, in float64."""
        total = 0.0
        for mine, theirs in zip(self.tensors.values(), other, strict=True):
            if theirs is not None:
                total += float((local(mine).double() * local(theirs).double()).sum())
        return summed([total], self.tensors.values())[0]


@dataclass(frozen=True)
class Replay:
    """A replayed gradient, and the logp of what was computed on the way.

    logp: one [B, R] float64 tensor a batch, NaN where nothing had to be computed.
    """

    gradient: Gradient
    logp: tuple[Tensor, ...]


def coefficients_of(batches: Sequence[PlacedBatch]) -> list[Tensor]:
    """One float64 [B, R] tensor a batch, ranks' factors applied."""
    return [placed.coefficient_BR() for placed in batches]


def replay(
    policy: Policy, batches: Sequence[PlacedBatch], coefficients: Sequence[Tensor], *, by_row: bool = False
) -> Replay:
    """Gradient of sum(c * logp) under these coefficients (as from `coefficients_of`, changed or not).

    `by_row` computes each row alone and no further than its last coefficient: what is not finite behind it stays out.
    """
    if policy.team is not None:
        return policy.team.replay(coefficients, by_row=by_row)
    return replay_here(policy, batches, coefficients, by_row=by_row)


def replay_here(
    policy: Policy, batches: Sequence[PlacedBatch], coefficients: Sequence[Tensor], *, by_row: bool = False
) -> Replay:
    """The same by this process alone."""
    sums: list[Tensor | None] = [None] * len(policy.parameters)
    logp = [torch.full(own_BR.shape, math.nan, dtype=torch.float64) for own_BR in coefficients]
    parts = (
        (index, part)
        for index, (placed, own_BR) in enumerate(zip(batches, coefficients, strict=True))
        for part in _parts(placed.batch, own_BR, by_row)
    )
    for turn in policy.turns(parts):
        part = turn.part
        if not by_row and policy.replays_packed(part):
            computed_BR = policy.packed_log_probs(part.source)[:, : part.num_columns]
        else:
            computed_BR = policy.log_probs_in(turn)
        own_BR = coefficients[turn.batch][part.rows, : part.num_columns]
        weight_BR = own_BR if turn.own else torch.zeros_like(own_BR)
        _add(sums, policy.backward(computed_BR, weight_BR, num_tokens=part.num_tokens))
        if turn.own:
            logp[turn.batch][part.rows, : part.num_columns] = computed_BR.detach().double().cpu()
    if policy.split is not None:
        logp = policy.split.together(logp)
    tensors = {
        name: torch.zeros_like(parameter, requires_grad=False) if total is None else total
        for (name, parameter), total in zip(policy.parameters.items(), sums, strict=True)
    }
    return Replay(gradient_of(tensors), tuple(logp))


def _parts(batch: MicroBatch, coefficient_BR: Tensor, by_row: bool) -> Iterator[ActivePart]:
    rows = torch.arange(coefficient_BR.shape[0])
    for chosen in torch.split(rows, 1) if by_row else (rows,):
        own_BR = torch.where(torch.isin(rows, chosen).unsqueeze(1), coefficient_BR, 0.0)
        part = active_part(batch, own_BR)
        if part is not None:
            yield part


def gradient_of(tensors: dict[str, Tensor]) -> Gradient:
    """Norms of a gradient given by parameter name."""
    by_key: dict[str, float] = {}
    for name, square in zip(tensors, squares(list(tensors.values())), strict=True):
        key = layer_key(name)
        by_key[key] = by_key.get(key, 0.0) + square
    return Gradient(
        tensors=tensors,
        norm=math.sqrt(sum(by_key.values())),
        layer_norms={key: math.sqrt(square) for key, square in by_key.items()},
    )


def masked(coefficients: Sequence[Tensor], places: Sequence[tuple[int, int, int]]) -> list[Tensor]:
    """Coefficients with those at (batch, row, column) set to zero."""
    changed = [coefficient.clone() for coefficient in coefficients]
    for batch, row, column in places:
        changed[batch][row, column] = 0.0
    return changed


def _add(sums: list[Tensor | None], gradients: Sequence[Tensor | None]) -> None:
    for index, gradient in enumerate(gradients):
        if gradient is None:
            continue
        # Micro-batches add up in float32 at least, whatever the parameters' format.
        wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        total = sums[index]
        sums[index] = wide if total is None else total.add_(wide)
