"""The snapshot store: bytes under names in any fsspec file system. The only door to fsspec.

Knows nothing of what the bytes mean. Remote file systems (s3://, gs://) need their fsspec plug-in.
"""

import contextlib
import hashlib
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import fsspec


@dataclass(frozen=True, slots=True)
class StoredFile:
    """Size and sha256 of a file as written; a reader compares both before it believes a byte."""

    num_bytes: int
    sha256: str


class Readable(Protocol):
    def read(self, num_bytes: int, /) -> bytes: ...


class StoreUnavailable(OSError):
    """The store cannot be reached, or a name in it cannot be read or written."""


def digest(data: bytes) -> StoredFile:
    return StoredFile(len(data), hashlib.sha256(data).hexdigest())


class Store:
    """A prefix in a file system. `url` is e.g. file:///data/gradloc, s3://bucket/prefix, memory://x."""

    def __init__(self, url: str) -> None:
        if "://" not in url:
            url = Path(url).resolve().as_uri()
        self.url = url.rstrip("/")
        try:
            self._fs, self._root = fsspec.core.url_to_fs(self.url)
        except (ValueError, ImportError) as error:
            raise ValueError(
                f"store {self.url.split('://', maxsplit=1)[0]}://...: {error}; expected a URL that fsspec can open, "
                "such as file:///data/gradloc or s3://bucket/prefix (with s3fs installed)"
            ) from None

    def child(self, *names: str | int) -> "Store":
        """The store below this prefix."""
        return Store("/".join([self.url, *(str(name) for name in names)]))

    def _path(self, name: str) -> str:
        if name.startswith("/") or ".." in name.split("/"):
            raise ValueError(f"file name {name[:80]!r} leaves the snapshot; expected a relative name without '..'")
        return f"{self._root}/{name}"

    def write(self, name: str, data: bytes) -> StoredFile:
        """Write a whole file; readers see all of it or nothing (a local file is renamed into place)."""
        path = self._path(name)
        try:
            self._fs.makedirs(path.rsplit("/", maxsplit=1)[0], exist_ok=True)
            if "file" in _protocols(self._fs):
                part = f"{path}.{secrets.token_hex(4)}.part"  # another writer of the same name has its own
                self._fs.pipe_file(part, data)
                self._fs.mv(part, path)
            else:
                self._fs.pipe_file(path, data)
        except OSError as error:
            raise StoreUnavailable(f"cannot write {name} to the store: {_reason(error)}") from error
        return digest(data)

    def write_pieces(self, name: str, pieces: Iterable[memoryview]) -> StoredFile:
        """`write`, of what need not be in memory at once; a remote file that broke off may be seen until written again.
        Other threads run meanwhile."""
        path = self._path(name)
        local = "file" in _protocols(self._fs)
        written = path + ".part" if local else path
        found, num_bytes = hashlib.sha256(), 0
        try:
            self._fs.makedirs(path.rsplit("/", maxsplit=1)[0], exist_ok=True)
            with self._fs.open(written, "wb") as stream:
                for piece in pieces:
                    found.update(piece)
                    stream.write(piece)
                    num_bytes += len(piece)
            if local:
                self._fs.mv(written, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                self._fs.rm_file(written)  # a full disk needs the room
            raise StoreUnavailable(f"cannot write {name} to the store: {_reason(error)}") from error
        return StoredFile(num_bytes, found.hexdigest())

    def read(self, name: str, *, bytes_max: int) -> bytes:
        """A whole file. Raises FileNotFoundError, ValueError for a file of more than `bytes_max` bytes (none is read),
        or StoreUnavailable for any other failure."""
        path = self._path(name)
        try:
            num_bytes = self._fs.size(path)  # None where the store does not say
            if num_bytes is not None and num_bytes > bytes_max:
                raise ValueError(f"{name} has {num_bytes} bytes, expected at most {bytes_max}")
            data: bytes = self._fs.cat_file(path)
        except FileNotFoundError:
            raise FileNotFoundError(name) from None
        except OSError as error:
            raise StoreUnavailable(f"cannot read {name} from the store: {_reason(error)}") from error
        return data

    @contextlib.contextmanager
    def reading(self, name: str) -> Iterator[Readable]:
        """A file, to be read from its start, piece by piece. Raises FileNotFoundError or StoreUnavailable."""
        path = self._path(name)
        try:
            with self._fs.open(path, "rb") as stream:
                yield stream
        except FileNotFoundError:
            raise FileNotFoundError(name) from None
        except OSError as error:
            raise StoreUnavailable(f"cannot read {name} from the store: {_reason(error)}") from error

    def remove_all(self) -> None:
        """Remove everything under this prefix."""
        try:
            if self._fs.exists(self._root):
                self._fs.rm(self._root, recursive=True)
        except FileNotFoundError:  # somebody else removes it too
            return
        except OSError as error:
            raise StoreUnavailable(f"cannot remove a prefix of the store: {_reason(error)}") from error

    def exists(self, name: str) -> bool:
        try:
            return bool(self._fs.exists(self._path(name)))
        except OSError as error:
            raise StoreUnavailable(f"cannot look up {name} in the store: {_reason(error)}") from error


def _protocols(file_system: fsspec.AbstractFileSystem) -> tuple[str, ...]:
    protocol = file_system.protocol
    return (protocol,) if isinstance(protocol, str) else tuple(protocol)


def _reason(error: OSError) -> str:
    return (error.strerror or type(error).__name__)[:200]
