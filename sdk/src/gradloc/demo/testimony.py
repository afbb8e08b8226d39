"""What the trainer leaves for the judge alone: weights and batches of the step that was struck.

Files of a folder that no service is told of: `weights.safetensors`, `rank-0.safetensors`, ...,
`planted.json`. Knows nothing of gradloc.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from gradloc.demo.envelope import TINY
from gradloc.demo.model import save_weights

_WEIGHTS, _PLANTED = "weights.safetensors", "planted.json"


@dataclass(frozen=True)
class Testimony:
    """A struck step: `ranks[r][m]` is micro-batch m of rank r by tensor name; `planted` says what was done."""

    weights: Path
    ranks: tuple[tuple[dict[str, torch.Tensor], ...], ...]
    planted: dict[str, Any]
    model: str = TINY


def write_batch(folder: Path, rank: int, micro_batches: list[dict[str, torch.Tensor]]) -> None:
    """One rank's micro-batches."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"{index}.{name}": tensor.detach().contiguous().clone()
        for index, part in enumerate(micro_batches)
        for name, tensor in part.items()
    }
    part = folder / f"rank-{rank}.part"
    save_file(tensors, part)
    part.rename(folder / f"rank-{rank}.safetensors")


def write_weights(folder: Path, model: torch.nn.Module) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_weights(model, folder / _WEIGHTS)


def write_planted(folder: Path, planted: dict[str, Any]) -> None:
    (folder / _PLANTED).write_text(json.dumps(planted))


def read(folder: Path, world_size: int, model: str = TINY) -> Testimony | None:
    """The testimony, or None where nothing struck."""
    if not (folder / _PLANTED).exists():
        return None
    ranks = tuple(_micro_batches(load_file(folder / f"rank-{rank}.safetensors")) for rank in range(world_size))
    return Testimony(folder / _WEIGHTS, ranks, json.loads((folder / _PLANTED).read_text()), model)


def _micro_batches(tensors: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], ...]:
    found: dict[int, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        index, name = key.split(".", maxsplit=1)
        found.setdefault(int(index), {})[name] = tensor
    return tuple(found[index] for index in sorted(found))
