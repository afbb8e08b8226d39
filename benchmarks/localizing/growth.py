"""How the cost grows: with tokens, and with the number of micro-batches, whole and scoped.

One token of 100 times the healthy norm, planted by its own gradient's norm. The first element of each pair is
what a search costs when the gradient is given; `with_proof` adds the replay for it and the certificate.
"""

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from localizing.faults import LIMIT_OVER_HEALTHY
from localizing.published import FACTORS, Published
from localizing.step import PROMPT, Step, batches_of, logp_of, model_of, run, with_coefficients
from localizing.strategies import GIVEN_G, step_cpu_s

import gradloc
from gradloc.culprits import Scene
from gradloc.fidelity import StepFacts
from gradloc.localization import localize
from gradloc.policy import Policy
from gradloc.replay import coefficients_of, replay
from gradloc.search import Search, by_attribution
from gradloc.verification import Place, exact_tokens

TOKENS = (512, 1024, 2048, 4096, 8192, 16384)
ROW_LENGTHS = (64, 256)
PUBLISHED_TOKENS = (512, 4096, 16384)  # searches by replays take minutes there
MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
ROW_LENGTH = 128
TOKENS_OF_MICRO_BATCH = 512
TIMES = 100.0
RANKS = (2, 4, 8)
RANKS_TOKENS, RANKS_ROW_LENGTH = 4096, 64
NUM_IDLE_STEPS, NUM_IDLE_PAIRS = 4, 9


