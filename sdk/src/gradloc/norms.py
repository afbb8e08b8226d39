"""Squared gradient norms by layer and kind of module, before clipping, in float64.

Knows how a parameter is spread over ranks: a plain tensor is replicated (every rank holds the whole
gradient, so each contributes 1/world_size of its square), a DTensor contributes its own shard.
"""

from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate

from gradloc.layers import layer_key


class LayerNorms:
    """Groups a model's parameters by layer key once, then measures their gradients every step."""

    def __init__(self, named_parameters: Iterable[tuple[str, torch.nn.Parameter]], world_size: int) -> None:
        index: dict[str, int] = {}
        self._parameters: list[torch.nn.Parameter] = []
        groups, weights = [], []
        for name, parameter in named_parameters:
            if not parameter.requires_grad:
                continue
            key = layer_key(name)
            groups.append(index.setdefault(key, len(index)))
            weights.append(_weight(name, parameter, world_size))
            self._parameters.append(parameter)
        self.names: tuple[str, ...] = tuple(index)
        self._groups_P = torch.tensor(groups, dtype=torch.int64)
        self._weights_P = torch.tensor(weights, dtype=torch.float64)

    def local_squares(self) -> torch.Tensor:
        """This rank's contribution to the squared norm of each layer: float64 [L] on the host.

        Summed over ranks it is the squared norm of the whole gradient. 1,000 entries of 1e18 do not
        overflow: where float32 gave infinity, the norm is taken again in float64.
        """
        present = [(i, p.grad) for i, p in enumerate(self._parameters) if p.grad is not None]
        squares_L = torch.zeros(len(self.names), dtype=torch.float64)
        if not present:
            return squares_L
        grads = [local_of(grad) for _, grad in present]
        norms = torch._foreach_norm(grads, 2)
        norms_P = _stacked(norms).cpu()
        for at in torch.nonzero(torch.isinf(norms_P)).flatten().tolist():
            norms_P[at] = torch.linalg.vector_norm(grads[at], dtype=torch.float64).cpu()
        picked = torch.tensor([i for i, _ in present])
        return squares_L.index_add_(0, self._groups_P[picked], norms_P.square() * self._weights_P[picked])


def _weight(name: str, parameter: torch.Tensor, world_size: int) -> float:
    if not isinstance(parameter, DTensor):
        return 1.0 / world_size
    replicas = 1
    for dimension, placement in enumerate(parameter.placements):
        if isinstance(placement, Partial):
            raise ValueError(
                f"parameter {name} is a DTensor with partial placement, whose norm is not a sum over ranks; "
                "expected Shard or Replicate"
            )
        if isinstance(placement, Replicate):
            replicas *= parameter.device_mesh.size(dimension)
    return 1.0 / replicas


def local_of(grad: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor; asking a DTensor itself for a number would be a collective."""
    if isinstance(grad, DTensor):
        grad = grad.to_local()
    if grad.is_sparse:
        grad = grad.coalesce().values()
    return grad.detach() if grad.requires_grad else grad


def _stacked(norms: tuple[torch.Tensor, ...] | list[torch.Tensor]) -> torch.Tensor:
    """float64 [P]; one conversion for all of one format and device."""
    first = norms[0]
    if all(norm.dtype == first.dtype and norm.device == first.device for norm in norms):
        return torch.stack(norms).to(torch.float64)
    return torch.stack([norm.to(first.device, torch.float64) for norm in norms])
