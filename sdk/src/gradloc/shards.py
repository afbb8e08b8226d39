"""Tensors of which a process holds its part alone: FSDP2's DTensors, cut along their first axis.

Plain tensors go through as they are, so whoever adds up a gradient need not know whether its model is split.
"""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """This process's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All of it; a meeting of all processes."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def like(part: Tensor, other: Tensor) -> Tensor:
    """This process's part of a tensor that is cut as `other` is."""
    if not isinstance(other, DTensor):
        return part
    found: Tensor = DTensor.from_local(
        part, other.device_mesh, other.placements, run_check=False, shape=other.shape, stride=other.stride()
    )
    return found


def first_row(tensor: Tensor) -> int:
    """Row of the whole tensor that this process's part begins with."""
    if not isinstance(tensor, DTensor) or tensor.dim() == 0:
        return 0
    num_rows, size = tensor.shape[0], tensor.device_mesh.size()
    return min(num_rows, tensor.device_mesh.get_local_rank() * -(-num_rows // size))


def squares(tensors: Sequence[Tensor]) -> list[float]:
    """Square sum of each tensor, in float64."""
    own = [float(torch.linalg.vector_norm(local(tensor), dtype=torch.float64)) ** 2 for tensor in tensors]
    return summed(own, tensors)


def summed(own: list[float], of: Iterable[Tensor]) -> list[float]:
    """What parts of these tensors gave, added up over the processes that hold them; the same on all."""
    if not any(isinstance(tensor, DTensor) for tensor in of):
        return own
    total = torch.tensor(own, dtype=torch.float64)
    dist.all_reduce(total)
    found: list[float] = total.tolist()
    return found
