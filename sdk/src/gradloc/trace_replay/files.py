"""Logs of finished runs: CSV, W&B export, trainer_state.json, JSON lines, TensorBoard events, console output.

The format is told from the content. Nothing read is trusted: no pickle, no eval, sizes are bounded.
"""

import csv
import json
import re
from collections.abc import Mapping
from pathlib import Path

from gradloc.trace_replay import tensorboard
from gradloc.trace_replay.rows import Row, columns_of, rows_of
from gradloc_proto.plain_text import visible

FILE_BYTES_MAX = 1 << 30
FORMATS = "CSV (also a W&B export), trainer_state.json, JSON lines, TensorBoard events, or a console log of TRL or verl"

_NAMES_SHOWN_MAX = 200  # characters of a log's columns in an error
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_VALUE = r"(?:np\.|numpy\.)?(?:(?:float|int)\d*\()?['\"]?([-+]?(?:nan|inf(?:inity)?|[\d.]+(?:e[-+]?\d+)?))['\"]?\)?"
_TRL = re.compile(r"['\"]([\w/@. -]+)['\"]\s*:\s*" + _VALUE + r"(?=\s*[,}])", re.IGNORECASE)
_VERL = re.compile(r"(?:^|\s)([\w/@.-]+):" + _VALUE + r"(?=\s|$)", re.IGNORECASE)


def read(path: Path) -> tuple[str, list[Row]]:
    """Format and rows of a log. Raises ValueError that says what was wrong and what was expected."""
    try:
        size = path.stat().st_size
        if size > FILE_BYTES_MAX:
            raise ValueError(f"{path}: {size} bytes; expected at most {FILE_BYTES_MAX}")
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}; expected a file: {FORMATS}") from None
    if tensorboard.is_events(data):
        kind, records = "tensorboard", tensorboard.records_of(data)
    else:
        kind, records = _text_records(data.decode("utf-8", errors="replace"), path)
    names = dict.fromkeys(name for record in records for name in record)
    columns = columns_of(names)
    if "norm" not in columns:
        shown = visible(", ".join(list(names)[:8]), _NAMES_SHOWN_MAX) or "nothing"
        raise ValueError(f"{path}: no gradient norm among the columns of this {kind} log ({shown}); expected grad_norm")
    rows = rows_of(records, columns)
    if not rows:
        column = visible(columns["norm"], _NAMES_SHOWN_MAX)
        raise ValueError(f"{path}: column {column!r} holds no number; expected a norm at some step")
    return kind, rows


def _text_records(text: str, path: Path) -> tuple[str, list[Mapping[str, object]]]:
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    if path.suffix == ".json" or (first.startswith("{") and '"log_history"' in text):
        return "trainer_state", _history(text, path)
    if first.startswith('{"') and (records := _json_lines(text)):
        return "json lines", records
    if records := _console(text, _VERL, need="grad_norm:"):
        return "verl console", records
    if records := _console(text, _TRL, need="grad_norm"):
        return "TRL console", records
    if "," in first or "\t" in first:
        return "csv", _table(text, path, delimiter="\t" if "\t" in first else ",")
    raise ValueError(f"{path}: not a log that is known; expected {FORMATS}")


def _table(text: str, path: Path, *, delimiter: str) -> list[Mapping[str, object]]:
    try:
        # Cells beyond the last column have a name as well, which no number has.
        return list(csv.DictReader(text.splitlines(), restkey="", delimiter=delimiter))
    except csv.Error as error:
        raise ValueError(f"{path}: not a table ({error}); expected {FORMATS}") from None


def _history(text: str, path: Path) -> list[Mapping[str, object]]:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON ({str(error)[:80]}); expected a trainer_state.json") from None
    history = document.get("log_history") if isinstance(document, dict) else document
    if not isinstance(history, list):
        raise ValueError(f"{path}: no list log_history in it; expected a trainer_state.json")
    return [entry for entry in history if isinstance(entry, dict)]


def _json_lines(text: str) -> list[Mapping[str, object]]:
    records: list[Mapping[str, object]] = []
    for line in text.splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue  # a line cut off by a crash is no reason to lose the others
        if isinstance(record, dict):
            records.append(record)
    return records


def _console(text: str, pattern: re.Pattern[str], *, need: str) -> list[Mapping[str, object]]:
    lines = (_ANSI.sub("", line) for line in re.split(r"[\r\n]+", text) if need in line)
    return [record for line in lines if (record := dict(pattern.findall(line)))]
