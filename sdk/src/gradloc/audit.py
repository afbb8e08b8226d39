"""An append-only record of what was decided, by whom and why: JSON, one object a line.

Knows nothing of what it records. A file may be edited by hand or cut short by a crash: lines that are
no JSON object are counted and left out, never guessed at.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LINE_BYTES_MAX = 65_536
LINES_MAX = 1_000_000  # a file beyond it is a mistake, not a record


def append(path: Path, record: Mapping[str, Any]) -> None:
    """Write one record and wait until it is on disk. Raises OSError, and ValueError for one too large."""
    line = json.dumps(dict(record), separators=(",", ":"), sort_keys=True).encode() + b"\n"
    if len(line) > LINE_BYTES_MAX:
        raise ValueError(f"record of {len(line)} bytes, over the limit of {LINE_BYTES_MAX}; shorten its reason")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        # After a crash the last line may lack its end: start a new one rather than lose both.
        file.write(line if _ends_well(path) else b"\n" + line)
        file.flush()
        os.fsync(file.fileno())


def read(path: Path) -> tuple[list[dict[str, Any]], int]:
    """(records, number of lines that were none). A file that does not exist holds nothing."""
    if not path.exists():
        return [], 0
    records: list[dict[str, Any]] = []
    num_rejected = 0
    with path.open("rb") as lines:
        for number, line in enumerate(lines):
            if number >= LINES_MAX:
                raise ValueError(f"{path} has more than {LINES_MAX} lines; expected a record of decisions")
            if not line.strip():
                continue
            try:
                record = json.loads(line) if len(line) <= LINE_BYTES_MAX else None
            except ValueError:  # also bytes that are no UTF-8
                record = None
            if isinstance(record, dict):
                records.append(record)
            else:
                num_rejected += 1
    return records, num_rejected


def _ends_well(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return True
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
