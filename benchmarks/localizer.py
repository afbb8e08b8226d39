"""The localizer against a brute-force oracle, and its cost beside the published bisection's.

    python benchmarks/localizer.py --json              12 seeds of every fault; about an hour on 2 cores
    python benchmarks/localizer.py --json --quick      1 seed, short growth: shows that it runs
    Each trial is a line of JSON on the error stream as it ends.

    python benchmarks/localizer.py --json --model moe  one family only: qwen3, qwen3-untied, llama, gpt2, moe, lora

Cases. Small randomly initialised models of six families in turn (seed modulo 6), 16 rows in 1, 2, 4, 8 or 16
micro-batches (by seed); a fault of exactly known size planted in the coefficients (for layers: an embedding
row); the limit is twice the healthy norm. fp32, and bf16: autocast over float32 weights. The oracle has
every token's gradient by a float64 backward pass of its own.

    exact_rate          verdict and culprits are the truth's, no more, no less
    recall_at_1         the first culprit is one of them (expected nobody: nobody blamed)
    cost_steps          tokens processed by the search, the gradient being given: attribution, verification and
                        attributing again; forward 1/3, backward 2/3 of a step. Median, and 95th percentile
    cost_steps_whole    with the replay, the certificate, the profile and the measured remedy
    cpu_ratio           CPU seconds of all that over those of one step; peak_memory_ratio likewise (live tensors)
    checksum_error_p95, share_error_max    |sum of shares - 1|; exact shares against the oracle's

Strategies: attribution; bisection (ours: all branches); published: as its article describes it, under the best
of four thresholds for each case. It is not asked for verdicts that it has no words for: a layer, NaN.

Growth. One token of 100 times the healthy norm; 512 to 16,384 tokens in rows of 64, 128 or 256, 8 micro-batches.
Table. The same at 1 to 64 micro-batches of 512 tokens' worth, whole and with the micro-batch known (scoped).
"""

import argparse
import json
import math
import platform
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from localizing import growth
from localizing.faults import FAULTS, ground
from localizing.step import FAMILIES, model_of
from localizing.strategies import STRATEGIES, Outcome, finite, memory_ratio, step_cpu_s, strategy_outcome

NUM_SEEDS = 12
NUM_SEEDS_LAYER = 24  # of which some have no cancelling row
NUM_ROWS = 16
MEMORY_FAULT = "one token 100x"  # where the memory of searches is measured: slow, and no fault changes it
MICRO_BATCHES = (1, 2, 4, 8, 16)
DTYPES: dict[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16}


