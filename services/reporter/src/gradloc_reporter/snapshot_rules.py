"""Which snapshots go, and why. Pure: what the store holds and what the database knows come as arguments.

Held are those of incidents that go on or are pinned, and the newest healthy reference of a run that still
needs one: nothing removes them. Of the others those go whose incident has been over for long enough, those
that no incident names, and, over the quota, the ones that have been over for longest.
"""

import math
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

Reason = Literal["age", "orphan", "quota"]
ORPHAN_S = 2 * 86_400.0  # an incident may be told days after its snapshot: Redis keeps what nobody has read yet
FRESH_S = 3_600.0  # it may be being written, or read by a localization: not even the quota takes it
REMOVED_MAX = 1_000  # in one pass; the next one goes on


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """Where a snapshot lies in the store: {run}/{attempt}/{step}."""

    run_id: str
    attempt: int
    step: int

    def __str__(self) -> str:
        return f"{self.run_id}/{self.attempt}/{self.step}"


@dataclass(frozen=True, slots=True)
class Found:
    """A snapshot as the store shows it, whole or half written. `newest_at`: of its files; infinite when not known."""

    place: Place
    num_bytes: int
    newest_at: float


@dataclass(frozen=True, slots=True)
class Known:
    """What incidents make of a snapshot. `over_at`: since when none of them goes on; None where none names it."""

    held: bool
    over_at: float | None


@dataclass(frozen=True, slots=True)
class Removal:
    place: Place
    reason: Reason
    num_bytes: int


def plan(
    found: Iterable[Found],
    known: Mapping[Place, Known],
    *,
    known_runs: Container[str],
    now: float,
    keep_s: float,
    quota_bytes: int | None,
) -> list[Removal]:
    """What to remove now; by age and as orphans first, then as much as the quota asks for, the oldest first.

    Of a run that the database does not know (it may be a new database) nothing is an orphan before `keep_s`.
    """
    going: list[Removal] = []
    staying: list[tuple[float, Found]] = []  # since when nobody needs it
    total = 0
    for each in sorted(found, key=lambda one: one.place):
        mine = known.get(each.place)
        total += each.num_bytes
        if mine is not None and mine.held:
            continue
        over_at = each.newest_at if mine is None or mine.over_at is None else mine.over_at
        reason: Reason = "orphan" if mine is None or mine.over_at is None else "age"
        soon = reason == "orphan" and each.place.run_id in known_runs
        old = now - over_at > (ORPHAN_S if soon else keep_s)
        if not now - each.newest_at > FRESH_S or math.isnan(over_at):
            continue
        if old:
            going.append(Removal(each.place, reason, each.num_bytes))
            total -= each.num_bytes
        else:
            staying.append((over_at, each))
    if quota_bytes is not None:
        for _, each in sorted(staying, key=lambda pair: (pair[0], pair[1].place)):
            if total <= quota_bytes:
                break
            going.append(Removal(each.place, "quota", each.num_bytes))
            total -= each.num_bytes
    return going[:REMOVED_MAX]