def struck(
    family: str, seed: int, *, num_tokens: int, row_length: int, num_micro_batches: int, num_ranks: int = 1
) -> tuple[Step, Place]:
    """A step with one culprit, and where it is. Shapes shrink to one row a micro-batch where tokens are few."""
    num_micro_batches = min(num_micro_batches, num_tokens // row_length)
    rows = num_tokens // row_length // num_micro_batches
    model = model_of(family, seed, num_layers=2)
    placed = batches_of(
        model, seed, num_micro_batches=num_micro_batches, num_rows=rows, num_response=row_length - PROMPT,
        num_ranks=num_ranks,
    )  # fmt: skip
    healthy = run(model, placed)
    generator = torch.Generator().manual_seed(seed)
    policy = healthy.policy()
    coefficients = coefficients_of(placed)
    whole = replay(policy, placed, coefficients).gradient
    while True:
        batch = int(torch.randint(len(placed), (1,), generator=generator))
        fit = (coefficients[batch] != 0).nonzero()
        row, column = fit[int(torch.randint(len(fit), (1,), generator=generator))].tolist()
        place = Place(batch, row, column)
        norm = exact_tokens(policy, placed, coefficients, whole, [place])[place].norm
        if norm > 0:
            break
    changed = [coefficient.clone() for coefficient in coefficients]
    changed[batch][row, column] *= TIMES * healthy.norm / norm
    step = run(model, with_coefficients(placed, changed))
    return replace(step, healthy_norm=healthy.norm, healthy_layer_norms=healthy.layer_norms), place


def attribution(step: Step, place: Place, *, scoped: bool) -> dict[str, float]:
    policy = step.policy()
    coefficients = coefficients_of(step.placed)
    replayed = replay(policy, step.placed, coefficients)
    scene = Scene(policy, step.placed, coefficients, replayed.gradient, replayed.logp)
    limit = LIMIT_OVER_HEALTHY * step.healthy_norm
    started = time.process_time()
    found = by_attribution(scene, limit, step.healthy_norm, scope=place.batch if scoped else None)
    cpu_s = time.process_time() - started
    given = sum(policy.meter.stages.get(name, 0.0) for name in GIVEN_G)
    return {"cost_steps": given, "with_proof": policy.meter.steps, "right": _is_right(found, place), "cpu_s": cpu_s}


def _is_right(found: Search, place: Place) -> float:
    return float(found.kind == "token" and found.found is not None and found.found.places == (place,))


def published(step: Step, place: Place, *, scoped: bool) -> dict[str, float]:
    """The best of its thresholds: right, then cheapest."""
    tried = []
    for factor in FACTORS:
        policy = step.policy()
        coefficients = coefficients_of(step.placed)
        started = time.process_time()
        search = Published(policy, step.placed, coefficients, step.healthy_norm, factor)
        right = search.search(scope=place.batch if scoped else None) == [place]
        cpu_s = time.process_time() - started
        steps = policy.meter.steps
        tried.append({"cost_steps": steps, "with_proof": steps + 1.0, "right": float(right), "cpu_s": cpu_s})
    return min(tried, key=lambda one: (-one["right"], one["cost_steps"]))


STRATEGIES: dict[str, Callable[..., dict[str, float]]] = {"attribution": attribution, "published": published}


def measured(
    family: str,
    seed_base: int,
    *,
    quick: bool,
    strategies: Sequence[str],
    num_seeds: int,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """The parts `growth`, `table`, and the three costs by themselves."""
    torch.set_num_threads(1)
    growth = []
    shapes = [(tokens, length, 1) for tokens in TOKENS for length in ROW_LENGTHS]
    shapes += [(RANKS_TOKENS, RANKS_ROW_LENGTH, num_ranks) for num_ranks in RANKS]
    for num_tokens, row_length, num_ranks in shapes[:1] if quick else shapes:
        step, place = struck(
            family, seed_base, num_tokens=num_tokens, row_length=row_length, num_micro_batches=8, num_ranks=num_ranks
        )
        one_step_s = step_cpu_s(step)
        for name, work in ((name, STRATEGIES[name]) for name in strategies if name in STRATEGIES):
            if name == "published" and num_tokens not in PUBLISHED_TOKENS:
                continue
            found = work(step, place, scoped=False)
            growth.append(
                {
                    "num_tokens": num_tokens,
                    "sequence_length": row_length,
                    "num_ranks": num_ranks,
                    "strategy": name,
                    "cost_steps": round(found["cost_steps"], 4),
                    "cpu_ratio": round(found["cpu_s"] / one_step_s, 3),
                    "right": found["right"],
                }
            )
        say(f"growth: {num_tokens} tokens in rows of {row_length} on {num_ranks} ranks")
    counts = MICRO_BATCHES[:2] if quick else MICRO_BATCHES
    table = list(_table(family, seed_base, counts, 1 if quick else num_seeds, strategies, say))
    step, place = struck(family, seed_base, num_tokens=2048, row_length=64, num_micro_batches=8)
    return {
        "growth": growth,
        "table": table,
        "scoped_cost_steps": round(attribution(step, place, scoped=True)["cost_steps"], 4),
        "inline_cost_steps": inline_cost(step),
        "idle_cpu_ratio": round(idle_cpu_ratio(family, seed_base), 4),
        "service_cost_steps": service_cost(step),
    }


def _table(
    family: str,
    seed_base: int,
    counts: Sequence[int],
    num_seeds: int,
    strategies: Sequence[str],
    say: Callable[[str], None],
) -> Any:
    for num in counts:
        rows: dict[tuple[str, bool], list[dict[str, float]]] = {}
        for seed in range(seed_base, seed_base + num_seeds):
            step, place = struck(
                family, seed, num_tokens=num * TOKENS_OF_MICRO_BATCH, row_length=ROW_LENGTH, num_micro_batches=num
            )
            for name, work in ((name, STRATEGIES[name]) for name in strategies if name in STRATEGIES):
                for scoped in (False, True):
                    rows.setdefault((name, scoped), []).append(work(step, place, scoped=scoped))
        for (name, scoped), found in rows.items():
            yield {
                "num_micro_batches": num,
                "strategy": name,
                "scoped": scoped,
                "cost_steps": round(statistics.median(one["cost_steps"] for one in found), 4),
                "with_proof": round(statistics.median(one["with_proof"] for one in found), 4),
                "right": sum(one["right"] for one in found) / len(found),
            }
        say(f"table: {num} micro-batches")


def service_cost(step: Step) -> float:
    """The whole localization: replay, search, certificate, profile, remedy."""
    limit = LIMIT_OVER_HEALTHY * step.healthy_norm
    facts = StepFacts(
        step=1, grad_norm=step.norm, layer_norms=step.layer_norms, limit=limit, healthy_norm=step.healthy_norm,
        healthy_layer_norms=step.healthy_layer_norms,
    )  # fmt: skip
    return localize(step.policy(), step.placed, facts).cost.steps


def inline_cost(step: Step) -> float:
    """The same step met by a probe in the training process."""
    probe = gradloc.watch(step.model, run="benchmark", localize="inline")
    factors = [1.0] * 12 + [None]
    for factor in factors:
        step.model.zero_grad(set_to_none=True)
        for placed in step.placed:
            batch = placed.batch
            logp_BR = _logp(step.policy(), batch)
            coefficient_BR = batch.coefficient_BR
            if factor is not None:  # healthy steps first
                typical = float(coefficient_BR[coefficient_BR != 0].abs().median())
                coefficient_BR = coefficient_BR.clamp(-10 * typical, 10 * typical)
            probe.tokens(logp_BR, batch.ids_BT, batch.mask_BR, attention_mask=batch.attention_mask_BT)
            (logp_BR * coefficient_BR).sum().backward()
        probe.observe()
    probe.close()
    step.model.zero_grad(set_to_none=True)
    assert probe.finding is not None, "the spike was not noticed"
    return probe.finding.cost.steps


def idle_cpu_ratio(family: str, seed: int) -> float:
    """Healthy steps under inline mode beside those of a probe without it: CPU seconds, median over pairs in turn."""
    model = model_of(family, seed, num_layers=2)
    placed = batches_of(model, seed, num_micro_batches=2, num_rows=8, num_response=64 - PROMPT, num_ranks=1)
    inline, plain = model, copy.deepcopy(model)
    probes = {
        inline: gradloc.watch(inline, run="inline", localize="inline"),
        plain: gradloc.watch(plain, run="plain"),
    }

    def steps(watched: torch.nn.Module) -> float:
        started = time.process_time()
        for _ in range(NUM_IDLE_STEPS):
            watched.zero_grad(set_to_none=True)
            for one in placed:
                logp_BR = logp_of(watched, one.batch)
                probes[watched].tokens(
                    logp_BR, one.batch.ids_BT, one.batch.mask_BR, attention_mask=one.batch.attention_mask_BT
                )
                (logp_BR * one.batch.coefficient_BR).sum().backward()
            probes[watched].observe()
        return time.process_time() - started

    steps(inline), steps(plain)
    ratios = [steps(inline) / steps(plain) for _ in range(NUM_IDLE_PAIRS)]
    for probe in probes.values():
        probe.close()
    return statistics.median(ratios)


def _logp(policy: Policy, batch: Any) -> torch.Tensor:
    return policy.log_probs(batch)
