"""Snapshots: all that is needed to recompute a step elsewhere, as files with digests.

    {store}/{run_id}/{attempt}/{step}/
        batch/rank-0.safetensors      tensors of the rank's micro-batches (names in MicroBatch; model_inputs)
        weights/model.safetensors     weights before the update
        tokenizer.json                if the trainer gave one
        parts/rank-0.json             what the rank wrote: sizes and sha256 (RankPart)
        manifest.json                 last: the snapshot exists when this does (Manifest)

Nothing here is ever unpickled, and no byte is believed before its sha256 was compared. Knows no
training loop (watch.py writes, the localizer reads). Shapes: B rows, T positions, R positions with
a logp (the last R of T).
"""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors

from gradloc.manifest import (
    FORMAT,
    VERSION,
    FileRecord,
    InputRecord,
    InputsRecord,
    Manifest,
    MicroBatchRecord,
    RankPart,
)
from gradloc.model_inputs import Belonging, ModelInputs, check, check_name
from gradloc.store import Store, StoredFile, StoreUnavailable, digest
from gradloc.tensor_file import pieces
from gradloc_proto.plain_text import visible

MANIFEST = "manifest.json"
WEIGHTS = "weights/model.safetensors"
TOKENIZER = "tokenizer.json"
PARTS_TIMEOUT_S = 60.0
MANIFEST_BYTES_MAX = 256 << 20  # a million uids; what is larger would be read whole before anything is known of it


class SnapshotRejected(ValueError):
    """A snapshot that is missing, truncated, altered or of another version; the text says which."""


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch of one rank as the trainer ran it.

    coefficient_BR is dL/dlogp as this rank's backward saw it (raw: also outside the mask, also NaN).
    entropy_coefficient_BR is dL/dentropy likewise, where the loss has such a term.
    """

    ids_BT: torch.Tensor  # int64 [B, T]
    mask_BR: torch.Tensor  # bool [B, R]
    logp_BR: torch.Tensor  # [B, R]
    coefficient_BR: torch.Tensor  # [B, R]
    attention_mask_BT: torch.Tensor | None = None  # bool [B, T]
    position_ids_BT: torch.Tensor | None = None  # int64 [B, T]
    rollout_logp_BR: torch.Tensor | None = None
    old_logp_BR: torch.Tensor | None = None
    advantage_BR: torch.Tensor | None = None
    ref_logp_BR: torch.Tensor | None = None  # of the reference policy, where the loss has a KL term
    rollout_ids_BR: torch.Tensor | None = None  # int64; what rollout_logp belongs to, where the trainer said so
    entropy_BR: torch.Tensor | None = None
    entropy_coefficient_BR: torch.Tensor | None = None
    uids: tuple[str, ...] = ()
    temperature: float = 1.0
    packed: bool = False  # the trainer ran what attention_mask_BT shows as one long row
    inputs: ModelInputs | None = None  # what else the model was called with, such as pictures

    @property
    def first_position(self) -> int:
        """Position in the row of the first token with a logp: T - R."""
        return self.ids_BT.shape[1] - self.logp_BR.shape[1]

    @property
    def num_tokens(self) -> int:
        return int(self.mask_BR.sum())


_NO_TENSORS = ("uids", "temperature", "packed", "inputs")
TENSOR_FIELDS = tuple(field.name for field in fields(MicroBatch) if field.name not in _NO_TENSORS)


def write_part(store: Store, rank: int, micro_batches: tuple[MicroBatch, ...], grad_factor: float) -> RankPart:
    """Write one rank's batch, then its part manifest."""
    tensors: dict[str, torch.Tensor] = {}
    records = []
    for index, micro_batch in enumerate(micro_batches):
        for name in TENSOR_FIELDS:
            tensor = getattr(micro_batch, name)
            if tensor is not None:
                tensors[f"{index}.{name}"] = tensor.detach().to("cpu")
        inputs = None if micro_batch.inputs is None else _attributed(micro_batch.inputs, micro_batch.ids_BT)
        for name, tensor in ({} if inputs is None else inputs.tensors).items():
            tensors[f"{index}.inputs.{name}"] = tensor.detach().to("cpu")
        record = None if inputs is None else _record_of(inputs)
        records.append(
            MicroBatchRecord(
                uids=micro_batch.uids, temperature=micro_batch.temperature, packed=micro_batch.packed, inputs=record
            )
        )
    name = f"batch/rank-{rank}.safetensors"
    part = RankPart(
        rank=rank,
        grad_factor=grad_factor,
        micro_batches=tuple(records),
        files={name: _record(store.write_pieces(name, pieces(tensors)))},
    )
    store.write(f"parts/rank-{rank}.json", part.model_dump_json().encode())
    return part


