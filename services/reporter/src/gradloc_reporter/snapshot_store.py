"""The snapshots in their store, as places and sizes; removes whole ones. The only door to fsspec here.

Touches nothing but folders {root}/{run}/{attempt}/{step}: what trainers say of paths is not believed.
Reads no byte of a file. Remote file systems (s3://, gs://) need their fsspec plug-in.
"""

import math
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import fsspec

from gradloc_proto.identities import RUN_ID_PATTERN
from gradloc_reporter.snapshot_rules import Found, Place

FILES_MAX = 500_000  # looked at in one pass; more are left for when these are fewer
MANIFEST = "manifest.json"  # the snapshot exists while this does: it goes first
_RUN, _NUMBER = re.compile(RUN_ID_PATTERN), re.compile(r"^(0|[1-9][0-9]{0,17})$")
_TIMES = ("mtime", "LastModified", "last_modified", "updated", "created")  # names of a file's time, by file system


class StoreUnavailable(OSError):
    """The store cannot be listed, or a snapshot in it not removed; the text is one line."""


class SnapshotStore:
    """Raises ValueError for a URL that cannot be a store's."""

    def __init__(self, url: str) -> None:
        if "://" not in url:
            url = Path(url).resolve().as_uri()
        try:
            self._fs, self._root = fsspec.core.url_to_fs(url)
        except (ValueError, ImportError) as error:
            raise ValueError(
                f"--snapshots {url.split('://', maxsplit=1)[0]}://...: {str(error)[:160]}; expected a URL that fsspec "
                "can open, such as file:///data/gradloc or s3://bucket/prefix (with s3fs installed)"
            ) from None
        self._root = self._root.rstrip("/")
        if not self._root:
            raise ValueError("--snapshots is the root of a file system; expected the folder that trainers write to")

    def found(self) -> list[Found]:
        """Every snapshot, half-written ones too. Raises StoreUnavailable."""
        try:
            self._fs.invalidate_cache()
            files = self._fs.find(self._root, detail=True)
        except FileNotFoundError:
            return []
        except Exception as error:  # plug-ins raise what they like
            raise StoreUnavailable(f"cannot list the snapshots: {_reason(error)}") from error
        sizes: dict[Place, int] = {}
        times: dict[Place, float] = {}
        for index, (path, info) in enumerate(files.items()):
            place = _place(path.removeprefix(self._root).strip("/").split("/"))
            if place is None or index >= FILES_MAX:
                continue
            sizes[place] = sizes.get(place, 0) + int(info.get("size") or 0)
            times[place] = max(times.get(place, -math.inf), _when(info))
        return [Found(place, sizes[place], times[place]) for place in sizes]

    def remove(self, place: Place) -> None:
        """Remove one snapshot; one that is gone already is removed. Raises StoreUnavailable."""
        folder = f"{self._root}/{place}"
        try:
            if self._fs.exists(f"{folder}/{MANIFEST}"):
                self._fs.rm_file(f"{folder}/{MANIFEST}")
            self._fs.rm(folder, recursive=True)
        except FileNotFoundError:
            pass
        except Exception as error:
            raise StoreUnavailable(f"cannot remove {place}: {_reason(error)}") from error


def place_of(path: str, *, run_id: str, attempt: int) -> Place | None:
    """Of a path that a trainer told; None where its end is not that run's and attempt's."""
    place = _place([*path.rstrip("/").split("/")[-3:], ""])
    return place if place is not None and (place.run_id, place.attempt) == (run_id, attempt) else None


def _place(parts: list[str]) -> Place | None:
    if len(parts) < 4 or not _RUN.match(parts[0]) or not _NUMBER.match(parts[1]) or not _NUMBER.match(parts[2]):
        return None
    return Place(parts[0], int(parts[1]), int(parts[2]))


def _when(info: dict[str, Any]) -> float:
    """A file's time in seconds since 1970; infinite when it has none, so that it is never old."""
    value = next((info[name] for name in _TIMES if info.get(name) is not None), None)
    try:
        if isinstance(value, str):
            value = datetime.fromisoformat(value)
        if isinstance(value, datetime):
            value = (value if value.tzinfo is not None else value.replace(tzinfo=UTC)).timestamp()
        found = math.inf if value is None else float(value)
    except (TypeError, ValueError, OverflowError):
        return math.inf
    return math.inf if math.isnan(found) else found


def _reason(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or type(error).__name__)[:200]