def cases(
    seeds: Sequence[int], families: Sequence[str], dtypes: Sequence[str], strategies: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """One entry a fault, strategy and number format."""
    outcomes: dict[tuple[str, str, str], list[Outcome]] = defaultdict(list)
    ratios: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    memory: dict[tuple[str, str, str], float] = {}
    for dtype in dtypes:
        for number, seed in enumerate(seeds):
            family = families[seed % len(families)]
            num = MICRO_BATCHES[seed % len(MICRO_BATCHES)]
            base = ground(
                model_of(family, seed), seed, num_micro_batches=num, num_rows=NUM_ROWS // num, autocast=DTYPES[dtype]
            )
            for fault, plant in FAULTS.items():
                is_layer = fault.startswith("layer")
                if number >= NUM_SEEDS and not is_layer:
                    continue
                case = plant(base)
                if case is None:
                    continue
                one_step_s = min(step_cpu_s(case.step) for _ in range(3))
                for strategy in strategies:
                    key = (fault, strategy, dtype)
                    if is_layer and len(outcomes[key]) >= NUM_SEEDS:
                        continue
                    outcome = strategy_outcome(case, strategy)
                    outcomes[key].append(outcome)
                    ratios[key].append(outcome.cpu_s / one_step_s)
                    if key not in memory and fault == MEMORY_FAULT:
                        memory[key] = memory_ratio(case, strategy)
                    _say(json.dumps({"fault": fault, "strategy": strategy, "dtype": dtype, "seed": seed,
                                     "family": family} | asdict(outcome)))  # fmt: skip
            _say(f"{dtype} seed {seed} done")
    for key, found in outcomes.items():
        fault, strategy, dtype = key
        checksums = [abs(value - 1) for value in finite([one.checksum for one in found])]
        yield {
            "fault": fault,
            "strategy": strategy,
            "dtype": dtype,
            "trials": len(found),
            "exact_rate": _mean([one.exact for one in found]),
            "recall_at_1": _mean([one.first for one in found]),
            "false_culprits": sum(one.num_false for one in found),
            "cost_steps": _median([one.steps for one in found]),
            "cost_steps_p95": _quantile([one.steps for one in found], 0.95),
            "cost_steps_whole": _median([one.steps_whole for one in found]),
            "cpu_ratio": _median(ratios[key]),
            "peak_memory_ratio": round(memory[key], 2) if key in memory else None,
            "checksum_error_p95": _quantile(checksums, 0.95),
            "checksum_error_max": max(checksums, default=None),
            "share_error_max": max(finite([one.share_error for one in found]), default=None),
            "certified_rate": _mean([one.certified for one in found]),
        }


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def _mean(values: Sequence[float]) -> float:
    return round(sum(values) / len(values), 4) if values else math.nan


def _median(values: Sequence[float]) -> float:
    return round(statistics.median(values), 4) if values else math.nan


def _quantile(values: Sequence[float], at: float) -> float | None:
    order = sorted(values)
    return order[min(len(order) - 1, math.ceil(at * len(order)) - 1)] if order else None


def _commit() -> str:
    asked = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
        check=False,
    )
    return asked.stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one line for machines at the end")
    parser.add_argument("--quick", action="store_true", help="one seed, short growth")
    parser.add_argument("--seed-base", type=int, default=0, help="first seed (default 0)")
    parser.add_argument("--model", choices=FAMILIES, help="one family only")
    parser.add_argument("--dtype", choices=list(DTYPES), action="append", help="fp32, bf16 (default: both)")
    parser.add_argument("--strategy", choices=STRATEGIES, action="append", help="one or several (default: all)")
    parser.add_argument("--only", choices=["cases", "growth"], help="one half")
    parser.add_argument("--seeds", type=int, help=f"seeds of every fault (default {NUM_SEEDS})")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    started = time.time()
    num = 1 if arguments.quick else arguments.seeds or NUM_SEEDS_LAYER
    seeds = range(arguments.seed_base, arguments.seed_base + num)
    families = [arguments.model] if arguments.model else FAMILIES
    result: dict[str, Any] = {"cases": [], "growth": [], "table": []}
    if arguments.only != "growth":
        result["cases"] = list(
            cases(seeds, families, arguments.dtype or list(DTYPES), arguments.strategy or STRATEGIES)
        )
    if arguments.only != "cases":
        family = arguments.model or "qwen3"
        result |= growth.measured(family, arguments.seed_base, quick=arguments.quick, say=_say)
    result |= {
        "seed_base": arguments.seed_base,
        "seeds": num,
        "commit": _commit(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "seconds": round(time.time() - started),
    }
    if arguments.json:
        sys.stdout.write(json.dumps(result) + "\n")
    else:
        sys.stdout.write("\n".join(_lines(result)) + "\n")
    return 0


def _lines(result: dict[str, Any]) -> Iterator[str]:
    yield f"{'fault':24} {'strategy':12} {'dtype':5} exact first false  steps (p95)     whole  cpu"
    for one in result["cases"]:
        name = f"{one['fault']:24} {one['strategy']:12} {one['dtype']:5}"
        right = f"{one['exact_rate']:5.2f} {one['recall_at_1']:5.2f} {one['false_culprits']:5d}"
        cost = f"{one['cost_steps']:5.2f} ({one['cost_steps_p95']:5.2f}) {one['cost_steps_whole']:8.2f}"
        yield f"{name} {right}  {cost} {one['cpu_ratio']:6.1f}"
    for one in (*result["growth"], *result["table"]):
        yield " ".join(f"{name} {value}" for name, value in one.items())


if __name__ == "__main__":
    sys.exit(main())
