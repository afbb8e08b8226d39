"""What one row's fields mean: text of prompts (plain or chat messages), numbers, token lists. Pure."""

import math
from collections.abc import Mapping, Sequence
from decimal import Decimal
from numbers import Real
from typing import Any

NAMES: Mapping[str, tuple[str, ...]] = {
    "prompt": ("prompt", "question", "problem", "query", "instruction", "input"),
    "response": ("response", "completion", "output", "solution_text"),
    "reward": ("reward", "score"),
    "uid": ("uid", "group", "group_id", "prompt_id"),
    "ids": ("input_ids", "token_ids", "trained_ids"),
    "response_ids": ("response_ids", "completion_ids", "sampled_ids"),
    "mask": ("attention_mask",),
    "loss_mask": ("response_mask", "loss_mask", "label_mask"),
    "labels": ("labels",),
    "logp": ("rollout_logp", "rollout_log_probs", "logprobs", "logp"),
}
PEEKED_ROWS = 64  # what fields a data set has is read off its first rows


def fields_of(rows: Sequence[Mapping[str, Any]], given: Mapping[str, str]) -> dict[str, str]:
    """Meaning to field name: as given, else the first known name that occurs in the rows."""
    present = {name for row in rows for name in row}
    found: dict[str, str] = {}
    for meaning, names in NAMES.items():
        name = given.get(meaning) or next((name for name in names if name in present), None)
        if name is not None:
            found[meaning] = name
    return found


def required_of(rows: Sequence[Mapping[str, Any]], fields: Mapping[str, str]) -> frozenset[str]:
    """Fields that over half of the rows fill: a row without one of them is the exception."""
    return frozenset(
        name for name in fields.values() if 2 * sum(row.get(name) is not None for row in rows) > len(rows) > 0
    )


def text_of(value: Any) -> str | None:
    """Text of a string or of chat messages (their contents, line by line); None for anything else."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(one, dict) for one in value):
        parts = []
        for message in value:
            content = message.get("content")
            if isinstance(content, list):
                content = "\n".join(str(p["text"]) for p in content if isinstance(p, dict) and "text" in p)
            if not isinstance(content, str):
                return None
            parts.append(content)
        return "\n".join(parts)
    return None


def number_of(value: Any) -> float | None:
    """The number that float() makes of it; None where it makes none. NaN and infinities are numbers here.

    numpy's scalars are numbers.Real; Parquet has decimals.
    """
    if isinstance(value, Real | Decimal | str):
        try:
            return float(value)
        except (ValueError, OverflowError):
            return None
    return None


def numbers_of(value: Any) -> list[float] | None:
    """A flat list of numbers, NaN for null; None where it is none."""
    if not isinstance(value, list | tuple):
        return None
    made = [math.nan if one is None else number_of(one) for one in value]
    return None if any(one is None for one in made) else [one for one in made if one is not None]


def ids_of(value: Any) -> list[int] | None:
    """A flat list of token ids; None where it is none."""
    if not isinstance(value, list | tuple) or not all(isinstance(one, int) for one in value):
        return None
    return list(value)
