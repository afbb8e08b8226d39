"""Localization: from a step's batches and coefficients to a finding with its proof.

Replay, fidelity, search, exact verification, masked replay as certificate, diagnosis. Used by the
localizer's job on a snapshot; knows no store and no stream.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from gradloc.culprits import NUM_CERTAIN, CulpritSet, Scene, find_tokens, places_of
from gradloc.diagnosis import diagnose, is_tokens_fault
from gradloc.evidence import evidence_of
from gradloc.exhibits import Exhibits, Texts, rounded, show
from gradloc.fidelity import LIMIT_OVER_HEALTHY, StepFacts, fidelity_of, refusal, tolerance_of
from gradloc.gradient_profile import residual_sizes
from gradloc.layer_growth import LayerGrowth, layer_growth
from gradloc.localized import summary_of, verdict_of
from gradloc.nonfinite import NonFiniteSource, find_in_batch, find_in_network
from gradloc.nonfinite_causes import nonfinite_cause
from gradloc.policy import PlacedBatch, Policy, active_part
from gradloc.relossed import Reading, origins_of, reading_of, relossed
from gradloc.remedies import fix_for
from gradloc.replay import Replay, coefficients_of, masked, replay, replay_here
from gradloc.search import Search, by_attribution, by_bisection
from gradloc.three_runs import ThreeRuns, cause_of, with_runs
from gradloc.verification import Place
from gradloc_proto.messages import Cause, Certificate, Cost, Culprit, Fidelity, Finding, Fix, Verdict

Strategy = Literal["attribution", "bisect"]
Progress = Callable[[str, float], None]
NUM_NONFINITE_SHOWN = 8


@dataclass(frozen=True)
class _Order:
    """What was asked for."""

    policy: Policy
    batches: Sequence[PlacedBatch]
    facts: StepFacts
    strategy: Strategy
    texts: Texts | None
    on_progress: Progress
    healthy_error: Callable[[], float | None]
    num_positions: int | None
    elsewhere: Callable[[], float | None]


def localize(
    policy: Policy,
    batches: Sequence[PlacedBatch],
    facts: StepFacts,
    *,
    strategy: Strategy = "attribution",
    texts: Texts | None = None,
    on_progress: Progress = lambda _stage, _fraction: None,
    clock: Callable[[], float] = time.perf_counter,
    healthy_error: Callable[[], float | None] = lambda: None,
    num_positions: int | None = None,
    elsewhere: Callable[[], float | None] = lambda: None,
) -> Finding:
    """Explain the step. Parameters are as before afterwards, bit for bit.

    texts: text of a token id. healthy_error: replays a healthy step of the run and says what its norm missed by
    (relative), None where there is no such step; asked only where this step's replay does not match.
    num_positions: of the culprit's sequence that is shown; None: as many as a message should hold. elsewhere: norm of
    a replay on another device, None where there is none; asked, and the step replayed again here, for the same reason.
    """
    started = clock()
    order = _Order(policy, batches, facts, strategy, texts, on_progress, healthy_error, num_positions, elsewhere)
    coefficients = coefficients_of(batches)
    on_progress("replaying", 0.1)
    source = find_in_batch(batches, coefficients)
    usable = coefficients if source is None else masked(coefficients, source.places)
    replayed, sizes = _replayed(policy, batches, usable)
    if source is None and not replayed.gradient.is_finite:
        on_progress("bisecting", 0.4)
        source = find_in_network(policy, batches, coefficients)
        if source is not None:
            replayed = replay(policy, batches, masked(coefficients, source.places), by_row=True)
    if source is not None or not replayed.gradient.is_finite:
        finding = _explain_nonfinite(order, coefficients, source, replayed)
    else:
        scene = Scene(policy, batches, coefficients, replayed.gradient, replayed.logp)
        finding = _explain(order, scene, sizes)
    meter = policy.meter
    cost = Cost(
        steps=round(meter.steps, 4),
        num_forwards=meter.num_forwards,
        num_backwards=meter.num_backwards,
        seconds=round(clock() - started, 4),
    )
    if order.facts.weights == "after-update":
        summary = f"{finding.summary}; approximate: the weights had moved"[:512]
        finding = finding.model_copy(update={"approximate": True, "summary": summary})
    return finding.model_copy(update={"cost": cost})


def _replayed(
    policy: Policy, batches: Sequence[PlacedBatch], coefficients: Sequence[Tensor]
) -> tuple[Replay, list[Tensor]]:
    """The replay, and the residual stream's sizes on its way. With others those of the first micro-batch alone:
    they must not depend on who replayed what."""
    if policy.team is None and policy.split is None:
        with residual_sizes(policy.model) as sizes:
            return replay(policy, batches, coefficients), sizes
    parts = (active_part(placed.batch, own) for placed, own in zip(batches, coefficients, strict=True))
    first = next((part for part in parts if part is not None), None)
    with residual_sizes(policy.model) as sizes, torch.no_grad():
        if first is not None:
            policy.log_probs_of(first)
    return replay(policy, batches, coefficients), sizes


def _explain(order: _Order, scene: Scene, sizes: Sequence[Tensor]) -> Finding:
    facts = order.facts
    norm = scene.gradient.norm
    limit = facts.limit_for(norm)
    fidelity = fidelity_of(facts, scene.gradient, order.policy.grid)
    if not fidelity.reproduced:
        fidelity = fidelity_of(facts, scene.gradient, order.policy.grid, order.healthy_error())
    growth = layer_growth(scene.gradient.layer_norms, facts.healthy_layer_norms)
    refused = refusal(facts, fidelity, scene.gradient, limit)
    runs = None
    if refused in ("not-reproduced", "inconclusive"):
        order.on_progress("replaying again", 0.2)
        again = replay_here(order.policy, order.batches, scene.coefficients).gradient.norm  # no answer that was kept
        runs = ThreeRuns(norm, again, order.elsewhere())
        fidelity = fidelity.model_copy(update={"again_norm": runs.again, "elsewhere_norm": runs.elsewhere})
        if runs.outcome(fidelity.tolerance) != "training-machine":
            refused = "inconclusive"  # the pool does not agree with itself: no evidence against the trainer
    if refused is None and norm <= limit and growth.keys_exploding:
        # The whole norm is harmless, some layers are not: explain those.
        keys = frozenset(growth.keys_exploding)
        scene = replace(scene, gradient=scene.gradient.only(keys), focus=keys)
        limit = LIMIT_OVER_HEALTHY * math.sqrt(sum(facts.healthy_layer_norms[key] ** 2 for key in keys))
    elif refused is None and norm <= limit:
        refused = "batch-wide"
    order.on_progress("searching", 0.3)
    if refused in ("not-reproduced", "accounting") or scene.gradient.norm == 0.0:
        search = Search(refused or "batch-wide")
    elif order.strategy == "bisect":
        search = by_bisection(scene, limit)
    else:
        search = by_attribution(scene, limit, facts.healthy_norm)
    if refused is not None:
        search = replace(search, kind=refused, found=None if refused == "batch-wide" else search.found)
    order.on_progress("diagnosing", 0.8)
    finding = _finding(order, scene, limit, fidelity, growth, search, sizes)
    if runs is None:
        return finding
    told = cause_of(runs, facts.grad_norm, fidelity.tolerance)
    return finding.model_copy(update={"causes": with_runs(finding.causes, told)})


def _finding(
    order: _Order,
    scene: Scene,
    limit: float,
    fidelity: Fidelity,
    growth: LayerGrowth,
    search: Search,
    sizes: Sequence[Tensor],
) -> Finding:
    facts, found = order.facts, search.found
    if found is not None and not growth.by_key:
        # No healthy layer norms were given: the step without its culprits is the best stand-in.
        growth = layer_growth(scene.gradient.layer_norms, found.without.layer_norms)
    shown = show(scene, order.texts, sizes, found, search.exact or {}, search.attribution, order.num_positions)
    num_culprits = 0 if found is None else len(found.rows) or len(found.places)
    evidence = evidence_of(scene, limit, search.kind, shown, growth, num_culprits, facts=facts, texts=order.texts)
    causes = diagnose(evidence)
    if search.attribution is not None and is_tokens_fault(evidence, causes[0]):
        tokens, exact = find_tokens(scene, search.attribution, limit)
        if tokens is not None and len(tokens.places) <= NUM_CERTAIN:
            search = replace(search, kind="token", found=tokens, exact={**(search.exact or {}), **exact})
            return _finding(order, scene, limit, fidelity, growth, search, sizes)
    verdict = verdict_of(search.kind, causes[0])
    if verdict == "sequence" and search.kind == "token" and found is not None:
        rows = _whole_rows(scene, found, limit)
        if rows.holds:
            found, num_culprits = rows, len(rows.rows)
            shown = show(scene, order.texts, sizes, found, search.exact or {}, search.attribution, order.num_positions)
        else:
            verdict = "token"
    elif verdict == "batch-wide" and found is not None:
        found, shown = None, replace(shown, culprits=(), share=None)
    certificate = None if found is None else _certificate(scene.gradient.norm, limit, found, num_culprits)
    origins: tuple[Culprit, ...] = ()
    if found is not None and certificate is not None:
        places, norm_relossed = _relossed(scene, found, shown.leading)
        exhibits = Exhibits(scene.batches, scene.coefficients, order.texts)
        origins = tuple(exhibits.culprit(place, _share_at(search, place), None, None) for place in places)
        certificate = certificate.model_copy(update={"norm_without_relossed": norm_relossed})
    return Finding(
        verdict=verdict,
        strategy=order.strategy,
        step=facts.step,
        summary=_with_origins(
            _with_ground(summary_of(verdict, shown.culprits, shown.share, certificate, fidelity), search), origins
        ),
        culprits=shown.culprits,
        origins=origins,
        share=shown.share,
        checksum=None if search.attribution is None else search.attribution.checksum,
        certificate=certificate,
        fidelity=fidelity,
        causes=causes,
        fix=fix_for(causes, scene, facts.healthy_layer_norms, limit, found),
        healthy_norm=facts.healthy_norm,
        layer_growth={key: rounded(value) for key, value in growth.by_key.items()},
        layers_exploding=growth.blocks_exploding,
        module_kinds_exploding=growth.kinds_exploding,
        profile=shown.profile,
        sequence_view=shown.view,
        shares_by_sequence=shown.by_sequence,
        cost=Cost(steps=0.0),
    )


def _relossed(scene: Scene, found: CulpritSet, leading: Place | None) -> tuple[tuple[Place, ...], float | None]:
    """The tokens that made the culprits' ratio, and the norm had they (else the culprits) left the loss itself.

    None where the loss's ratio cannot be read off the batch. A replay where it is one of sequences; else all other
    coefficients only grow by one factor, and so does the norm.
    """
    reading = reading_of(scene.batches, scene.coefficients)
    if reading is None or leading is None or scene.focus is not None:
        return (), None
    origins = origins_of(scene.batches, leading[:2], reading)
    if not reading.is_of_sequences and not reading.by_row:
        return (), found.without.norm * _growth(scene, found, reading)
    changed = relossed(scene.batches, scene.coefficients, origins or found.places, reading)
    return origins, scene.under(changed).gradient.norm


def _growth(scene: Scene, found: CulpritSet, reading: Reading) -> float:
    """Factor of the others' coefficients when these tokens leave a mean over all tokens."""
    total = sum(placed.batch.num_tokens for placed in scene.batches)
    return total / (total - len(found.places)) if reading.counts and len(found.places) < total else 1.0


