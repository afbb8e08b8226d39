"""The culprit set: the fewest tokens, or sequences, whose removal brings the norm under the limit.

Removing a set with share s leaves a norm of at least (1 - s) ||g||: that bounds from below how many
tokens any explanation needs. The proof itself is a replay without the set. What hides behind a
larger culprit surfaces when the replayed gradient is attributed again. Knows no cause.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradloc.attribution import Attribution, attribute, attribute_exactly
from gradloc.policy import PlacedBatch, Policy
from gradloc.replay import Gradient, masked, replay
from gradloc.verification import ExactToken, Place, exact_tokens

NUM_TOKENS_MAX = 8  # more than this is not "a few tokens"
NUM_ROUNDS_MAX = 4  # of attributing again what a masked replay left
NUM_SHOWN = 4  # tokens whose share is shown where no set explains the spike; the first of them is verified exactly
NUM_CERTAIN = 3  # a set this small needs no gap to the next token
GAP = 2.0  # smallest share in the set against the largest outside it
SEQUENCE_SHARE = 0.1  # tokens with this much of the top token's share count as "also large"
SEQUENCE_FRACTION = 0.25  # so many of them in a row: the row is the culprit, not its tokens
SEQUENCE_TOKENS_MIN = 4
CONCENTRATED = 0.75  # one token with this much of its row's share speaks for itself
SEQUENCE_COEFFICIENT = 5.0  # |c| of nearly all of a row's tokens against the batch's median: the whole row is scaled
SEQUENCE_QUANTILE = 0.25  # a few tokens of a short row do not make it large
CANCELLING = 1.5  # a share beyond it: tokens that pull against each other
CANCELLING_PART = 0.1  # of the largest share: what belongs to the cancelling ones
# Relative error of exact shares in 16 bits (a backward pass of one row against that of the batch). The masked replay
# is the proof: granting more than that costs a replay at most.
SHARE_ERROR_LOW_PRECISION = 0.02
RIVAL = 0.5  # share against the one before it: shares found in 16 bits are good to fifteen percent
NUM_RIVALS = 3
NUM_ROWS_BISECTED_MAX = 8
ROWS_WITHIN_MAX = 0.13  # of all rows: so few are looked at alone first; three forward passes of them
ROWS_FRACTION_MAX = 0.34  # more rows than this is not "a few sequences"


@dataclass(frozen=True)
class Scene:
    """One step to explain: the policy, its batches and coefficients, and the gradient they give.

    `focus`: layer keys that the explanation is about, where only some layers broke their limit; the
    gradient is zero elsewhere then, and so is that of every replay. `scope`: the one batch to look at, where
    cumulative norms have named it; `slack`: share that may lie elsewhere then.
    """

    policy: Policy
    batches: Sequence[PlacedBatch]
    coefficients: Sequence[Tensor]
    gradient: Gradient
    logp: Sequence[Tensor]
    focus: frozenset[str] | None = None
    scope: int | None = None
    slack: float = 0.0

    def under(self, coefficients: Sequence[Tensor]) -> "Scene":
        """The same step under other coefficients, replayed."""
        with self.policy.meter.stage("certificate"):
            replayed = replay(self.policy, self.batches, coefficients)
        gradient = replayed.gradient if self.focus is None else replayed.gradient.only(self.focus)
        return replace(self, coefficients=coefficients, gradient=gradient, logp=replayed.logp, scope=None, slack=0.0)

    def attributed(self, *, one_sided: bool = False) -> Attribution:
        coefficients = [
            coefficient if self.scope in (None, index) else torch.zeros_like(coefficient)
            for index, coefficient in enumerate(self.coefficients)
        ]
        with self.policy.meter.stage("attribution"):
            return attribute(
                self.policy,
                self.batches,
                coefficients,
                self.gradient,
                self.logp,
                one_sided=one_sided,
                slack=self.slack,
            )

    def attributed_within(self, rows: set[tuple[int, int]], slack: float) -> Attribution | None:
        """Exact shares of these rows alone, where they are few and hold all but `slack` of it; else None."""
        active = [(coefficient != 0).any(dim=1) for coefficient in self.coefficients]
        if len(rows) > ROWS_WITHIN_MAX * sum(int(found.sum()) for found in active):
            return None
        coefficients = [torch.zeros_like(coefficient) for coefficient in self.coefficients]
        for batch, row in rows:
            coefficients[batch][row] = self.coefficients[batch][row]
        if not any(bool((coefficient != 0).any()) for coefficient in coefficients):
            return None
        with self.policy.meter.stage("attribution"):
            found = attribute_exactly(self.policy, self.batches, coefficients, self.gradient, slack=slack)
        return found if found is not None and found.is_sound else None

    @property
    def share_error(self) -> float:
        """What exact shares may be wrong by."""
        full = self.policy.grid in (torch.float32, torch.float64)
        return 0.0 if full else SHARE_ERROR_LOW_PRECISION


@dataclass(frozen=True)
class CulpritSet:
    """Tokens whose removal was replayed. `without` is the gradient that the step had without them.

    `gap` is the smallest share inside against the largest outside; `rows` is set where whole rows were removed.
    """

    places: tuple[Place, ...]
    without: Gradient
    holds: bool
    num_tokens_lower_bound: int | None
    gap: float
    rows: tuple[tuple[int, int], ...] = ()

    @property
    def is_minimal(self) -> bool:
        return self.holds and not self.rows and self.num_tokens_lower_bound == len(self.places)


def fewest(shares: Sequence[float], target: float) -> int | None:
    """How many of the largest shares are needed to reach `target`; None when all positive ones do not."""
    total = 0.0
    if target <= 0:
        return 0
    for count, share in enumerate(sorted(shares, reverse=True), start=1):
        if share <= 0:
            return None
        total += share
        if total >= target:
            return count
    return None


def target_share(norm: float, limit: float) -> float:
    """Share that a set must hold before its removal can bring `norm` under `limit`."""
    return 1.0 - limit / norm


def ranked(shares: Sequence[Tensor], num: int) -> list[tuple[Place, float]]:
    """The `num` tokens with the largest absolute shares, largest first."""
    entries: list[tuple[Place, float]] = []
    for batch, share_BR in enumerate(shares):
        if not share_BR.numel():
            continue
        top = share_BR.abs().flatten().topk(min(num, share_BR.numel())).indices.tolist()
        width = share_BR.shape[1]
        entries += [
            (Place(batch, index // width, index % width), float(share_BR.flatten()[index]))
            for index in top
            if float(share_BR.flatten()[index]) != 0.0
        ]
    entries.sort(key=lambda entry: -abs(entry[1]))
    return entries[:num]


def row_shares(shares: Sequence[Tensor]) -> list[tuple[tuple[int, int], float]]:
    """Sum of shares by (batch, row), largest first."""
    sums = [
        ((batch, row), value)
        for batch, share_BR in enumerate(shares)
        for row, value in enumerate(share_BR.sum(dim=1).tolist())
    ]
    return sorted(sums, key=lambda entry: -entry[1])


def num_tokens_lower_bound(attribution: Attribution, norm: float, limit: float) -> int | None:
    """Fewer tokens than this cannot explain the spike, the checksum's error granted; None: no number of tokens can."""
    slack = abs(attribution.checksum - 1.0) + attribution.slack
    shares = torch.cat([share.flatten() for share in attribution.shares]).tolist()
    return fewest(shares, target_share(norm, limit) - slack)


