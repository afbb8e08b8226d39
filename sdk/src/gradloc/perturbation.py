"""Moving a model's parameters a little along a direction, and back again bit for bit.

Small moves drown in rounding: parameters are rounded stochastically to the grid that the forward
pass reads them in, so that the move is right on average. Knows no token and no share.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gradloc.shards import first_row, local

DRAWN_AT_ONCE = 1 << 22  # numbers
_SEED = 20_240_607  # any fixed number: the same snapshot gives the same finding


@dataclass(frozen=True)
class Cut:
    """Rows of a tensor of this shape, from the first one of them on."""

    shape: tuple[int, ...]
    first: int


class Perturbation:
    """Parameters (or this rank's shards), their exact values, and a direction of norm `norm` to move them along."""

    def __init__(
        self, parameters: Mapping[str, Tensor], direction: Mapping[str, Tensor], norm: float, grid: torch.dtype
    ) -> None:
        self._parameters = {name: local(parameter.detach()) for name, parameter in parameters.items()}
        self._originals = {name: parameter.clone() for name, parameter in self._parameters.items()}
        self._direction = {name: local(direction[name]) for name in parameters}
        self._cuts = {name: Cut(tuple(p.shape), first_row(p)) for name, p in parameters.items()}
        self._norm = norm
        self._grid = grid

    @contextlib.contextmanager
    def moved(self, eps: float) -> Iterator[None]:
        """Inside, parameters are theta + eps * direction / norm; outside they are theta again, bit for bit."""
        generators: dict[torch.device, torch.Generator] = {}
        try:
            with torch.no_grad():
                for name, parameter in self._parameters.items():
                    device = parameter.device
                    generator = generators.setdefault(device, torch.Generator(device).manual_seed(_SEED))
                    direction = self._direction[name].to(device=device, dtype=torch.float64)
                    target = self._originals[name].double().add_(direction, alpha=eps / self._norm)
                    parameter.copy_(stochastic_round(target, self._grid, generator, self._cuts[name]))
            yield
        finally:
            with torch.no_grad():
                for name, parameter in self._parameters.items():
                    parameter.copy_(self._originals[name])


def stochastic_round(
    values: Tensor,
    grid: torch.dtype,
    generator: torch.Generator,
    cut: Cut | None = None,
    *,
    drawn_at_once: int = DRAWN_AT_ONCE,
) -> Tensor:
    """Round float64 to one of the two neighbours in `grid`, up or down with the odds that keep the mean.

    cut: of what the values are the rows; they are rounded as they would be within it.
    """
    if grid == torch.float64:
        return values
    nearest = values.to(grid)
    error = values - nearest.double()
    towards = torch.where(error > 0, torch.inf, -torch.inf).to(grid)
    neighbour = torch.where(error == 0, nearest, torch.nextafter(nearest, towards))
    gap = (neighbour.double() - nearest.double()).abs()
    odds = torch.where(gap > 0, error.abs() / gap, 0.0)
    draw = _drawn(values, cut or Cut(tuple(values.shape), 0), generator, drawn_at_once)
    return torch.where(draw < odds, neighbour, nearest)


def _drawn(values: Tensor, cut: Cut, generator: torch.Generator, at_once: int) -> Tensor:
    """One number for each value, those that a draw for the whole tensor gives it; a few rows of it at a time."""
    if tuple(values.shape) == cut.shape:
        return torch.rand(values.shape, generator=generator, device=values.device, dtype=torch.float64)
    found = torch.empty(values.shape, device=values.device, dtype=torch.float64)
    end, step = cut.first + values.shape[0], max(1, at_once // max(1, math.prod(cut.shape[1:])))
    for at in range(0, cut.shape[0], step):
        until = min(at + step, cut.shape[0])
        drawn = torch.rand((until - at, *cut.shape[1:]), generator=generator, device=values.device, dtype=torch.float64)
        low, high = max(at, cut.first), min(until, end)
        if low < high:
            found[low - cut.first : high - cut.first] = drawn[low - at : high - at]
    return found
