"""Labelled gradient-norm series of real runs, and how flags on them are scored.

DIR holds INDEX.tsv, labels.json and NAME.csv (step, grad_norm, loss, reward; empty where not logged).
Scored are the rows from 25 to the onset of a collapse; ambiguous rows are ignored; a flag on a spike's
row or the row after has caught it; every other flag is a false alarm. A collapse is caught by a flag
within 10 rows of its onset.
"""

import csv
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass
from pathlib import Path

import numpy as np
from detection.published import Rule

FIRST_ROW = 25
COLLAPSE_ROWS = 10
NUM_BOOTSTRAPS = 2_000


@dataclass(frozen=True)
class Series:
    """One run's values with its labels (0-based rows)."""

    name: str
    source: str
    norms: tuple[float | None, ...]  # None where not logged
    rewards: tuple[float | None, ...]
    spikes: frozenset[int] = frozenset()
    unarguable: frozenset[int] = frozenset()
    ignored: frozenset[int] = frozenset()
    collapse: int | None = None

    @property
    def end(self) -> int:
        """One more than the last row that is scored."""
        return len(self.norms) if self.collapse is None else self.collapse + 1

    def with_nan(self, row: int) -> "Series":
        """The same run, had one step's norm been NaN."""
        norms = (*self.norms[:row], math.nan, *self.norms[row + 1 :])
        return Series(
            self.name,
            self.source,
            norms,
            self.rewards,
            self.spikes - {row},
            self.unarguable - {row},
            self.ignored | {row},
            self.collapse,
        )


@dataclass(frozen=True)
class Score:
    """Counts on one series or, added up, on many."""

    definite_caught: int = 0
    definite_total: int = 0
    unarguable_caught: int = 0
    unarguable_total: int = 0
    collapses_caught: int = 0
    collapses_total: int = 0
    false_alarms: int = 0
    healthy_steps: int = 0
    delay_rows: int = 0

    def __add__(self, other: "Score") -> "Score":
        return Score(*(one + another for one, another in zip(astuple(self), astuple(other), strict=True)))

    @property
    def per_1000(self) -> float:
        return 1000 * self.false_alarms / self.healthy_steps if self.healthy_steps else 0.0


def load(folder: Path) -> list[Series]:
    """All series of a folder. Raises ValueError that says what is missing or wrong."""
    try:
        labels = json.loads((folder / "labels.json").read_text())
        with (folder / "INDEX.tsv").open(newline="") as file:
            sources = {row["name"]: row["source"].split(":")[0] for row in csv.DictReader(file, delimiter="\t")}
        return [_series(folder, name, sources.get(name, name), label) for name, label in labels.items()]
    except (OSError, KeyError, ValueError) as error:
        raise ValueError(f"{folder}: {error}; expected INDEX.tsv, labels.json and a NAME.csv for each label") from None


def _series(folder: Path, name: str, source: str, label: dict) -> Series:
    with (folder / f"{name}.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return Series(
        name=name,
        source=source,
        norms=tuple(float(row["grad_norm"]) if row["grad_norm"] else None for row in rows),
        rewards=tuple(float(row["reward"]) if row.get("reward") else None for row in rows),
        spikes=frozenset(label["spikes"]),
        unarguable=frozenset(label["unarguable"]),
        ignored=frozenset(label["ambiguous"]),
        collapse=label["onset_of_collapse"],
    )


def flagged_rows(series: Series, make: Callable[[], Rule]) -> frozenset[int]:
    rule = make()
    return frozenset(
        row
        for row, (norm, reward) in enumerate(zip(series.norms, series.rewards, strict=True))
        if norm is not None and rule.flags(norm, reward)
    )


def score(series: Series, flagged: frozenset[int], first_row: int = FIRST_ROW) -> Score:
    caught, explained, delays = set(), set(), 0
    for row in series.spikes:
        explained |= {row, row + 1}
        if row in flagged or row + 1 in flagged:
            caught.add(row)
            delays += row not in flagged
    rows = range(first_row, series.end)
    definite = {row for row in series.spikes if row in rows}
    unarguable = series.unarguable & definite
    wrong = [row for row in flagged if row in rows and row not in explained and row not in series.ignored]
    is_collapse = series.collapse is not None
    onset = series.collapse or 0
    return Score(
        definite_caught=len(definite & caught),
        definite_total=len(definite),
        unarguable_caught=len(unarguable & caught),
        unarguable_total=len(unarguable),
        collapses_caught=int(is_collapse and any(onset <= row <= onset + COLLAPSE_ROWS for row in flagged)),
        collapses_total=int(is_collapse),
        false_alarms=len(wrong),
        healthy_steps=sum(row not in explained and row not in series.ignored for row in rows),
        delay_rows=delays,
    )


def total(scores: Iterable[Score]) -> Score:
    return sum(scores, Score())


def interval(scores: list[Score]) -> tuple[float, float]:
    """95 % bootstrap interval of false alarms per 1,000 healthy steps, over series."""
    counts = np.array([(one.false_alarms, one.healthy_steps) for one in scores], dtype=float)
    generator = np.random.default_rng(0)
    picks = generator.integers(0, len(counts), (NUM_BOOTSTRAPS, len(counts)))
    sums = counts[picks].sum(axis=1)
    low, high = np.quantile(1000 * sums[:, 0] / np.maximum(sums[:, 1], 1), (0.025, 0.975))
    return round(float(low), 4), round(float(high), 4)