def _share_at(search: Search, place: Place) -> float:
    if search.exact is not None and place in search.exact:
        return search.exact[place].share
    return (
        math.nan
        if search.attribution is None
        else float(search.attribution.shares[place.batch][place.row, place.column])
    )


def _whole_rows(scene: Scene, found: CulpritSet, limit: float) -> CulpritSet:
    """The rows of the culprits as the culprits."""
    rows = tuple(dict.fromkeys(place[:2] for place in found.places))
    places = tuple(place for row in rows for place in places_of(scene, row))
    without = scene.under(masked(scene.coefficients, places)).gradient
    return replace(found, places=places, without=without, holds=without.norm <= limit, rows=rows)


def _with_ground(summary: str, search: Search) -> str:
    """The sentence, with what several rows have in common or who holds the norm when it is no few rows'."""
    if search.ground is None or search.found is None:
        return summary
    if search.ground.share is None:
        return f"{summary}; all of {search.ground.name}"[:512]
    return f"{summary}; {search.ground.name} holds {100 * search.ground.share:.1f} % of it"[:512]


def _with_origins(summary: str, origins: Sequence[Culprit]) -> str:
    """The sentence, with the tokens whose ratio it was where others have the gradient."""
    if not origins:
        return summary
    tokens = ", ".join(str(one.token) for one in origins)
    return f"{summary}; by the ratio of token {tokens} of that sequence"[:512]


