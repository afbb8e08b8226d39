"""Weights read piece by piece, for processes that keep a part of each tensor and never hold all of them.

Of a snapshot, whose digest is compared when the last byte went by, or of a checkpoint that it refers to. Knows no
model and no process.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from gradloc.snapshot import WEIGHTS, Snapshot, SnapshotRejected
from gradloc.store import Readable, Store, StoreUnavailable
from gradloc.tensor_file import PIECE_BYTES, Described, elements, header
from gradloc.weights_elsewhere import Fingerprint, files_of, is_same_as
from gradloc_proto.plain_text import visible


@dataclass
class WeightFiles:
    """Files of tensors. digests: (bytes, sha256) by file, where they are known. tied: second names of tensors.

    fingerprint: of the tensors that were read, once all were.
    """

    store: Store
    names: tuple[str, ...]
    digests: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    tied: Mapping[str, str] = field(default_factory=dict)
    fingerprint: Fingerprint = field(default_factory=dict)
    piece_bytes: int = PIECE_BYTES
    _numel: dict[str, int] = field(default_factory=dict)

    def shapes(self) -> dict[str, torch.Tensor]:
        """Tensors without values (on "meta"), tied names restored. Raises SnapshotRejected or StoreUnavailable."""
        found: dict[str, torch.Tensor] = {}
        for name in self.names:
            with self._opened(name) as (_, described):
                found |= {one.name: torch.empty(one.shape, dtype=one.dtype, device="meta") for one in described}
        for name, source in self.tied.items():
            if source not in found:
                raise SnapshotRejected(f"snapshot {self.store.url}: tied weight {name} refers to {source}, not stored")
            found[name] = found[source]
        return found

    def pieces(self) -> Iterator[tuple[str, int, torch.Tensor]]:
        """(tensor, number of the first element, some of its elements), all of them. Raises as `shapes`; what was taken
        in before counts for nothing then."""
        self.fingerprint, self._numel = {}, {}
        for name in self.names:
            with self._opened(name) as (stream, described):
                for one in described:
                    if one.dtype.is_floating_point:
                        self.fingerprint[one.name], self._numel[one.name] = (0.0, 0.0), one.numel
                for one, at, flat in elements(stream, described, self.piece_bytes):
                    if one.dtype.is_floating_point:
                        self._add(one, flat)
                    yield one.name, at, flat
                known = self.digests.get(name)
                if known is not None and known != (stream.num_bytes, stream.sha256):
                    raise ValueError(
                        f"it was altered: {stream.num_bytes} bytes of sha256 {stream.sha256[:12]}..., expected "
                        f"{known[0]} of {known[1][:12]}..."
                    )

    def is_of(self, fingerprint: Fingerprint) -> bool:
        """Whether what was read is what this fingerprint was taken of."""
        return is_same_as(fingerprint, self.fingerprint, self._numel)

    def _add(self, one: Described, flat: torch.Tensor) -> None:
        total, square = self.fingerprint[one.name]
        wide = flat.double()
        self.fingerprint[one.name] = (total + float(wide.sum()), square + float(wide.square().sum()))

    def _opened(self, name: str) -> "_Opened":
        return _Opened(self, name)


class _Opened:
    """A file of these, past its header; whatever goes wrong inside is told of it."""

    def __init__(self, files: WeightFiles, name: str) -> None:
        self._files = files
        self._name = name
        self._reading = files.store.reading(name)

    def __enter__(self) -> "tuple[_Hashed, tuple[Described, ...]]":
        try:
            stream = _Hashed(self._reading.__enter__())
        except FileNotFoundError as error:
            raise self._rejected(error) from None
        try:
            return stream, header(stream)
        except ValueError as error:
            self._reading.__exit__(None, None, None)
            raise self._rejected(error) from None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._reading.__exit__(None, None, None)
        if isinstance(error, ValueError) and not isinstance(error, SnapshotRejected):
            raise self._rejected(error) from None
        if isinstance(error, OSError) and not isinstance(error, StoreUnavailable):
            raise StoreUnavailable(f"cannot read {self._name} from the store: {type(error).__name__}") from error

    def _rejected(self, error: Exception) -> SnapshotRejected:
        what = "it is missing" if isinstance(error, FileNotFoundError) else visible(str(error), 200)
        return SnapshotRejected(
            f"weights {visible(self._name, 120)} at {self._files.store.url}: {what}; copy it again or take a new "
            "snapshot"
        )


class _Hashed:
    def __init__(self, stream: Readable) -> None:
        self._stream = stream
        self._found = hashlib.sha256()
        self.num_bytes = 0

    def read(self, num_bytes: int, /) -> bytes:
        data = self._stream.read(num_bytes)
        self._found.update(data)
        self.num_bytes += len(data)
        return data

    @property
    def sha256(self) -> str:
        return self._found.hexdigest()


def of_snapshot(snapshot: Snapshot) -> WeightFiles:
    """Raises SnapshotRejected for one that holds no weights."""
    record = snapshot.weights_record()
    return WeightFiles(
        snapshot.store, (WEIGHTS,), {WEIGHTS: (record.num_bytes, record.sha256)}, snapshot.manifest.tied_weights
    )


def of_checkpoint(url: str) -> WeightFiles:
    """Raises SnapshotRejected or StoreUnavailable."""
    store = Store(url)
    try:
        return WeightFiles(store, tuple(files_of(store)))
    except ValueError as error:
        raise SnapshotRejected(f"weights at {store.url}: {str(error)[:200]}") from None
