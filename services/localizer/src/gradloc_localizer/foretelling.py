"""What if, for a snapshot: its step under remedies, beside what it was and what it would be without its culprits.

Knows no command line and no web.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from gradloc import whatif
from gradloc.localization import Progress, localize
from gradloc.policy import PlacedBatch, Policy
from gradloc.replay import Gradient, coefficients_of, masked, replay
from gradloc.snapshot import open_snapshot
from gradloc.whatif import Change, Coefficients, WhatIf
from gradloc_localizer.driver import Options, facts_of, rebuilt
from gradloc_proto.messages import Finding

AS_IT_IS = "as it is"


@dataclass(frozen=True)
class Drop:
    """Tokens of one sequence to leave out; `token` None: all of them. Numbers as findings name them."""

    rank: int
    micro_batch: int
    sequence: int
    token: int | None = None

    def __str__(self) -> str:
        names = ("rank", "micro-batch", "sequence", "token")
        values = (self.rank, self.micro_batch, self.sequence, self.token)
        return ", ".join(f"{name} {value}" for name, value in zip(names, values, strict=True) if value is not None)


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
        """For JSON."""
        return {
            "step": self.step,
            "limit": self.limit,
            "verdict": self.finding.verdict,
            "rows": [asdict(row) | {"holds": self.holds(row)} for row in self.rows],
            "skipped": [{"name": name, "needs": needs} for name, needs in self.skipped],
        }


def foretell(
    url: str,
    changes: Sequence[Change],
    drops: Sequence[Drop],
    options: Options,
    on_progress: Progress = lambda _stage, _fraction: None,
) -> Foretold:
    """The step of a snapshot under each change; without any, under the usual ones.

    Localizes first: the healthy update that cosines compare with is the step without its culprits. Raises
    SnapshotRejected, ModelRejected or ValueError (a drop that names nobody) as `driver.explain` does.
    """
    torch.set_num_threads(options.num_threads)
    on_progress("opening", 0.0)
    snapshot = open_snapshot(url)
    policy, batches = rebuilt(snapshot, options)
    facts = facts_of(snapshot.manifest, options.limit)
    coefficients = coefficients_of(batches)
    dropped = [whatif.named(f"without {drop}", whatif.leave_out(_places(batches, drop))) for drop in drops]
    finding = localize(policy, batches, facts, on_progress=lambda stage, part: on_progress(stage, 0.6 * part))
    replayed = _replaying(policy, batches)
    gradient = replayed(coefficients)
    limit = facts.limit_for(gradient.norm)
    places = [
        place
        for culprit in finding.culprits
        for place in _places(
            batches,
            Drop(
                culprit.rank,
                culprit.micro_batch,
                culprit.sequence,
                None if finding.verdict == "sequence" else culprit.token,
            ),
        )
    ]
    healthy = replayed(masked(coefficients, places)) if places else None
    rows = [WhatIf(AS_IT_IS, gradient.norm, gradient.layer_norms, whatif.cosine(gradient, healthy), 0)]
    if healthy is not None:
        name = "without the culprits"
        rows.append(WhatIf(name, healthy.norm, healthy.layer_norms, whatif.cosine(healthy, healthy), len(places)))
    skipped = []
    wanted = [*dropped, *changes] or usual_changes(facts.healthy_layer_norms, limit)
    for number, change in enumerate(wanted):
        on_progress(change.name, 0.6 + 0.4 * number / len(wanted))
        told = whatif.foretell(change, batches, coefficients, gradient, replayed, healthy)
        if told is None:
            skipped.append((change.name, getattr(change, "needs", "")))
        else:
            rows.append(told)
    on_progress("done", 1.0)
    return Foretold(facts.step, limit, finding, tuple(rows), tuple(skipped))


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
