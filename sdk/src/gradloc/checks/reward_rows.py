"""Rewards of a data file, row by row: the reward layer's checks on JSONL or Parquet. Bounded in rows."""

from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from gradloc.checks.documents import DocumentRejected
from gradloc.checks.finding import Report, Skipped, joined
from gradloc.checks.rewards import check_rewards
from gradloc.checks.row_text import fields_of, text_of
from gradloc.checks.rows import open_rows

ROWS_MAX = 200_000


def check_reward_rows(path: Path, bounds: tuple[float, float] | None = None) -> Report:
    """Rows of one uid form a group; without uids, rows of one prompt. Raises ValueError, SourceRejected."""
    rows = [row.values for row in islice(open_rows(path), ROWS_MAX) if row.problem is None]
    fields = fields_of(rows[:64], {})
    if "reward" not in fields:
        raise DocumentRejected(f"{path.name}: no field of rewards in its first rows; expected 'reward' or 'score'")
    groups = [_group(row, fields, index) for index, row in enumerate(rows)]
    lengths = [_length(row, fields) for row in rows]
    known = all(length is not None for length in lengths)
    report = check_rewards(
        [row.get(fields["reward"]) for row in rows],
        groups=groups,
        bounds=bounds,
        lengths=[length for length in lengths if length is not None] if known else None,
    )
    if len(rows) < ROWS_MAX:
        return report
    return joined([report, Report(skipped=(Skipped("later rows", f"only the first {ROWS_MAX:,} are looked at"),))])


def _group(row: Mapping[str, Any], fields: Mapping[str, str], index: int) -> object:
    uid = row.get(fields["uid"]) if "uid" in fields else None
    if uid is not None:
        return str(uid)
    prompt = text_of(row.get(fields["prompt"])) if "prompt" in fields else None
    return index if prompt is None else hash(prompt)


def _length(row: Mapping[str, Any], fields: Mapping[str, str]) -> float | None:
    """Tokens of the response where the row has ids, else its characters."""
    ids = row.get(fields["response_ids"]) if "response_ids" in fields else None
    if isinstance(ids, list):
        return float(len(ids))
    text = text_of(row.get(fields["response"])) if "response" in fields else None
    return None if text is None else float(len(text))