def verified(scene: Scene, places: Sequence[Place]) -> dict[Place, ExactToken]:
    """Exact shares of these tokens in the scene's gradient."""
    with scene.policy.meter.stage("verification"):
        return exact_tokens(scene.policy, scene.batches, scene.coefficients, scene.gradient, places)


def verified_top(scene: Scene, attribution: Attribution) -> dict[Place, ExactToken]:
    """Exact share of the token that looks largest; in 16 bits also of those that may be larger than it."""
    candidates = ranked(attribution.shares, 1 + NUM_RIVALS if scene.share_error else 1)
    # What the sum of shares lacks any of them may lack.
    bar = RIVAL * abs(candidates[0][1]) - abs(attribution.checksum - 1.0) if candidates else 0.0
    return verified(scene, [place for n, (place, share) in enumerate(candidates) if n == 0 or share >= bar])


def find_tokens(
    scene: Scene, attribution: Attribution, limit: float
) -> tuple[CulpritSet | None, dict[Place, ExactToken]]:
    """The fewest tokens that explain the spike, with their proof, and all exact shares seen on the way.

    None when more than NUM_TOKENS_MAX tokens would be needed. Costs one replay a round.
    """
    exact = verified_top(scene, attribution)
    bound = num_tokens_lower_bound(attribution, scene.gradient.norm, limit) if attribution.is_sound else None
    chosen: list[Place] = []
    current, seen = scene, attribution
    found: CulpritSet | None = None
    for round_number in range(NUM_ROUNDS_MAX):
        best = exact if round_number == 0 else {}
        picked = _pick(current, seen, limit, best, NUM_TOKENS_MAX - len(chosen))
        if picked is None:
            break
        places, gap = picked
        chosen += places
        current = scene.under(masked(scene.coefficients, chosen))
        holds = current.gradient.norm <= limit
        found = CulpritSet(tuple(chosen), current.gradient, holds, bound, gap if found is None else min(gap, found.gap))
        if holds or not current.gradient.is_finite or len(chosen) >= NUM_TOKENS_MAX or not seen.is_sound:
            break
        # What hides behind a token is often more of its own row.
        rows = {place[:2] for place in chosen}
        within = current.attributed_within(rows, limit / current.gradient.norm)
        seen = current.attributed(one_sided=True) if within is None else within
        if not seen.is_sound:
            break
    exact.update(verified(scene, [place for place in chosen if place not in exact]))
    return (found if found is not None and found.holds else None), exact


