"""History: the findings of a run over time, and runs compared with each other. Pure; knows no file, web or tensor.

A spike that is explained and repaired often uncovers the next one. So a run's findings are put in order and joined
into *episodes*, one after the other, each of one first cause; and of several runs, given in the order in which they
were made, every cause is followed from run to run: what was gone after a fix, what remained, what is new.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from gradloc_proto.messages import Finding

T = TypeVar("T")
Fate = Literal["only run", "gone", "remained", "new", "came and went"]


@dataclass(frozen=True)
class Found:
    """A finding and whose it is."""

    run_id: str
    attempt: int
    finding: Finding

    @property
    def cause(self) -> str:
        causes = self.finding.causes
        return causes[0].name if causes else self.finding.verdict


@dataclass(frozen=True)
class Episode:
    """Findings in a row with one first cause.

    times_healthy: the worst norm over the usual one, None where that is not known. norm_without: the worst norm that
    was left without the culprits; fix, fix_norm: of the worst finding. tokens: ids of first culprits, uids: their
    samples; both without repetition, the most frequent first.
    """

    cause: str
    verdicts: tuple[str, ...]
    confidence: str
    first: tuple[int, int]  # attempt, step
    last: tuple[int, int]
    num_findings: int
    norm: float
    times_healthy: float | None
    norm_without: float | None
    fix: str | None
    fix_norm: float | None
    fix_holds: bool | None
    tokens: tuple[int, ...]
    uids: tuple[str, ...]


@dataclass(frozen=True)
class RunHistory:
    """A run's episodes in order. last_step: how far it came, None where not known."""

    run_id: str
    episodes: tuple[Episode, ...]
    num_findings: int
    last_step: int | None = None
    labels: dict[str, str] = field(default_factory=dict)

    def count(self, cause: str) -> int:
        return sum(one.num_findings for one in self.episodes if one.cause == cause)

    def first(self, cause: str) -> tuple[int, int] | None:
        return min((one.first for one in self.episodes if one.cause == cause), default=None)


@dataclass(frozen=True)
class Course:
    """One cause through all runs: findings of it in each, and what became of it in the last."""

    cause: str
    counts: tuple[int, ...]
    fate: Fate


@dataclass(frozen=True)
class Comparison:
    """Runs in the order given. changed_labels[i]: labels that run i and the one before have differently."""

    runs: tuple[RunHistory, ...]
    courses: tuple[Course, ...]
    changed_labels: tuple[dict[str, tuple[str | None, str | None]], ...]


def history_of(
    run_id: str, found: Iterable[Found], *, last_step: int | None = None, labels: dict[str, str] | None = None
) -> RunHistory:
    """Put findings in order and join those of one cause. Of several findings of one step the last given counts."""
    newest = {(one.attempt, one.finding.step): one for one in found}
    ordered = [newest[at] for at in sorted(newest)]
    groups: list[list[Found]] = []
    for one in ordered:
        if groups and groups[-1][0].cause == one.cause:
            groups[-1].append(one)
        else:
            groups.append([one])
    return RunHistory(run_id, tuple(_episode(group) for group in groups), len(ordered), last_step, labels or {})


def compare(runs: Sequence[RunHistory]) -> Comparison:
    """Follow each cause through the runs, the one that came first in the first run it is in first."""
    causes: dict[str, None] = {}
    for run in runs:
        own = {one.cause for one in run.episodes}
        causes |= dict.fromkeys(sorted(own, key=lambda cause, run=run: (run.first(cause), cause)))  # type: ignore[misc]
    counts = {cause: tuple(run.count(cause) for run in runs) for cause in causes}
    changed: list[dict[str, tuple[str | None, str | None]]] = [{} for _ in runs]
    for index in range(1, len(runs)):
        before, after = runs[index - 1].labels, runs[index].labels
        names = sorted(before.keys() | after.keys())
        changed[index] = {
            name: (before.get(name), after.get(name)) for name in names if before.get(name) != after.get(name)
        }
    courses = tuple(Course(cause, numbers, _fate(numbers)) for cause, numbers in counts.items())
    return Comparison(tuple(runs), courses, tuple(changed))


def _fate(counts: Sequence[int]) -> Fate:
    if len(counts) == 1:
        return "only run"
    if counts[-1]:
        return "remained" if counts[-2] else "new"
    return "gone" if counts[0] or counts[-2] else "came and went"


def norm_of(finding: Finding) -> float:
    """What the trainer reported."""
    return finding.fidelity.reported_norm


def _times(finding: Finding) -> float | None:
    healthy = finding.healthy_norm
    return norm_of(finding) / healthy if healthy is not None and healthy > 0 and math.isfinite(healthy) else None


def _episode(group: Sequence[Found]) -> Episode:
    worst = max((one.finding for one in group), key=lambda finding: _size(norm_of(finding)))
    causes = worst.causes
    without = [one.finding.certificate.norm_without for one in group if one.finding.certificate is not None]
    firsts = [one.finding.culprits[0] for one in group if one.finding.culprits]
    return Episode(
        cause=group[0].cause,
        verdicts=_frequent(one.finding.verdict for one in group),
        confidence=causes[0].confidence if causes else "low",
        first=(group[0].attempt, group[0].finding.step),
        last=(group[-1].attempt, group[-1].finding.step),
        num_findings=len(group),
        norm=norm_of(worst),
        times_healthy=_times(worst),
        norm_without=max(without, key=_size) if without else None,
        fix=None if worst.fix is None else worst.fix.name,
        fix_norm=None if worst.fix is None else worst.fix.norm_after,
        fix_holds=None if worst.fix is None else worst.fix.holds,
        tokens=_frequent(one.token_id for one in firsts if one.token_id is not None),
        uids=_frequent(one.uid for one in firsts if one.uid is not None),
    )


def _size(norm: float) -> float:
    """NaN is the worst of norms."""
    return math.inf if math.isnan(norm) else norm


def _frequent(values: Iterable[T]) -> tuple[T, ...]:
    numbers: dict[T, int] = {}
    for value in values:
        numbers[value] = numbers.get(value, 0) + 1
    return tuple(sorted(numbers, key=lambda value: -numbers[value]))
