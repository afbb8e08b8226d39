"""Faults of known size, planted in the coefficients or, for layers, in one embedding row.

Each is scaled so that the step's norm is exactly the wanted multiple of the healthy one. The truth is what
was planted: a verdict, and the culprits' places (or rows).
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from localizing.oracle import Oracle
from localizing.settling import settled
from localizing.step import RARE, Step, batches_of, run, with_coefficients
from torch import Tensor, nn

from gradloc.policy import PlacedBatch
from gradloc.verification import Place

LIMIT_OVER_HEALTHY = 2.0
RESIDUAL_RMS = 3e-4  # of the stream behind the blocks, at one position
LAYER_SPIKE_MIN = 20.0  # times the healthy norm: smaller cancellations are a large token, not an explosion
PLACES_TRIED = 12
NUM_DRAWS, NUM_DRAWN, DRAWN_SCALE = 12, 512, 3e-3  # rows tried where the blocks compute in 16 bits
STEPS_MAX, TOLERANCE = 60, 0.2
Coefficients = list[Tensor]


@dataclass(frozen=True)
class Case:
    """A step, its limit, and the truth."""

    step: Step
    limit: float
    verdict: str
    tokens: frozenset[Place] = frozenset()
    rows: frozenset[tuple[int, int]] = frozenset()
    first: Place | None = None
    oracle: Oracle | None = None


@dataclass(frozen=True)
class Ground:
    """A healthy step with its oracle, and a generator that chooses places."""

    step: Step
    oracle: Oracle
    generator: torch.Generator

    def choose(self, num: int, *, of: Callable[[Place], bool] = lambda _place: True) -> list[Place]:
        """`num` tokens that the model is not sure of (whose gradient is not tiny), different from each other."""
        units = self.oracle.unit_nn.diagonal()
        middle = float(units.median())
        fit = [p for p, unit in zip(self.oracle.places, units.tolist(), strict=True) if unit >= middle and of(p)]
        order = torch.randperm(len(fit), generator=self.generator).tolist()
        return [fit[at] for at in order[:num]]

    def coefficients(self) -> Coefficients:
        return [placed.coefficient_BR().clone() for placed in self.step.placed]

    def scaled(self, coefficients: Coefficients, places: list[Place], norm: float) -> Coefficients:
        """All of `places` multiplied by one factor so that the norm is `norm`, in the oracle's arithmetic."""
        oracle = self.oracle.under(coefficients)
        mine_n = torch.tensor([place in set(places) for place in oracle.places], dtype=torch.float64)
        gram_nn = oracle.gram_nn
        own = float(mine_n @ gram_nn @ mine_n)
        cross = float(mine_n @ gram_nn @ (1 - mine_n))
        rest = float((1 - mine_n) @ gram_nn @ (1 - mine_n))
        factor = (-cross + math.sqrt(max(0.0, cross**2 - own * (rest - norm**2)))) / own
        changed = [coefficient.clone() for coefficient in coefficients]
        for place in places:
            changed[place.batch][place.row, place.column] *= factor
        return changed


def ground(
    model: nn.Module, seed: int, *, num_micro_batches: int, num_rows: int, autocast: torch.dtype | None
) -> Ground:
    placed = batches_of(
        model, seed, num_micro_batches=num_micro_batches, num_rows=num_rows, num_response=10, num_ranks=1,
        autocast=autocast,
    )  # fmt: skip
    step = run(model, placed, autocast)
    step = replace(step, healthy_norm=step.norm, healthy_layer_norms=step.layer_norms)
    return Ground(step, Oracle.of(model, placed), torch.Generator().manual_seed(77 + seed))


def _struck(base: Ground, coefficients: Coefficients, verdict: str, **truth: frozenset) -> Case:  # type: ignore[type-arg]
    placed = with_coefficients(base.step.placed, coefficients)
    step = run(base.step.model, placed, base.step.autocast)
    step = replace(step, healthy_norm=base.step.norm, healthy_layer_norms=base.step.layer_norms)
    oracle = base.oracle.under([one.coefficient_BR() for one in placed])
    return Case(step, LIMIT_OVER_HEALTHY * base.step.norm, verdict, oracle=oracle, **truth)


def one_token(base: Ground, times: float) -> Case:
    places = base.choose(1)
    return _struck(
        base, base.scaled(base.coefficients(), places, times * base.step.norm), "token", tokens=frozenset(places)
    )


def two_tokens(base: Ground) -> Case:
    """In different micro-batches where there are several, else in different rows; each alone is a spike."""
    (first,) = base.choose(1)
    several = len(base.step.placed) > 1
    (second,) = base.choose(1, of=lambda p: p.batch != first.batch if several else p.row != first.row)
    changed = base.scaled(base.coefficients(), [first], 10 * base.step.norm)
    changed = base.scaled(changed, [second], 15 * base.step.norm)
    return _struck(base, changed, "token", tokens=frozenset((first, second)))


