"""Verification: the exact share and norm of single tokens by backward passes of their own rows.

A row is computed only up to the token: causal models need no more. Knows no limit and no verdict.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gradloc.policy import PlacedBatch, Policy, cut
from gradloc.replay import Gradient
from gradloc.shards import squares


class Place(NamedTuple):
    """A token in the flat list of batches: batch, row, column of its logp."""

    batch: int
    row: int
    column: int


@dataclass(frozen=True)
class ExactToken:
    """share = <g_i, g> / ||g||^2 and norm = ||g_i||, both from a backward pass of this token alone."""

    place: Place
    share: float
    norm: float


def exact_tokens(
    policy: Policy,
    batches: Sequence[PlacedBatch],
    coefficients: Sequence[Tensor],
    gradient: Gradient,
    places: Sequence[Place],
) -> dict[Place, ExactToken]:
    """Exact share and norm of each token at `places`: one forward a row, one backward a token."""
    if policy.team is not None:
        return policy.team.exact(coefficients, gradient, places)
    by_row: dict[tuple[int, int], list[int]] = {}
    for place in places:
        by_row.setdefault((place.batch, place.row), []).append(place.column)
    found: dict[Place, ExactToken] = {}
    for (batch, row), columns in by_row.items():
        source = batches[batch].batch
        part = cut(source, torch.tensor([row]), source.first_position + max(columns) + 1)
        logp_R = policy.log_probs(part, to_the_end=False)[0]
        for column in columns:
            place = Place(batch, row, column)
            gradients = policy.backward(
                logp_R[column],
                torch.ones(()) if policy.split is None or policy.split.rank == 0 else torch.zeros(()),  # summed
                num_tokens=source.first_position + column,
                keep_graph=column != columns[-1],
            )
            found[place] = _exact(place, float(coefficients[batch][row, column]), gradients, gradient)
    return found


def _exact(place: Place, coefficient: float, gradients: Sequence[Tensor | None], whole: Gradient) -> ExactToken:
    square = sum(squares([gradient for gradient in gradients if gradient is not None]))
    return ExactToken(
        place=place,
        share=coefficient * whole.dot(gradients) / whole.norm**2,
        norm=abs(coefficient) * math.sqrt(square),
    )