def _attributed(inputs: ModelInputs, ids_BT: torch.Tensor) -> ModelInputs:
    """Without tensors where it cannot be told whose they are: they would be of no use."""
    try:
        return inputs.attributed(ids_BT)
    except ValueError as error:
        return inputs.without_tensors(str(error))


def _record_of(inputs: ModelInputs) -> InputsRecord:
    return InputsRecord(
        placeholders=dict(inputs.placeholders),
        unusable=inputs.unusable,
        inputs={
            name: InputRecord(
                layout=own.layout,
                counts=own.counts,
                shape=tuple(inputs.tensors[name].shape),
                dtype=str(inputs.tensors[name].dtype).removeprefix("torch."),
            )
            for name, own in inputs.belongs.items()
        },
    )


def write_weights(store: Store, weights: Mapping[str, torch.Tensor]) -> dict[str, FileRecord]:
    """Write weights (names as in the model's state_dict, on the host, none sharing memory)."""
    return {WEIGHTS: _record(store.write_pieces(WEIGHTS, pieces(weights)))}


def write_tokenizer(store: Store, tokenizer_json: str) -> dict[str, FileRecord]:
    """Write a tokenizer in the `tokenizers` library's JSON."""
    return {TOKENIZER: _record(store.write(TOKENIZER, tokenizer_json.encode()))}


