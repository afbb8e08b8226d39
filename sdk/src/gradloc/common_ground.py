"""What several culprit rows have in common, or where a step's norm lies when no few rows hold it.

By prompt (rows of one prompt are a group), micro-batch, rank, and data source (a uid up to its first "/" or
":"). Where the rows are most of such a part, or its rows hold nearly all of the norm, the part is the culprit.
Knows shares and places only.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from gradloc.policy import PlacedBatch

Row = tuple[int, int]
TOKENS_PART_MAX = 0.6  # of the step: a larger part is nearly all of it
DENSITY_MIN = 1.5  # part of the norm against part of the tokens
SHARE_MIN = 0.8
PART_OF_GROUND_MIN = 0.5  # so many of a part's rows are culprits: the part is
Kind = Literal["group", "micro-batch", "rank", "data-source"]


@dataclass(frozen=True)
class Ground:
    """A part of the step, by name, with all of its rows that have a coefficient. `share`: of the squared norm."""

    kind: Kind
    name: str
    rows: tuple[Row, ...]
    share: float | None = None


def _prompt(placed: PlacedBatch, row: int) -> Hashable:
    batch = placed.batch
    ids = batch.ids_BT[row, : batch.first_position].tolist()
    pictures = () if batch.inputs is None else batch.inputs.print_of(row)
    if batch.attention_mask_BT is None:
        return tuple(ids), pictures
    attended = batch.attention_mask_BT[row, : batch.first_position].tolist()
    return tuple(token_id for token_id, used in zip(ids, attended, strict=True) if used), pictures


def _source(placed: PlacedBatch, row: int) -> Hashable:
    uid = placed.batch.uids[row] if row < len(placed.batch.uids) else ""
    at = min((uid.find(mark) for mark in "/:" if mark in uid), default=-1)
    return uid[:at] if at > 0 else None


# Finest first: who shares a prompt is told so, though all of them lie in one micro-batch.
_AXES: tuple[tuple[Kind, Callable[[PlacedBatch, int], Hashable], Callable[[PlacedBatch, int], str]], ...] = (
    ("group", _prompt, lambda one, row: f"the prompt of rank {one.rank} micro-batch {one.index} sequence {row}"),
    ("micro-batch", lambda one, _: (one.rank, one.index), lambda one, _: f"rank {one.rank} micro-batch {one.index}"),
    ("rank", lambda placed, _: placed.rank, lambda placed, _: f"rank {placed.rank}"),
    ("data-source", _source, lambda _placed, _row: "one data source"),
)


def common_to(batches: Sequence[PlacedBatch], rows: Sequence[Row], coefficients: Sequence[Tensor]) -> Ground | None:
    """The part that all of these rows belong to and not all of the step's do; None for a single row."""
    if len(rows) < 2:
        return None
    every = _active(coefficients)
    for kind, key, name in _AXES:
        values = {key(batches[batch], row) for batch, row in rows}
        members = tuple((batch, row) for batch, row in every if key(batches[batch], row) in values)
        if len(values) == 1 and values != {None} and len(members) < len(every):
            first = rows[0]
            return Ground(kind, name(batches[first[0]], first[1]), members)
    return None


def is_whole(ground: Ground, rows: Sequence[Row]) -> bool:
    """Whether these rows are most of the part, which then is the culprit."""
    return len(rows) >= PART_OF_GROUND_MIN * len(ground.rows)


def holder_of(
    batches: Sequence[PlacedBatch], shares: Sequence[Tensor], coefficients: Sequence[Tensor]
) -> Ground | None:
    """The finest part that holds nearly all of the squared norm though not nearly all tokens."""
    rows = _active(coefficients)
    num_tokens = {row: int((coefficients[row[0]][row[1]] != 0).sum()) for row in rows}
    total = sum(num_tokens.values())
    for kind, key, name in _AXES:
        sums: dict[Hashable, tuple[float, int, Row]] = {}
        for batch, row in rows:
            value = key(batches[batch], row)
            share, count, first = sums.get(value, (0.0, 0, (batch, row)))
            sums[value] = (share + float(shares[batch][row].sum()), count + num_tokens[batch, row], first)
        sums.pop(None, None)
        if len(sums) < 2:
            continue
        share, count, first = max(sums.values(), key=lambda entry: entry[0])
        part = count / total
        if share >= SHARE_MIN and part <= TOKENS_PART_MAX and share >= DENSITY_MIN * part:
            held = next(value for value, entry in sums.items() if entry[2] == first)
            members = tuple((batch, row) for batch, row in rows if key(batches[batch], row) == held)
            return Ground(kind, name(batches[first[0]], first[1]), members, share)
    return None


def _active(coefficients: Sequence[Tensor]) -> list[Row]:
    return [
        (batch, row)
        for batch, coefficient_BR in enumerate(coefficients)
        for row in (coefficient_BR != 0).any(dim=1).nonzero().squeeze(-1).tolist()
    ]
