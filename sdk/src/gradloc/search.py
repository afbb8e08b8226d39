"""The two strategies: attribution, and bisection as the reference. Both end with a culprit set and its proof.

Knows no cause: `Search.kind` is what the set is made of, the verdict before the diagnosis.
"""

import math
from dataclasses import dataclass, replace

from gradloc import culprits
from gradloc.attribution import Attribution
from gradloc.bisection import Bisection, bisect
from gradloc.common_ground import Ground, common_to, holder_of, is_whole
from gradloc.culprits import CulpritSet, Scene
from gradloc.replay import masked
from gradloc.verification import ExactToken, Place

SPIKE_OVER_HEALTHY_MIN = 1.5  # under it nothing happened, whatever the limit says


@dataclass(frozen=True)
class Search:
    """What a strategy found. `kind`: token, sequence, group, micro-batch, rank, data-source, batch-wide, inconclusive,
    or a refusal of the fidelity. `ground`: what the culprit rows have in common."""

    kind: str
    found: CulpritSet | None = None
    exact: dict[Place, ExactToken] | None = None
    attribution: Attribution | None = None
    ground: Ground | None = None


def by_attribution(scene: Scene, limit: float, healthy_norm: float | None, *, scope: int | None = None) -> Search:
    """Shares of all tokens at once, then the fewest tokens, else the fewest sequences.

    `scope`: the batch (its number) that made the norm jump, where the trainer measured it after each micro-batch.
    """
    whole = scene
    if scope is not None:
        scene = replace(scene, scope=scope, slack=limit / scene.gradient.norm)
    attribution = scene.attributed()
    if scope is not None and not attribution.is_sound:
        return by_attribution(whole, limit, healthy_norm)
    if healthy_norm is not None and scene.focus is None and scene.gradient.norm < SPIKE_OVER_HEALTHY_MIN * healthy_norm:
        return Search("batch-wide", None, culprits.verified_top(scene, attribution), attribution)
    first_row = culprits.row_shares(attribution.shares)[0][0]
    tried_rows = culprits.is_whole_row(scene, first_row, attribution.shares) or not (
        attribution.is_sound or culprits.is_concentrated(attribution.shares, first_row)
    )
    rows = culprits.find_rows(scene, attribution, limit) if tried_rows else None
    if rows is not None:
        return _of_rows(scene, rows, culprits.verified_top(scene, attribution), attribution)
    found, exact = culprits.find_tokens(scene, attribution, limit)
    if found is not None and (len(found.places) <= culprits.NUM_CERTAIN or found.gap >= culprits.GAP):
        return Search("token", found, exact, attribution)
    # Where the sum is not one the rows are a guess, but a replay without them proves it or not.
    if not tried_rows:
        rows = culprits.find_rows(scene, attribution, limit)
        if rows is not None:
            return _of_rows(scene, rows, exact, attribution)
    if attribution.is_sound and scene.focus is None:
        ground = holder_of(scene.batches, attribution.shares, scene.coefficients)
        if ground is not None:
            places = [place for row in ground.rows for place in culprits.places_of(scene, row)]
            part = _without(scene, places, limit, ground.rows)
            if part.holds:
                return Search(ground.kind, part, exact, attribution, ground)
    return Search("batch-wide" if attribution.is_sound else "inconclusive", None, exact, attribution)


def _of_rows(scene: Scene, rows: CulpritSet, exact: dict[Place, ExactToken], attribution: Attribution) -> Search:
    """Named after what the rows have in common, where they are most of it."""
    ground = common_to(scene.batches, rows.rows, scene.coefficients)
    kind = ground.kind if ground is not None and is_whole(ground, rows.rows) else "sequence"
    return Search(kind, rows, exact, attribution, ground)


def by_bisection(scene: Scene, limit: float) -> Search:
    """Tokens that the search reached, the fewest of them that hold; else the few sequences that it ended in."""
    with scene.policy.meter.stage("bisection"):
        result = bisect(scene.policy, scene.batches, scene.coefficients, limit)
    exact = culprits.verified(scene, result.tokens)
    order = sorted(result.tokens, key=lambda place: -exact[place].share)
    target = culprits.target_share(scene.gradient.norm, limit)
    needed = culprits.fewest([exact[place].share for place in order], target)
    for count in sorted({max(needed or 1, 1), len(order)}) if order else ():
        found = _without(scene, order[:count], limit, ())
        if found.holds and not _fills_row(scene, order[:count]):
            return Search("token", found, exact)
    rows = _rows_of(result)
    if 0 < len(rows) <= culprits.NUM_ROWS_BISECTED_MAX:
        found = _without(scene, [place for row in rows for place in culprits.places_of(scene, row)], limit, rows)
        if found.holds:
            return Search("sequence", found, exact)
    return Search("inconclusive" if result.out_of_budget else "batch-wide", None, exact)


def _without(scene: Scene, places: list[Place], limit: float, rows: tuple[tuple[int, int], ...]) -> CulpritSet:
    without = scene.under(masked(scene.coefficients, places)).gradient
    return CulpritSet(tuple(places), without, without.norm <= limit, None, math.inf, rows)


def _fills_row(scene: Scene, places: list[Place]) -> bool:
    """Whether these tokens are most of what their one sequence has."""
    rows = {place[:2] for place in places}
    if len(rows) != 1:
        return False
    num_tokens = len(culprits.places_of(scene, rows.pop()))
    return len(places) >= max(culprits.SEQUENCE_TOKENS_MIN, culprits.SEQUENCE_FRACTION * num_tokens)


def _rows_of(result: Bisection) -> tuple[tuple[int, int], ...]:
    rows = {(span.batch, span.row) for segment in result.unresolved for span in segment}
    return tuple(sorted(rows | {(place.batch, place.row) for place in result.tokens}))
