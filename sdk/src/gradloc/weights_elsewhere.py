"""Weights that a snapshot refers to instead of holding: where they lie, and whether they are the step's own.

A copy of a large model's weights for each incident would be of no use. So its snapshots keep batch and coefficients,
the place of a checkpoint (Hugging Face layout), and a fingerprint: two sums of each parameter, exact enough that one
update shows in them. Knows no model and no training loop.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

import torch

from gradloc.snapshot import SnapshotRejected, tensors_of
from gradloc.store import Store, StoreUnavailable

WEIGHTS_BYTES_MAX = 32 << 30  # a copy of more than this would take minutes to write and to read, for each incident
SAME = 1e-10  # of the largest that a sum of so many elements can be: rounding of float64 sums in another order
INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
FILES_MAX = 1_024
FILE_BYTES_MAX, INDEX_BYTES_MAX = 1 << 37, 1 << 26  # 128 GiB: nobody writes larger pieces; 64 MiB of names
Fingerprint = dict[str, tuple[float, float]]


def fingerprint_of(weights: Mapping[str, torch.Tensor]) -> Fingerprint:
    """Sum and square sum of each tensor in float64, on its own device; one transfer to the host."""
    floating = {name: tensor.detach() for name, tensor in weights.items() if tensor.is_floating_point()}
    if not floating:
        return {}
    sums = torch.stack(
        [torch.stack([wide.sum(), wide.square().sum()]).cpu() for wide in (one.double() for one in floating.values())]
    )
    return {name: (float(one), float(square)) for name, (one, square) in zip(floating, sums.tolist(), strict=True)}


def is_same(fingerprint: Fingerprint, weights: Mapping[str, torch.Tensor]) -> bool:
    """Whether these are the weights that the fingerprint was taken of. False where there is no fingerprint."""
    if not fingerprint:
        return False
    own = fingerprint_of({name: weights[name] for name in fingerprint if name in weights})
    return is_same_as(fingerprint, own, {name: tensor.numel() for name, tensor in weights.items()})


def is_same_as(fingerprint: Fingerprint, own: Fingerprint, numel: Mapping[str, int]) -> bool:
    """`is_same`, by the fingerprint of these weights and how many elements each has."""
    own = {name: sums for name, sums in own.items() if name in fingerprint}
    for name, (total, square) in own.items():
        told_total, told_square = fingerprint[name]
        size = math.sqrt(max(square, 0.0) * numel[name])
        alike = abs(total - told_total) <= SAME * size and abs(square - told_square) <= SAME * square
        if not (math.isfinite(square) and alike):
            return False
    return bool(fingerprint) and own.keys() == fingerprint.keys()


def read_checkpoint(url: str) -> dict[str, torch.Tensor]:
    """Tensors of a checkpoint's folder: model.safetensors, or the files that its index names. Raises SnapshotRejected
    or StoreUnavailable."""
    store = Store(url)
    found: dict[str, torch.Tensor] = {}
    try:
        for name in files_of(store):
            found |= tensors_of(store.read(name, bytes_max=FILE_BYTES_MAX), name)
    except FileNotFoundError:
        raise SnapshotRejected(
            f"no weights at {store.url}: neither {WHOLE} nor {INDEX} with its files; give a checkpoint in the Hugging "
            "Face layout"
        ) from None
    except StoreUnavailable:
        raise
    except ValueError as error:
        raise SnapshotRejected(f"weights at {store.url}: {str(error)[:200]}") from None
    return found


def files_of(store: Store) -> list[str]:
    """Names of a checkpoint's files of tensors. Raises ValueError for an index that is none."""
    if not store.exists(INDEX):
        return [WHOLE]
    try:
        document: Any = json.loads(store.read(INDEX, bytes_max=INDEX_BYTES_MAX))
        names = sorted({str(name) for name in document["weight_map"].values()})
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ValueError(f"{INDEX} is no index of weights") from None
    if not 0 < len(names) <= FILES_MAX or any(not name.endswith(".safetensors") or "/" in name for name in names):
        raise ValueError(f"{INDEX} names what are no weights; expected up to {FILES_MAX} .safetensors beside it")
    return names
