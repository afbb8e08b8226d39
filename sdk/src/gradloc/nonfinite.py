"""Gradients that are not finite: who brought the first NaN or infinity.

First the coefficients and log-probabilities themselves, which cost nothing to look at; then a
bisection, for a segment that holds the cause is not finite either; then the modules of the culprit's
row in backward order. Knows no verdict names of the rest.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from gradloc.bisection import bisect
from gradloc.layers import is_vision
from gradloc.policy import PlacedBatch, Policy, cut
from gradloc.verification import Place


@dataclass(frozen=True)
class NonFiniteSource:
    """Tokens that are not finite by themselves; `what` is "coefficient", "logp" or "network".

    `outside_mask`: all of them lie where the loss says it does not look. `module`: the first one, in
    backward order, whose gradient was not finite (only for "network"), with the row's `position`.
    """

    places: tuple[Place, ...]
    what: str
    outside_mask: bool
    module: str | None = None
    position: int | None = None


def find_in_batch(batches: Sequence[PlacedBatch], coefficients: Sequence[Tensor]) -> NonFiniteSource | None:
    """Coefficients that are not finite, else used logps that are not; None when all are finite."""
    for what in ("coefficient", "logp"):
        places: list[Place] = []
        inside = False
        for batch, (placed, coefficient_BR) in enumerate(zip(batches, coefficients, strict=True)):
            values = coefficient_BR if what == "coefficient" else placed.batch.logp_BR
            bad_BR = ~torch.isfinite(values)
            if what == "logp":
                bad_BR &= (coefficient_BR != 0) | placed.batch.mask_BR
            places += [Place(batch, row, column) for row, column in bad_BR.nonzero().tolist()]
            inside |= bool((bad_BR & placed.batch.mask_BR).any())
        if places:
            return NonFiniteSource(tuple(places), what, outside_mask=not inside)
    return None


def find_in_network(
    policy: Policy, batches: Sequence[PlacedBatch], coefficients: Sequence[Tensor]
) -> NonFiniteSource | None:
    """Tokens whose own gradient is not finite although all coefficients are; None when the search finds none."""
    found = bisect(policy, batches, coefficients, float("inf"))
    if not found.tokens:
        return None
    first = found.tokens[0]
    module, position = first_module(policy, batches, coefficients, first)
    inside = any(bool(batches[p.batch].batch.mask_BR[p.row, p.column]) for p in found.tokens)
    return NonFiniteSource(tuple(found.tokens), "network", not inside, module, position)


def first_module(
    policy: Policy, batches: Sequence[PlacedBatch], coefficients: Sequence[Tensor], place: Place
) -> tuple[str | None, int | None]:
    """First module, in order of computation, with an output that is not finite; else the first in backward order
    whose output's gradient is not. With it the position in the row."""
    source = batches[place.batch].batch
    row = cut(source, torch.tensor([place.row]), source.first_position + place.column + 1)
    events: list[tuple[str, int | None]] = []
    with _watching(policy.model, events):
        logp_BR = policy.log_probs(row, to_the_end=False)
        coefficient_R = torch.zeros(logp_BR.shape[1], dtype=torch.float64)
        coefficient_R[place.column] = coefficients[place.batch][place.row, place.column]
        policy.backward(logp_BR, coefficient_R.unsqueeze(0), num_tokens=row.ids_BT.numel() - 1)
    return events[0] if events else (None, None)


@contextlib.contextmanager
def _watching(model: nn.Module, events: list[tuple[str, int | None]]) -> Iterator[None]:
    def note(name: str, tensor: Tensor) -> None:
        bad = ~torch.isfinite(tensor)
        if bool(bad.any()):
            has_positions = bad.dim() >= 2 and not is_vision(name)
            position = int(bad[0].flatten(1).any(dim=1).nonzero()[0]) if has_positions else None
            events.append((name, position))

    def hook_for(name: str) -> Any:
        def on_forward(_module: nn.Module, _inputs: Any, output: Any) -> None:
            tensor = output if isinstance(output, Tensor) else None
            if tensor is None or not tensor.is_floating_point():
                return
            note(name, tensor.detach())
            if tensor.requires_grad:
                cast(Any, tensor).register_hook(lambda gradient: note(name, gradient.detach()))

        return on_forward

    handles = [
        module.register_forward_hook(hook_for(name))
        for name, module in model.named_modules()
        if not list(module.children())
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