def three_in_one_sequence(base: Ground) -> Case:
    (first,) = base.choose(1)
    row = [p for p in base.oracle.places if p[:2] == first[:2] and p != first]
    order = torch.randperm(len(row), generator=base.generator).tolist()
    places = [first, *(row[at] for at in order[:2])]
    norms = base.oracle.norms()
    changed = base.coefficients()
    for place in places:  # ten times the healthy norm each
        changed[place.batch][place.row, place.column] *= 10 * base.step.norm / norms[place]
    return _struck(base, changed, "token", tokens=frozenset(places))


def cancelling_pair(base: Ground) -> Case:
    """The same token in the same context in two rows, +100 and -95 times the healthy norm."""
    (first,) = base.choose(1)
    other = next(
        (p.batch, p.row)
        for p in base.oracle.places
        if p[:2] != first[:2] and (p.batch != first.batch or len(base.step.placed) == 1)
    )
    placed = list(base.step.placed)
    source, target = placed[first.batch].batch, placed[other[0]].batch
    fields = {}
    for name in ("ids_BT", "attention_mask_BT", "mask_BR", "coefficient_BR", "rollout_logp_BR", "advantage_BR"):
        changed = getattr(target, name).clone()
        changed[other[1]] = getattr(source, name)[first.row]
        fields[name] = changed
    placed[other[0]] = replace(placed[other[0]], batch=replace(target, **fields))
    step = run(base.step.model, placed, base.step.autocast)
    twin = Place(other[0], other[1], first.column)
    again = replace(base, step=step, oracle=Oracle.of(step.model, step.placed))
    norms = again.oracle.norms()
    coefficients = again.coefficients()
    for place, times in ((first, 100.0), (twin, -95.0)):
        coefficients[place.batch][place.row, place.column] *= times * step.norm / norms[place]
    return _struck(again, coefficients, "token", tokens=frozenset((first, twin)))


def hidden(base: Ground) -> Case:
    """A token of 1,000 times the healthy norm hides one of 8 times."""
    first, second = base.choose(2)
    changed = base.scaled(base.coefficients(), [second], 8 * base.step.norm)
    changed = base.scaled(changed, [first], 1000 * base.step.norm)
    return _struck(base, changed, "token", tokens=frozenset((first, second)))


def one_sequence(base: Ground) -> Case:
    """All coefficients of one row, as an advantage would scale them; half of its tokens at least 4."""
    counts: dict[tuple[int, int], int] = {}
    for place in base.oracle.places:
        counts[place[:2]] = counts.get(place[:2], 0) + 1
    long_enough = [row for row, count in counts.items() if count >= 6]
    row = long_enough[int(torch.randint(len(long_enough), (1,), generator=base.generator))]
    places = [p for p in base.oracle.places if p[:2] == row]
    before = base.coefficients()
    after = base.scaled(before, places, 10 * base.step.norm)
    case = _struck(base, after, "sequence", rows=frozenset((row,)))
    factor = float(after[row[0]][row[1]].abs().sum() / before[row[0]][row[1]].abs().sum())
    placed = list(case.step.placed)
    batch = placed[row[0]].batch
    assert batch.advantage_BR is not None and batch.rollout_logp_BR is not None
    advantage_BR, rollout_BR = batch.advantage_BR.clone(), batch.rollout_logp_BR.clone()
    advantage_BR[row[1]] *= factor
    rollout_BR[row[1]] += math.log(factor)  # it was the advantage, not the ratio
    placed[row[0]] = replace(
        placed[row[0]], batch=replace(batch, advantage_BR=advantage_BR, rollout_logp_BR=rollout_BR)
    )
    return replace(case, step=replace(case.step, placed=tuple(placed)))


def batch_wide(base: Ground, times: float) -> Case:
    changed = [coefficient * times for coefficient in base.coefficients()]
    return _struck(base, changed, "batch-wide")


def not_a_number(base: Ground) -> Case:
    (place,) = base.choose(1)
    changed = base.coefficients()
    changed[place.batch][place.row, place.column] = math.nan
    return replace(_struck(base, changed, "non-finite", tokens=frozenset((place,))), oracle=None)


def healthy(base: Ground) -> Case:
    """Nothing planted, the limit forced to .3 of the norm."""
    return Case(base.step, 0.3 * base.step.norm, "batch-wide", oracle=base.oracle)


