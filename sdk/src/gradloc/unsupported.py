"""What cannot be watched, refused by name before training starts. Imports none of it."""

import torch
from torch.distributed.fsdp import FullyShardedDataParallel


def refuse(model: torch.nn.Module, optimizer: object | None) -> None:
    """Raises ValueError with what was found, why it does not work and what does."""
    for thing in (model, optimizer):
        for kind in type(thing).__mro__:
            package = kind.__module__.partition(".")[0]
            if package == "deepspeed":
                raise ValueError(
                    f"{kind.__name__} of DeepSpeed keeps gradients in partitions of its own and clips inside step(), "
                    "so they cannot be measured before clipping; expected DDP or FSDP2 (docs/trainers/deepspeed.md)"
                )
            if package == "megatron":
                raise ValueError(
                    f"{kind.__name__} of Megatron keeps gradients in main_grad buffers and clips inside step(), so "
                    "they cannot be measured before clipping; expected DDP or FSDP2 (docs/trainers/megatron.md)"
                )
    if any(isinstance(part, FullyShardedDataParallel) for part in model.modules()):
        raise ValueError(
            "FSDP1's flat parameters have no layers to measure; expected FSDP2 (torch.distributed.fsdp.fully_shard)"
        )
    if isinstance(model, torch.nn.DataParallel):
        raise ValueError(
            "nn.DataParallel replicates the model at every step; "
            "expected one process a device and DistributedDataParallel"
        )
