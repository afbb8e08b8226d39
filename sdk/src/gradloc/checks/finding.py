"""One finding of a check, and the report that a layer's check gives. Pure records.

A finding names places by numbers (row, offset, token, layer), never by the text that stands there.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gradloc.checks.kinds import KINDS, Layer, Severity
from gradloc_proto.codec import plain_number

PLACES_MAX = 8  # further places that a finding names besides its first
EXCERPT_LENGTH = 60
Where = Mapping[str, int | str]
Numbers = Mapping[str, float]


@dataclass(frozen=True)
class CheckFinding:
    """What is wrong, where, with which numbers, and what to do.

    code, layer, severity, todo: from `kinds.KINDS`. where: the first place; also: further ones, at most
    PLACES_MAX; num_places: how many there are in all. excerpt: text of the place, only when asked for.
    """

    code: str
    layer: Layer
    severity: Severity
    what: str
    where: Where
    numbers: Numbers
    todo: str
    also: tuple[Where, ...] = ()
    num_places: int = 1
    excerpt: str | None = None

    def to_json(self) -> dict[str, Any]:
        """JSON-able; numbers that are not finite become the strings NaN, Infinity and -Infinity."""
        made: dict[str, Any] = {
            "code": self.code,
            "layer": self.layer,
            "severity": self.severity,
            "what": self.what,
            "where": dict(self.where),
            "numbers": {name: plain_number(value) for name, value in self.numbers.items()},
            "todo": self.todo,
            "num_places": self.num_places,
            "also": [dict(place) for place in self.also],
        }
        return made if self.excerpt is None else made | {"excerpt": self.excerpt}


def finding(
    code: str, what: str, where: Where | None = None, excerpt: str | None = None, **numbers: float
) -> CheckFinding:
    """A finding of a registered kind. Raises KeyError for a code that `kinds.KINDS` does not hold."""
    kind = KINDS[code]
    return CheckFinding(
        code=code,
        layer=kind.layer,
        severity=kind.severity,
        what=what,
        where=dict(where or {}),
        numbers={name: float(value) for name, value in numbers.items()},
        todo=kind.todo,
        excerpt=excerpt,
    )


@dataclass(frozen=True)
class Skipped:
    """A check that was not made, and why: silence must not read as health."""

    what: str
    why: str


@dataclass(frozen=True)
class Report:
    """What a check found. counts: sizes of what was looked at (rows, tokens, ...)."""

    findings: tuple[CheckFinding, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    counts: Numbers = field(default_factory=dict)

    @property
    def codes(self) -> tuple[str, ...]:
        return tuple(one.code for one in self.findings)

    def to_json(self) -> dict[str, Any]:
        return {
            "findings": [one.to_json() for one in self.findings],
            "skipped": [{"what": one.what, "why": one.why} for one in self.skipped],
            "counts": {name: plain_number(value) for name, value in self.counts.items()},
        }


def joined(reports: Iterable[Report]) -> Report:
    """Several reports as one; counts of one name add up."""
    findings: list[CheckFinding] = []
    skipped: list[Skipped] = []
    counts: dict[str, float] = {}
    for report in reports:
        findings += report.findings
        skipped += report.skipped
        for name, value in report.counts.items():
            counts[name] = counts.get(name, 0.0) + value
    return Report(tuple(findings), tuple(skipped), counts)


class Tally:
    """Collects findings of one pass in bounded memory: those of one code (and `key`) become one with its places."""

    def __init__(self) -> None:
        self._first: dict[str, CheckFinding] = {}
        self._also: dict[str, list[Where]] = {}
        self._num: dict[str, int] = {}

    def add(self, found: CheckFinding, key: str = "") -> None:
        """`key` keeps findings of one code apart, such as those of different fields."""
        name = f"{found.code}\0{key}"
        if name not in self._first:
            self._first[name] = found
            self._also[name] = []
            self._num[name] = found.num_places
            return
        self._num[name] += found.num_places
        if len(self._also[name]) < PLACES_MAX:
            self._also[name].append(found.where)

    def num(self, code: str, key: str = "") -> int:
        """Places found so far."""
        return self._num.get(f"{code}\0{key}", 0)

    def findings(self) -> tuple[CheckFinding, ...]:
        """One finding a code and key, in order of first sight."""
        return tuple(
            replace(first, also=tuple(self._also[name]), num_places=self._num[name])
            for name, first in self._first.items()
        )


def excerpt_of(text: str, offset: int = 0) -> str:
    """A short piece of text around `offset`, for those who asked to see it."""
    start = max(0, offset - EXCERPT_LENGTH // 3)
    return repr(text[start : start + EXCERPT_LENGTH])
