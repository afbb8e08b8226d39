"""Debug bundles: what a step knew, saved before the crash. Bounded; JSON and safetensors, never pickled.

    FOLDER/step-00000120/bundle.json           step, findings, the step's numbers as a document
    FOLDER/step-00000120/tensors.safetensors   the batch, as far as the bound allows

Of several ranks each has its own: step-00000120-rank-3. The document has the names of `documents`, so
`gradloc check LAYER FOLDER/step-...` reads a bundle again.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from gradloc.checks.documents import Document, DocumentRejected
from gradloc.checks.finding import CheckFinding
from gradloc_proto.codec import plain_number

FORMAT = "gradloc-bundle"
VERSION = 1
BYTES_MAX = 256 << 20  # of one bundle's tensors
BUNDLES_MAX = 5  # in one folder, of each rank: a storm must not fill the disk
_MANIFEST, _TENSORS = "bundle.json", "tensors.safetensors"
# What a document reads from tensors, under its own names.
_DOCUMENT_TENSORS = ("logp", "rollout_logp", "old_logp", "label_mask", "coefficient")


def write_bundle(
    folder: Path,
    step: int,
    findings: Sequence[CheckFinding],
    document: Document,
    tensors: Mapping[str, Tensor],
    *,
    bytes_max: int = BYTES_MAX,
    rank: int | None = None,
) -> Path:
    """Write a bundle and give its folder. Tensors that no longer fit are named as left out. Raises OSError."""
    home = folder / f"step-{step:08d}{_suffix(rank)}"
    home.mkdir(parents=True, exist_ok=True)
    kept: dict[str, Tensor] = {}
    left_out: list[str] = []
    room = bytes_max
    for name, tensor in sorted(tensors.items(), key=lambda one: one[1].numel() * one[1].element_size()):
        size = tensor.numel() * tensor.element_size()
        if size <= room:
            # A copy of its own: safetensors refuses tensors that share memory.
            kept[name] = tensor.detach().to("cpu").contiguous().clone()
            room -= size
        else:
            left_out.append(name)
    (home / _TENSORS).write_bytes(save(kept))
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "step": step,
        "findings": [one.to_json() for one in findings],
        "document": _jsonable(document),
        "left_out": left_out,
    }
    part = home / (_MANIFEST + ".part")
    part.write_text(json.dumps(manifest, indent=1, allow_nan=False))
    part.rename(home / _MANIFEST)
    return home


def num_bundles(folder: Path, rank: int | None = None) -> int:
    """Bundles that a rank has in a folder, those of earlier processes too: a job may crash again and again."""
    return sum(1 for _ in folder.glob(f"step-{'[0-9]' * 8}{_suffix(rank)}"))


def _suffix(rank: int | None) -> str:
    return "" if rank is None else f"-rank-{rank}"


def _jsonable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _jsonable(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(one) for one in value]
    if isinstance(value, float):
        return plain_number(value)
    return value if isinstance(value, int | str) or value is None else str(value)


def is_bundle(path: Path) -> bool:
    return (path / _MANIFEST).is_file()


def read_bundle(path: Path) -> Document:
    """The bundle's document, tensors as lists. Raises DocumentRejected."""
    try:
        manifest = json.loads((path / _MANIFEST).read_bytes())
    except (OSError, ValueError, RecursionError):
        raise DocumentRejected(f"{path.name}: {_MANIFEST} cannot be read; it was not written whole") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT or manifest.get("version") != VERSION:
        raise DocumentRejected(f"{path.name} is no bundle of version {VERSION}; use the release that wrote it")
    document = manifest.get("document")
    made = dict(document) if isinstance(document, dict) else {}
    try:
        tensors = load((path / _TENSORS).read_bytes())
    except (OSError, SafetensorError) as error:
        raise DocumentRejected(f"{path.name}: {_TENSORS} is missing or truncated: {str(error)[:80]}") from None
    made |= {name: tensors[name].double().tolist() for name in _DOCUMENT_TENSORS if name in tensors}
    return made
