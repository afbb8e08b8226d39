"""What if, for a snapshot: its step under remedies, beside what it was and what it would be without its culprits.

Knows no command line and no web.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from gradloc import whatif
from gradloc.held import Hold, without_culprits
from gradloc.localization import Progress, localize
from gradloc.policy import PlacedBatch, Policy
from gradloc.replay import Gradient, coefficients_of, replay
from gradloc.snapshot import open_snapshot
from gradloc.verification import Place
from gradloc.whatif import Change, Coefficients, WhatIf
from gradloc_localizer.asked import Asked, Drop
from gradloc_localizer.driver import Options, facts_of, rebuilt
from gradloc_proto.codec import plain
from gradloc_proto.messages import Finding

AS_IT_IS = "as it is"


@dataclass(frozen=True)
class Foretold:
    """rows: the step as it is, without its culprits where there are any, then each change that applies. skipped:
    changes that need what the snapshot does not hold, with what that is."""

    step: int
    limit: float
    finding: Finding
    rows: tuple[WhatIf, ...]
    skipped: tuple[tuple[str, str], ...]

    def holds(self, row: WhatIf) -> bool:
        return math.isfinite(row.norm) and row.norm <= self.limit

    def as_dict(self) -> dict[str, Any]:
        """For strict JSON: numbers that are not finite as the strings that messages use."""
        told: dict[str, Any] = plain(
            {
                "step": self.step,
                "limit": self.limit,
                "verdict": self.finding.verdict,
                "rows": [asdict(row) | {"holds": self.holds(row)} for row in self.rows],
                "skipped": [{"name": name, "needs": needs} for name, needs in self.skipped],
            }
        )
        return told


@dataclass(frozen=True)
class _Explained:
    """The step and, without its culprits, the healthy update that cosines compare with."""

    finding: Finding
    gradient: Gradient
    limit: float
    healthy: Gradient | None
    hold: Hold | None
    num_culprits: int


class Foreteller:
    """A snapshot's step, rebuilt once and localized at the first question; a question then costs one replay a change.

    Holds the model. Raises SnapshotRejected or ModelRejected as `driver.explain` does.
    """

    def __init__(self, url: str, options: Options, on_progress: Progress = lambda _stage, _fraction: None) -> None:
        torch.set_num_threads(options.num_threads)
        on_progress("opening", 0.0)
        snapshot = open_snapshot(url)
        self._policy, self._batches = rebuilt(snapshot, options)
        self._facts = facts_of(snapshot.manifest, options.limit)
        self._coefficients = coefficients_of(self._batches)
        self._replayed = _replaying(self._policy, self._batches)
        self._explained: _Explained | None = None

    def tell(self, asked: Asked, on_progress: Progress = lambda _stage, _fraction: None) -> Foretold:
        """The step under each change; without any, under the usual ones. Raises ValueError (a drop that names nobody,
        bounds that cannot be meant) before anything is computed."""
        batches, coefficients, facts = self._batches, self._coefficients, self._facts
        dropped = [whatif.named(f"without {drop}", whatif.leave_out(_places(batches, drop))) for drop in asked.drops]
        changes = asked.changes(facts.healthy_layer_norms)
        known = self._explained or self._explain(on_progress)
        self._explained = known
        gradient, healthy = known.gradient, known.healthy
        rows = [WhatIf(AS_IT_IS, gradient.norm, gradient.layer_norms, whatif.cosine(gradient, healthy), 0)]
        if healthy is not None:
            cosine = whatif.cosine(healthy, healthy)
            rows.append(WhatIf("without the culprits", healthy.norm, healthy.layer_norms, cosine, known.num_culprits))
        skipped = []
        wanted = [*dropped, *changes] or usual_changes(facts.healthy_layer_norms, known.limit)
        for number, change in enumerate(wanted):
            on_progress(change.name, 0.6 + 0.4 * number / len(wanted))
            told = whatif.foretell(change, batches, coefficients, gradient, self._replayed, healthy, known.hold)
            if told is None:
                skipped.append((change.name, getattr(change, "needs", "")))
            else:
                rows.append(told)
        on_progress("done", 1.0)
        return Foretold(facts.step, known.limit, known.finding, tuple(rows), tuple(skipped))

    def _explain(self, on_progress: Progress) -> _Explained:
        finding = localize(
            self._policy,
            self._batches,
            self._facts,
            on_progress=lambda stage, part: on_progress(stage, 0.6 * part),
        )
        gradient = self._replayed(self._coefficients)
        places = [
            Place(*place)
            for culprit in finding.culprits
            for place in _places(
                self._batches,
                Drop(
                    culprit.rank,
                    culprit.micro_batch,
                    culprit.sequence,
                    None if finding.verdict == "sequence" else culprit.token,
                ),
            )
        ]
        healthy, hold = None, None
        if places:
            healthy, hold = without_culprits(self._policy, self._batches, self._coefficients, places)
        return _Explained(finding, gradient, self._facts.limit_for(gradient.norm), healthy, hold, len(places))


def usual_changes(healthy_layer_norms: Mapping[str, float], limit: float) -> list[Change]:
    """The remedies with their defaults, and the norm clipped to the limit. LayerClip needs healthy layer norms."""
    layers = [whatif.layer_clip(healthy_layer_norms)] if healthy_layer_norms else []
    return [whatif.token_clip(), whatif.seq_clip(), whatif.advantage_clip(), *layers, whatif.norm_clip(limit)]


def _replaying(policy: Policy, batches: Sequence[PlacedBatch]) -> Callable[[Coefficients], Gradient]:
    return lambda coefficients: replay(policy, batches, coefficients).gradient


def _places(batches: Sequence[PlacedBatch], drop: Drop) -> list[tuple[int, int, int]]:
    """(batch, row, column) of what is dropped. Raises ValueError where the step has no such sequence or token."""
    known = [(index, placed) for index, placed in enumerate(batches) if placed.rank == drop.rank]
    if not known:
        ranks = sorted({placed.rank for placed in batches})
        raise ValueError(f"nothing to drop at {drop}: the step has ranks {ranks[0]} to {ranks[-1]}")
    found = [(index, placed) for index, placed in known if placed.index == drop.micro_batch]
    if not found:
        raise ValueError(f"nothing to drop at {drop}: rank {drop.rank} has micro-batches 0 to {len(known) - 1}")
    ((index, placed),) = found
    num_rows, num_columns = placed.batch.mask_BR.shape
    if not 0 <= drop.sequence < num_rows:
        raise ValueError(f"nothing to drop at {drop}: the micro-batch has sequences 0 to {num_rows - 1}")
    if drop.token is None:
        return [(index, drop.sequence, column) for column in range(num_columns)]
    first = placed.batch.ids_BT.shape[1] - num_columns
    if not first <= drop.token < first + num_columns:
        raise ValueError(f"nothing to drop at {drop}: its answer has tokens {first} to {first + num_columns - 1}")
    return [(index, drop.sequence, drop.token - first)]
