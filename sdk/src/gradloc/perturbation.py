"""Moving a model's parameters a little along a direction, and back again bit for bit.

Small moves drown in rounding: parameters are rounded stochastically to the grid that the forward
pass reads them in, so that the move is right on average. Knows no token and no share.
"""

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

_SEED = 20_240_607  # any fixed number: the same snapshot gives the same finding


class Perturbation:
    """Parameters (or this rank's shards), their exact values, and a direction of norm `norm` to move them along."""

    def __init__(
        self, parameters: Mapping[str, Tensor], direction: Mapping[str, Tensor], norm: float, grid: torch.dtype
    ) -> None:
        self._parameters = parameters
        self._originals = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        self._direction = direction
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
                    parameter.copy_(stochastic_round(target, self._grid, generator))
            yield
        finally:
            with torch.no_grad():
                for name, parameter in self._parameters.items():
                    parameter.copy_(self._originals[name])


def stochastic_round(values: Tensor, grid: torch.dtype, generator: torch.Generator) -> Tensor:
    """Round float64 to one of the two neighbours in `grid`, up or down with the odds that keep the mean."""
    if grid == torch.float64:
        return values
    nearest = values.to(grid)
    error = values - nearest.double()
    towards = torch.where(error > 0, torch.inf, -torch.inf).to(grid)
    neighbour = torch.where(error == 0, nearest, torch.nextafter(nearest, towards))
    gap = (neighbour.double() - nearest.double()).abs()
    odds = torch.where(gap > 0, error.abs() / gap, 0.0)
    draw = torch.rand(values.shape, generator=generator, device=values.device, dtype=torch.float64)
    return torch.where(draw < odds, neighbour, nearest)