def collect_parts(
    store: Store,
    world_size: int,
    *,
    timeout_s: float = PARTS_TIMEOUT_S,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[RankPart, ...]:
    """All ranks' parts, waiting for late ones. Raises TimeoutError naming the ranks that never wrote."""
    deadline = clock() + timeout_s
    parts: dict[int, RankPart] = {}
    while True:
        for rank in range(world_size):
            name = f"parts/rank-{rank}.json"
            if rank not in parts and store.exists(name):
                parts[rank] = RankPart.model_validate_json(store.read(name, bytes_max=MANIFEST_BYTES_MAX))
        if len(parts) == world_size:
            return tuple(parts[rank] for rank in range(world_size))
        if clock() > deadline:
            missing = [rank for rank in range(world_size) if rank not in parts]
            raise TimeoutError(f"ranks {missing} wrote no part within {timeout_s:.0f} s")
        sleep(0.05)


def write_manifest(store: Store, manifest: Manifest) -> StoredFile:
    """Write the manifest: from here on the snapshot exists."""
    return store.write(MANIFEST, manifest.model_dump_json(indent=1).encode())


@dataclass(frozen=True)
class Snapshot:
    """A snapshot opened for reading; tensors are checked and loaded when asked for."""

    store: Store
    manifest: Manifest

    def micro_batches(self, rank: int) -> tuple[MicroBatch, ...]:
        """The rank's micro-batches in order, on the host. Raises SnapshotRejected."""
        part = self.manifest.parts[rank]
        if len(part.files) != 1:
            raise SnapshotRejected(
                f"snapshot {self.store.url}: the part of rank {rank} names {len(part.files)} files, expected one; "
                "take a new snapshot"
            )
        (name,) = part.files
        tensors = tensors_of(self._checked(name, part.files[name]), name)
        found = []
        for index, record in enumerate(part.micro_batches):
            values: dict[str, Any] = {
                field: tensors[f"{index}.{field}"] for field in TENSOR_FIELDS if f"{index}.{field}" in tensors
            }
            inputs = self._inputs(record.inputs, tensors, f"{visible(name, 120)}: micro-batch {index}", index)
            try:
                micro_batch = MicroBatch(
                    **values, uids=record.uids, temperature=record.temperature, packed=record.packed, inputs=inputs
                )
            except TypeError:
                raise SnapshotRejected(
                    f"snapshot {self.store.url}: {visible(name, 120)} lacks tensors of micro-batch {index}; "
                    "expected at least ids, mask, logp and coefficient; take a new snapshot"
                ) from None
            _check_shapes(self.store.url, name, index, micro_batch)
            found.append(micro_batch)
        return tuple(found)

    def _inputs(
        self, record: InputsRecord | None, tensors: Mapping[str, torch.Tensor], where: str, index: int
    ) -> ModelInputs | None:
        if record is None:
            return None
        own = {}
        try:
            for name, told in record.inputs.items():
                check_name(name)
                tensor = tensors.get(f"{index}.inputs.{name}")
                if tensor is None or tensor.is_complex() or tuple(tensor.shape) != told.shape:
                    raise ValueError(f"{name} is not there as the manifest has it")
                own[name] = tensor
        except ValueError as error:
            raise SnapshotRejected(f"snapshot {self.store.url}: {where}: {error}; take a new snapshot") from None
        belongs = {name: Belonging(told.layout, told.counts) for name, told in record.inputs.items()}
        unusable = None if record.unusable is None else visible(record.unusable, 400)
        return ModelInputs(own, placeholders=record.placeholders, belongs=belongs, unusable=unusable)

    def weights(self) -> dict[str, torch.Tensor]:
        """State dict as the trainer had it, tied names restored. Raises SnapshotRejected."""
        weights = tensors_of(self._checked(WEIGHTS, self.weights_record()), WEIGHTS)
        for name, source in self.manifest.tied_weights.items():
            if source not in weights:
                raise SnapshotRejected(f"snapshot {self.store.url}: tied weight {name} refers to {source}, not stored")
            weights[name] = weights[source]
        return weights

    def weights_record(self) -> FileRecord:
        """Of the file of the weights. Raises SnapshotRejected where there is none."""
        record = self.manifest.files.get(WEIGHTS)
        if record is None:
            raise SnapshotRejected(
                f"snapshot {self.store.url} holds no weights; it refers to "
                f"{(self.manifest.weights_at or 'no checkpoint')[:200]}: name the place with --weights, let the pool "
                "read there (GRADLOC_CHECKPOINTS), or localize inline"
            )
        return record

    def tokenizer_json(self) -> str | None:
        """JSON of the trainer's tokenizer, or None. Raises SnapshotRejected."""
        record = self.manifest.files.get(TOKENIZER)
        return None if record is None else self._checked(TOKENIZER, record).decode()

    def _checked(self, name: str, record: FileRecord) -> bytes:
        shown = visible(name, 120)
        try:
            # No byte of a file that is larger than the manifest says: it could be larger than the memory.
            data = self.store.read(name, bytes_max=record.num_bytes)
        except FileNotFoundError:
            raise SnapshotRejected(f"snapshot {self.store.url}: {shown} is missing; take a new snapshot") from None
        except ValueError as error:
            raise SnapshotRejected(
                f"snapshot {self.store.url}: {visible(str(error), 300)}; copy it again or take a new snapshot"
            ) from None
        found = digest(data)
        if found.num_bytes != record.num_bytes:
            raise SnapshotRejected(
                f"snapshot {self.store.url}: {shown} is truncated or altered: {found.num_bytes} bytes, "
                f"expected {record.num_bytes}; copy it again or take a new snapshot"
            )
        if found.sha256 != record.sha256:
            raise SnapshotRejected(
                f"snapshot {self.store.url}: {shown} was altered: sha256 {found.sha256[:12]}..., "
                f"expected {record.sha256[:12]}...; copy it again or take a new snapshot"
            )
        return data


def open_snapshot(url: str) -> Snapshot:
    """Open the snapshot at `url` (its folder). Raises SnapshotRejected or StoreUnavailable."""
    store = Store(url)
    try:
        data = store.read(MANIFEST, bytes_max=MANIFEST_BYTES_MAX)
    except FileNotFoundError:
        raise SnapshotRejected(
            f"no snapshot at {store.url}: {MANIFEST} is missing (a snapshot exists once its manifest does); "
            "give the folder that holds it, such as STORE/RUN/ATTEMPT/STEP"
        ) from None
    except ValueError as error:
        raise SnapshotRejected(f"snapshot {store.url}: {error}") from None
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        raise SnapshotRejected(
            f"snapshot {store.url}: {MANIFEST} is truncated or not JSON; copy it again or take a new snapshot"
        ) from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise SnapshotRejected(f"snapshot {store.url}: {MANIFEST} is not of format {FORMAT!r}")
    if document.get("version") != VERSION:
        raise SnapshotRejected(
            f"snapshot {store.url}: unknown version {visible(str(document.get('version')), 20)}, "
            f"expected {VERSION}; use the gradloc release that wrote it, or a newer one"
        )
    try:
        manifest = Manifest.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = visible(".".join(str(part) for part in first["loc"]), 80)
        raise SnapshotRejected(f"snapshot {store.url}: {MANIFEST}: {where}: {first['msg'][:120]}") from None
    ranks = [part.rank for part in manifest.parts]
    if len(ranks) != manifest.world_size or ranks != list(range(len(ranks))):
        raise SnapshotRejected(
            f"snapshot {store.url}: parts of ranks {visible(str(ranks), 120)}, "
            f"expected one of each of {str(manifest.world_size)[:20]} ranks; take a new snapshot"
        )
    return Snapshot(store, manifest)


def _record(stored: StoredFile) -> FileRecord:
    return FileRecord(num_bytes=stored.num_bytes, sha256=stored.sha256)


def tensors_of(data: bytes, name: str) -> dict[str, torch.Tensor]:
    """Tensors of a safetensors file. Raises SnapshotRejected."""
    try:
        return load_tensors(data)
    except SafetensorError as error:
        raise SnapshotRejected(f"{visible(name, 120)} is not a safetensors file: {visible(str(error), 120)}") from None


def _check_shapes(url: str, name: str, index: int, micro_batch: MicroBatch) -> None:
    where = f"snapshot {url}: {visible(name, 120)}"
    for field in ("ids_BT", "logp_BR"):
        if getattr(micro_batch, field).ndim != 2:
            raise SnapshotRejected(f"{where}: {field} of micro-batch {index} is no matrix; take a new snapshot")
    num_rows, num_positions = micro_batch.ids_BT.shape
    shape_BR = micro_batch.logp_BR.shape
    for field in TENSOR_FIELDS:
        tensor = getattr(micro_batch, field)
        if tensor is None:
            continue
        expected = (num_rows, num_positions) if field.endswith("_BT") else shape_BR
        if tensor.shape != expected or tensor.shape[0] != num_rows or shape_BR[1] > num_positions:
            raise SnapshotRejected(
                f"{where}: {field} of micro-batch {index} has shape {tuple(tensor.shape)}, expected {tuple(expected)}"
            )
        if not _is_of_kind(field, tensor.dtype):
            raise SnapshotRejected(
                f"{where}: {field} of micro-batch {index} is {tensor.dtype}, which it cannot be; take a new snapshot"
            )
    if micro_batch.inputs is not None:
        try:
            check(micro_batch.inputs, num_rows, num_positions)
        except ValueError as error:
            raise SnapshotRejected(f"{where}: micro-batch {index}: {error}; take a new snapshot") from None


def _is_of_kind(field: str, dtype: torch.dtype) -> bool:
    """Ids and positions are integers, masks anything but complex, all else is floating point."""
    is_integer = not dtype.is_floating_point and not dtype.is_complex and dtype != torch.bool
    if "mask" in field:
        return not dtype.is_complex
    return is_integer if "ids" in field else dtype.is_floating_point


__all__ = [
    "FileRecord",
    "Manifest",
    "MicroBatch",
    "RankPart",
    "Snapshot",
    "SnapshotRejected",
    "StoreUnavailable",
    "collect_parts",
    "open_snapshot",
    "tensors_of",
    "write_manifest",
    "write_part",
    "write_tokenizer",
    "write_weights",
]
