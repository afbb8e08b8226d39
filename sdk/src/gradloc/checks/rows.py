"""Rows of a data set, one after the other: JSONL (also gzipped), Parquet, Hugging Face `datasets` folders.

The only door to pyarrow, which is optional. Knows nothing of what rows mean. Memory does
not grow with the number of rows.
"""

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol, cast

LINE_BYTES_MAX = 64 << 20  # a longer line is a broken file, not a row
PARQUET_BATCH_ROWS = 1_024
_INSTALL = "pip install 'gradloc[checks]'"


class SourceRejected(ValueError):
    """A source of rows that cannot be read; the text says what was expected and what to do."""


@dataclass(frozen=True)
class Row:
    """A row and its number from 0. `problem` is set where it could not be read; then `values` is empty."""

    number: int
    values: Mapping[str, Any]
    problem: str | None = None


class Rows(Protocol):
    """A source of rows. `fraction`: how much was read, 0 to 1, or None where that is not known."""

    def __iter__(self) -> Iterator[Row]: ...

    @property
    def fraction(self) -> float | None: ...


def rows_of(values: Iterable[Mapping[str, Any]]) -> Iterator[Row]:
    """Rows at hand, such as a `datasets.Dataset` or a streamed one."""
    for number, one in enumerate(values):
        yield Row(number, one)


def open_rows(path: Path) -> Rows:
    """Rows of a file or folder, by its name. Raises SourceRejected."""
    if not path.exists():
        raise SourceRejected(f"no file {path}; expected JSONL, Parquet or a folder of datasets.save_to_disk")
    if path.is_dir():
        return _Dataset(path)
    if path.suffix == ".parquet":
        return _Parquet(path)
    if path.suffix in (".jsonl", ".json", ".ndjson") or path.name.endswith((".jsonl.gz", ".ndjson.gz")):
        return _JsonLines(path)
    raise SourceRejected(f"{path.name}: unknown kind of file; expected .jsonl, .jsonl.gz, .parquet or a folder")


class _JsonLines:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._num_bytes = path.stat().st_size
        self._raw: IO[bytes] | None = None

    @property
    def fraction(self) -> float | None:
        if self._raw is None or self._raw.closed or not self._num_bytes:
            return None
        return min(1.0, self._raw.tell() / self._num_bytes)

    def __iter__(self) -> Iterator[Row]:
        with self._path.open("rb") as raw:
            self._raw = raw
            lines = cast("IO[bytes]", gzip.GzipFile(fileobj=raw)) if self._path.suffix == ".gz" else raw
            number = 0
            try:
                while line := lines.readline(LINE_BYTES_MAX):
                    if line.isspace():
                        continue
                    yield _row_of(number, line)
                    number += 1
            except (OSError, EOFError) as error:
                yield Row(number, {}, f"file ends or breaks here: {error}"[:120])


def _row_of(number: int, line: bytes) -> Row:
    if len(line) >= LINE_BYTES_MAX:
        return Row(number, {}, f"longer than {LINE_BYTES_MAX >> 20} MiB")
    try:
        values = json.loads(line)
    except UnicodeDecodeError as error:
        return Row(number, {}, f"not UTF-8 at byte {error.start}")
    except json.JSONDecodeError as error:
        return Row(number, {}, f"not JSON at character {error.pos}: {error.msg}")
    except (RecursionError, ValueError) as error:
        return Row(number, {}, f"not JSON that can be read: {type(error).__name__}")
    if not isinstance(values, dict):
        return Row(number, {}, f"a JSON {type(values).__name__}, not an object")
    return Row(number, values)


class _Parquet:
    def __init__(self, path: Path) -> None:
        try:
            from pyarrow import parquet
        except ImportError:
            raise SourceRejected(f"{path.name}: reading Parquet needs pyarrow; {_INSTALL}") from None
        try:
            self._file = parquet.ParquetFile(path)
        except (OSError, ValueError) as error:
            raise SourceRejected(f"{path.name}: not a Parquet file: {str(error)[:120]}") from None
        self._num_rows: int = self._file.metadata.num_rows
        self._num_read = 0

    @property
    def fraction(self) -> float | None:
        return self._num_read / self._num_rows if self._num_rows else None

    def __iter__(self) -> Iterator[Row]:
        number = 0
        try:
            for batch in self._file.iter_batches(batch_size=PARQUET_BATCH_ROWS):
                for values in batch.to_pylist():
                    yield Row(number, values)
                    number += 1
                    self._num_read = number
        except (OSError, ValueError) as error:
            yield Row(number, {}, f"file breaks here: {str(error)[:120]}")


class _Dataset:
    """A data set of the `datasets` library as it lies on disk: Arrow streams named by state.json."""

    def __init__(self, path: Path) -> None:
        try:
            from pyarrow import ipc
        except ImportError:
            raise SourceRejected(f"{path.name}: reading a saved data set needs pyarrow; {_INSTALL}") from None
        self._ipc = ipc
        if (path / "dataset_dict.json").is_file():
            splits = sorted(one.name for one in path.iterdir() if one.is_dir())
            raise SourceRejected(f"{path.name} holds the splits {splits}; give the folder of one of them")
        try:
            state = json.loads((path / "state.json").read_bytes())
            names = [one["filename"] for one in state["_data_files"]]
        except (OSError, ValueError, KeyError, TypeError):
            raise SourceRejected(
                f"{path}: no readable state.json; expected a folder of datasets.save_to_disk"
            ) from None
        if state.get("_indices_files"):
            raise SourceRejected(f"{path.name} was saved with an index; call flatten_indices() before save_to_disk")
        self._files = [path / Path(str(name)).name for name in names]
        self._num_files_read = 0

    @property
    def fraction(self) -> float | None:
        return self._num_files_read / len(self._files) if self._files else None

    def __iter__(self) -> Iterator[Row]:
        number = 0
        for file in self._files:
            try:
                with file.open("rb") as raw:
                    for batch in self._ipc.open_stream(raw):
                        for start in range(0, batch.num_rows, PARQUET_BATCH_ROWS):
                            for values in batch.slice(start, PARQUET_BATCH_ROWS).to_pylist():
                                yield Row(number, values)
                                number += 1
            except (OSError, ValueError) as error:
                yield Row(number, {}, f"{file.name} is missing or breaks here: {str(error)[:120]}")
                return
            self._num_files_read += 1
