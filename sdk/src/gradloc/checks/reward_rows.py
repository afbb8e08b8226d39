"""Rewards of a data file, row by row: the reward layer's checks on JSONL, Parquet or a saved data set.

Keeps a number, a group and a length of each row, not its texts.
"""

from collections.abc import Mapping
from itertools import chain, islice
from pathlib import Path
from typing import Any

from gradloc.checks.documents import DocumentRejected
from gradloc.checks.finding import Report, Skipped, joined
from gradloc.checks.rewards import check_rewards
from gradloc.checks.row_text import PEEKED_ROWS, fields_of, text_of
from gradloc.checks.rows import open_rows

ROWS_MAX = 1_000_000


def check_reward_rows(path: Path, bounds: tuple[float, float] | None = None) -> Report:
    """Rows of one uid form a group; without uids, rows of one prompt. Raises ValueError, SourceRejected."""
    stream = iter(open_rows(path))
    peeked = list(islice(stream, PEEKED_ROWS))
    fields = fields_of([row.values for row in peeked if row.problem is None], {})
    if "reward" not in fields:
        raise DocumentRejected(f"{path.name}: no field of rewards in its first rows; expected 'reward' or 'score'")
    first_rows: dict[object, int] = {}
    rewards: list[object] = []
    groups: list[object] = []
    lengths: list[float | None] = []
    num_unreadable = 0
    for row in islice(chain(peeked, stream), ROWS_MAX):
        if row.problem is not None:
            num_unreadable += 1
            continue
        rewards.append(row.values.get(fields["reward"]))
        name = _group(row.values, fields, row.number)
        first = first_rows.setdefault(name, row.number)
        groups.append(name if isinstance(name, str) else f"of row {first}")
        lengths.append(_length(row.values, fields))
    known = [length for length in lengths if length is not None]
    report = check_rewards(rewards, groups=groups, bounds=bounds, lengths=known if len(known) == len(lengths) else None)
    skipped = []
    if num_unreadable:
        skipped.append(Skipped(f"{num_unreadable:,} rows", "they cannot be read; see `gradloc check data`"))
    if next(stream, None) is not None:
        skipped.append(Skipped("later rows", f"only the first {ROWS_MAX:,} are looked at"))
    return joined([report, Report(skipped=tuple(skipped))])


def _group(row: Mapping[str, Any], fields: Mapping[str, str], number: int) -> object:
    uid = row.get(fields["uid"]) if "uid" in fields else None
    if uid is not None:
        return str(uid)
    prompt = text_of(row.get(fields["prompt"])) if "prompt" in fields else None
    return f"row {number}" if prompt is None else hash(prompt)  # never its text


def _length(row: Mapping[str, Any], fields: Mapping[str, str]) -> float | None:
    """Tokens of the response where the row has ids, else its characters."""
    ids = row.get(fields["response_ids"]) if "response_ids" in fields else None
    if isinstance(ids, list):
        return float(len(ids))
    text = text_of(row.get(fields["response"])) if "response" in fields else None
    return None if text is None else float(len(text))