def _pick(
    scene: Scene, attribution: Attribution, limit: float, known: dict[Place, ExactToken], num_max: int
) -> tuple[list[Place], float] | None:
    """The fewest tokens by exact share that reach the target, and the gap to the next one."""
    target = target_share(scene.gradient.norm, limit) - scene.share_error
    candidates = ranked(attribution.shares, num_max + 1)
    if candidates and abs(candidates[0][1]) > CANCELLING:
        return _pick_cancelling(candidates, num_max)
    # What the checksum lacks the candidates lack as well; exact shares decide below.
    needed = fewest([share for _, share in candidates], target - abs(attribution.checksum - 1.0))
    if needed is None or needed > num_max:
        return None
    needed = max(needed, 1)
    # In 16 bits the next one may be the right one, where it is nearly as large.
    rival = len(candidates) > needed and candidates[needed][1] >= RIVAL * candidates[needed - 1][1]
    num_checked = needed + (1 if scene.share_error and rival else 0)
    unknown = [place for place, _ in candidates[:num_checked] if place not in known]
    exact = {**known, **verified(scene, unknown)}
    shares = {place: exact[place].share if place in exact else share for place, share in candidates}
    order = sorted(shares, key=lambda place: -shares[place])
    again = fewest([shares[place] for place in order], target)
    if again is None or again > num_max:
        return None
    again = max(again, 1)
    following = shares[order[again]] if again < len(order) else 0.0
    gap = shares[order[again - 1]] / following if following > 0 else float("inf")
    return order[:again], gap


def _pick_cancelling(candidates: Sequence[tuple[Place, float]], num_max: int) -> tuple[list[Place], float] | None:
    """Tokens that pull against each other leave together: one of them gone, the other would be the spike."""
    bar = CANCELLING_PART * abs(candidates[0][1])
    chosen = [(place, share) for place, share in candidates if abs(share) >= bar]
    if len(chosen) > num_max:
        return None
    rest = max((abs(share) for _, share in candidates if abs(share) < bar), default=0.0)
    return [place for place, _ in chosen], abs(chosen[-1][1]) / rest if rest > 0 else float("inf")


def find_rows(scene: Scene, attribution: Attribution, limit: float) -> CulpritSet | None:
    """The fewest sequences that explain the spike, with their proof; None when it takes more than a few."""
    sums = row_shares(attribution.shares)
    num_active = sum(1 for coefficient in scene.coefficients for row in coefficient if bool((row != 0).any()))
    num_max = max(1, int(num_active * ROWS_FRACTION_MAX))
    target = target_share(scene.gradient.norm, limit) - scene.share_error - abs(attribution.checksum - 1.0)
    needed = fewest([share for _, share in sums], target)
    while needed is not None and max(needed, 1) <= num_max:
        needed = max(needed, 1)
        rows = tuple(row for row, _ in sums[:needed])
        following = sums[needed][1] if needed < len(sums) else 0.0
        gap = sums[needed - 1][1] / following if following > 0 else float("inf")
        if gap < GAP:
            return None
        places = tuple(place for row in rows for place in places_of(scene, row))
        without = scene.under(masked(scene.coefficients, places)).gradient
        if without.norm <= limit:
            sound = attribution.is_sound
            bound = num_tokens_lower_bound(attribution, scene.gradient.norm, limit) if sound else None
            return CulpritSet(places, without, True, bound, gap, rows)
        needed += 1  # the bound was necessary, not sufficient: cross terms between rows
    return None


def places_of(scene: Scene, row: tuple[int, int]) -> list[Place]:
    """All tokens of (batch, row) with a coefficient."""
    batch, index = row
    columns = (scene.coefficients[batch][index] != 0).nonzero().squeeze(-1).tolist()
    return [Place(batch, index, column) for column in columns]


def is_concentrated(shares: Sequence[Tensor], row: tuple[int, int]) -> bool:
    """Whether one token of the row has nearly all of its share."""
    share_R = shares[row[0]][row[1]]
    return float(share_R.max()) >= CONCENTRATED * float(share_R.sum())


def is_whole_row(scene: Scene, row: tuple[int, int], shares: Sequence[Tensor]) -> bool:
    """Whether a sequence is out of line as a whole: all its coefficients are large, or many of its shares."""
    batch, index = row
    share_R = shares[batch][index]
    if is_concentrated(shares, row):
        return False
    own = scene.coefficients[batch][index].abs()
    own = own[own > 0]
    others = torch.cat(
        [
            coefficient.abs()[torch.arange(coefficient.shape[0]) != (index if number == batch else -1)].flatten()
            for number, coefficient in enumerate(scene.coefficients)
        ]
    )
    others = others[others > 0]
    comparable = len(own) >= SEQUENCE_TOKENS_MIN and len(others) > 0
    if comparable and float(own.quantile(SEQUENCE_QUANTILE)) >= SEQUENCE_COEFFICIENT * float(others.median()):
        return True
    num_large = int((share_R >= SEQUENCE_SHARE * float(share_R.max())).sum())
    return num_large >= max(SEQUENCE_TOKENS_MIN, SEQUENCE_FRACTION * len(own))