def _certificate(norm: float, limit: float, found: CulpritSet, num_culprits: int) -> Certificate:
    return Certificate(
        grad_norm=norm,
        norm_without=found.without.norm,
        limit=limit,
        holds=found.holds,
        num_culprits=num_culprits,
        num_tokens_lower_bound=found.num_tokens_lower_bound,
        minimal=found.is_minimal,
    )


def _explain_nonfinite(
    order: _Order, coefficients: Sequence[Tensor], source: NonFiniteSource | None, replayed: Replay
) -> Finding:
    """The culprits are the tokens that are not finite; the proof is the step without them."""
    facts = order.facts
    without = replayed.gradient.norm
    known = facts.limit is not None or facts.healthy_norm is not None
    limit = facts.limit_for(math.nan) if known or not math.isfinite(without) else without
    exhibits = Exhibits(order.batches, coefficients, order.texts)
    places = () if source is None else source.places
    module = None if source is None else source.module
    culprits = tuple(
        exhibits.culprit(place, math.nan, None, module if index == 0 else None)
        for index, place in enumerate(places[:NUM_NONFINITE_SHOWN])
    )
    certificate = Certificate(
        grad_norm=facts.grad_norm,
        norm_without=without,
        limit=limit,
        holds=math.isfinite(without) and without <= limit,
        num_culprits=len(places),
    )
    # With its culprits the replay is as little finite as the step was: nothing to compare but that.
    reproduced = not math.isfinite(facts.grad_norm)
    fidelity = Fidelity(
        reported_norm=facts.grad_norm,
        replayed_norm=math.nan,
        rel_error=0.0 if reproduced else math.inf,
        tolerance=tolerance_of(order.policy.grid),
        reproduced=reproduced,
    )
    verdict: Verdict = "inconclusive"
    if reproduced and source is not None:
        verdict = "mask" if source.outside_mask else "non-finite"
    elif reproduced:
        verdict = "non-finite"
    proof = certificate if places else None
    return Finding(
        verdict=verdict,
        strategy="bisect" if source is not None and source.what == "network" else order.strategy,
        step=facts.step,
        summary=summary_of(verdict, culprits, None, proof, fidelity),
        culprits=culprits,
        certificate=proof,
        fidelity=fidelity,
        causes=(_cause_of(source, culprits),),
        fix=Fix(name="leave out the culprit tokens", norm_after=without, holds=certificate.holds) if places else None,
        healthy_norm=facts.healthy_norm,
        sequence_view=exhibits.view(places[0], {}, order.num_positions) if places else None,
        cost=Cost(steps=0.0),
    )


def _cause_of(source: NonFiniteSource | None, culprits: Sequence[Culprit]) -> Cause:
    if source is None:
        return nonfinite_cause(None, culprits)
    return nonfinite_cause(
        source.what,
        culprits,
        outside_mask=source.outside_mask,
        num_tokens=len(source.places),
        module=source.module,
        position=source.position,
    )