def layer(base: Ground, num_blocks: int) -> Case | None:
    """A rare token whose embedding row cancels the residual stream after the first blocks; for models that have
    a trained embedding and blocks under `.model.layers`, else None. The culprit row and its first token are the
    oracle's: what follows the token in its row is struck as well."""
    inner = getattr(base.step.model, "model", None)
    if inner is None or not inner.embed_tokens.weight.requires_grad:
        return None
    for where in base.choose(PLACES_TRIED, of=lambda p: 1 <= p.column <= 4):
        model = copy.deepcopy(base.step.model)
        placed = list(base.step.placed)
        batch = placed[where.batch].batch
        ids_BT = batch.ids_BT.clone()
        position = batch.first_position + where.column - 1  # read there, the next token is predicted from it
        ids_BT[where.row, position] = RARE
        placed[where.batch] = replace(placed[where.batch], batch=replace(batch, ids_BT=ids_BT))
        if not _cancel(model, ids_BT[where.row, :position], num_blocks, base.generator, base.step.autocast):
            continue
        step = run(model, placed, base.step.autocast)
        step = replace(step, healthy_norm=base.step.norm, healthy_layer_norms=base.step.layer_norms)
        if not math.isfinite(step.norm) or step.norm < LAYER_SPIKE_MIN * base.step.norm:
            continue
        oracle = Oracle.of(model, step.placed)
        shares = oracle.shares()
        top = max(shares, key=lambda place: shares[place])
        rows = frozenset((top[:2],))
        return Case(step, LIMIT_OVER_HEALTHY * base.step.norm, "layer", rows=rows, first=top, oracle=oracle)
    return None


def _cancel(
    model: Any, before_S: Tensor, num_blocks: int, generator: torch.Generator, autocast: torch.dtype | None
) -> bool:
    """Moves RARE's embedding row to where, after this context, the residual stream nearly vanishes; whether it did."""
    lower = copy.deepcopy(model.model).double()
    lower.layers = lower.layers[:num_blocks]
    lower.config.num_hidden_layers = num_blocks
    lower.norm = nn.Identity()
    lower.requires_grad_(False)
    width = model.config.hidden_size
    start_H = torch.randn(width, generator=generator, dtype=torch.float64)
    goal_H = RESIDUAL_RMS * torch.randn(width, generator=generator, dtype=torch.float64)
    fixed_1SH = lower.embed_tokens(before_S[None])

    def missed(rows_NH: Tensor) -> Tensor:
        embedded = torch.cat([fixed_1SH.expand(len(rows_NH), -1, -1), rows_NH[:, None]], dim=1)
        hidden_NH: Tensor = lower(inputs_embeds=embedded, use_cache=False).last_hidden_state[:, -1] - goal_H
        return hidden_NH

    row_H = settled(missed, start_H, TOLERANCE * float(goal_H.norm()), STEPS_MAX)
    if float(missed(row_H[None]).square().mean().sqrt()) > RESIDUAL_RMS:
        return False
    row_H = row_H.float()
    if autocast is not None:
        row_H = _on_the_grid(lower.float(), fixed_1SH.float(), row_H, generator, autocast)
    with torch.no_grad():
        model.model.embed_tokens.weight[RARE] = row_H
    return True


def _on_the_grid(
    lower: Any, fixed_1SH: Tensor, row_H: Tensor, generator: torch.Generator, autocast: torch.dtype
) -> Tensor:
    """A row near this one whose stream cancels although the blocks compute in 16 bits: their sums jump, so rows are
    drawn around the best one so far, each corrected by what it missed, and the best of them is kept."""
    best_H, best = row_H, math.inf
    with torch.no_grad(), torch.autocast("cpu", dtype=autocast):
        for draw in range(NUM_DRAWS):
            noise_NH = torch.randn(NUM_DRAWN, len(row_H), generator=generator) * (DRAWN_SCALE * 0.7**draw)
            rows_NH = best_H + noise_NH * best_H.square().mean().sqrt()
            for _ in range(2):
                embedded = torch.cat([fixed_1SH.expand(NUM_DRAWN, -1, -1), rows_NH[:, None]], dim=1)
                missed_NH = lower(inputs_embeds=embedded, use_cache=False).last_hidden_state[:, -1].float()
                size_N = missed_NH.square().mean(dim=1).sqrt()
                if float(size_N.min()) < best:
                    best, best_H = float(size_N.min()), rows_NH[int(size_N.argmin())].clone()
                rows_NH = rows_NH - missed_NH
    return best_H


FAULTS: dict[str, Callable[[Ground], Case | None]] = {
    "one token 3x": lambda base: one_token(base, 3),
    "one token 5x": lambda base: one_token(base, 5),
    "one token 100x": lambda base: one_token(base, 100),
    "one token 1000x": lambda base: one_token(base, 1000),
    "two tokens": two_tokens,
    "three in one sequence": three_in_one_sequence,
    "near-cancelling pair": cancelling_pair,
    "1000x hiding 8x": hidden,
    "one sequence": one_sequence,
    "layer, one block": lambda base: layer(base, 1),
    "layer, two blocks": lambda base: layer(base, 2),
    "batch-wide 10x": lambda base: batch_wide(base, 10),
    "batch-wide 50x": lambda base: batch_wide(base, 50),
    "NaN": not_a_number,
    "healthy, limit forced": healthy,
}


def place_of(placed: tuple[PlacedBatch, ...], rank: int, micro_batch: int, row: int, token: int) -> Place:
    """A finding's culprit as a place in the flat list of batches."""
    index = next(i for i, one in enumerate(placed) if (one.rank, one.index) == (rank, micro_batch))
    return Place(index, row, token - placed[index].batch.first_position)
