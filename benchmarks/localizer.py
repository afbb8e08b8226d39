"""The localizer against a brute-force oracle, and its cost beside the published bisection's.

    python benchmarks/localizer.py --json              12 seeds of every fault; hours on 2 cores, nearly all of it the
                                                       published search's
    python benchmarks/localizer.py --json --quick      1 seed, short growth: shows that it runs
    python benchmarks/localizer.py --json --resume F   trials go to F, a line each; those in it are not run again

    python benchmarks/localizer.py --json --model moe  one family only: qwen3, qwen3-untied, llama, gpt2, moe, lora
    python benchmarks/localizer.py --json --model smollm2    SmolLM2-135M alone: 20 planted tokens beside float64

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

Growth. One token of 100 times the healthy norm; 512 to 16,384 tokens in rows of 64 or 256, 8 micro-batches; then
4,096 tokens in rows of 64, 8 micro-batches over 2, 4 and 8 ranks.
Table. The same at 1 to 64 micro-batches of 512 tokens' worth, whole and with the micro-batch known (scoped);
medians over seeds. idle_cpu_ratio: CPU seconds of healthy steps under inline mode over those of a probe without it.
"""

import argparse
import json
import math
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from localizing import growth
from localizing.faults import FAULTS, ground
from localizing.step import FAMILIES, model_of
from localizing.strategies import STRATEGIES, Outcome, finite, memory_ratio, step_cpu_s, strategy_outcome

NUM_SEEDS = 12
NUM_SEEDS_LAYER = 72  # of which many have no cancelling row; the first NUM_SEEDS that have one count
NUM_ROWS = 16
MEMORY_FAULT = "one token 100x"  # where the memory of searches is measured: slow, and no fault changes it
MICRO_BATCHES = (1, 2, 4, 8, 16)
DTYPES: dict[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16}


class Trials:
    """Trials by (fault, strategy, dtype, seed); kept in a file, where one is given, and not run again."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.found: dict[tuple[str, str, str, int], dict[str, Any]] = {}
        for line in path.read_text().splitlines() if path is not None and path.exists() else ():
            self._keep(json.loads(line))

    def _keep(self, trial: dict[str, Any]) -> None:
        self.found[trial["fault"], trial["strategy"], trial["dtype"], trial["seed"]] = trial

    def add(self, trial: dict[str, Any]) -> None:
        self._keep(trial)
        if self._path is None:
            return
        with self._path.open("a") as file:
            file.write(json.dumps(trial) + "\n")

    def of(self, fault: str, strategy: str, dtype: str) -> list[dict[str, Any]]:
        return [trial for key, trial in self.found.items() if key[:3] == (fault, strategy, dtype) and "exact" in trial]


def run_trials(
    trials: Trials, seeds: Sequence[int], families: Sequence[str], dtypes: Sequence[str], strategies: Sequence[str]
) -> None:
    """All that is not known yet. A fault that cannot be planted under a seed is a trial without an outcome."""
    for dtype in dtypes:
        for number, seed in enumerate(seeds):
            family = families[seed % len(families)]
            num = MICRO_BATCHES[seed % len(MICRO_BATCHES)]
            wanted = {
                fault: [one for one in strategies if (fault, one, dtype, seed) not in trials.found]
                for fault in FAULTS
                if (number < NUM_SEEDS or fault.startswith("layer"))
                and min(len(trials.of(fault, one, dtype)) for one in strategies) < NUM_SEEDS
            }
            if not any(wanted.values()):
                continue
            base = ground(
                model_of(family, seed), seed, num_micro_batches=num, num_rows=NUM_ROWS // num, autocast=DTYPES[dtype]
            )
            for fault, missing in wanted.items():
                named = {"fault": fault, "dtype": dtype, "seed": seed, "family": family}
                case = FAULTS[fault](base) if missing else None
                one_step_s = min(step_cpu_s(case.step) for _ in range(3)) if case is not None else 0.0
                for strategy in missing:
                    if case is None:
                        trials.add(named | {"strategy": strategy})
                        continue
                    outcome = strategy_outcome(case, strategy)
                    memory = memory_ratio(case, strategy) if fault == MEMORY_FAULT and number == 0 else None
                    measured = {"cpu_ratio": outcome.cpu_s / one_step_s, "memory_ratio": memory}
                    trials.add(named | {"strategy": strategy} | asdict(outcome) | measured)
            _say(f"{dtype} seed {seed} done")


def cases(trials: Trials) -> Iterator[dict[str, Any]]:
    """One entry a fault, strategy and number format."""
    for fault, strategy, dtype in dict.fromkeys(key[:3] for key in trials.found):
        lines = trials.of(fault, strategy, dtype)
        if not lines:
            continue
        found = [Outcome(**{one.name: line[one.name] for one in fields(Outcome)}) for line in lines]
        memory = [line["memory_ratio"] for line in lines if line["memory_ratio"] is not None]
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
            "cpu_ratio": _median([line["cpu_ratio"] for line in lines]),
            "peak_memory_ratio": round(memory[0], 2) if memory else None,
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
    parser.add_argument("--model", choices=[*FAMILIES, "smollm2"], help="one family only")
    parser.add_argument("--dtype", choices=list(DTYPES), action="append", help="fp32, bf16 (default: both)")
    parser.add_argument("--strategy", choices=STRATEGIES, action="append", help="one or several (default: all)")
    parser.add_argument("--only", choices=["cases", "growth"], help="one half")
    parser.add_argument("--seeds", type=int, help=f"seeds of every fault (default {NUM_SEEDS})")
    parser.add_argument("--table-seeds", type=int, default=3, help="seeds of the table of micro-batches (default 3)")
    parser.add_argument("--resume", type=Path, help="file of trials to go on from and to add to")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    started = time.time()
    num = 1 if arguments.quick else arguments.seeds or NUM_SEEDS_LAYER
    seeds = range(arguments.seed_base, arguments.seed_base + num)
    if arguments.model == "smollm2":
        from localizing import language_model

        dtypes = arguments.dtype or list(DTYPES)
        found = language_model.measured(arguments.seed_base, dtypes, arguments.resume, _say)
        sys.stdout.write(json.dumps({"smollm2": found, "seed_base": arguments.seed_base, "commit": _commit()}) + "\n")
        return 0
    families = [arguments.model] if arguments.model else FAMILIES
    result: dict[str, Any] = {"cases": [], "growth": [], "table": []}
    if arguments.only != "growth":
        trials = Trials(arguments.resume)
        run_trials(trials, seeds, families, arguments.dtype or list(DTYPES), arguments.strategy or STRATEGIES)
        result["cases"] = list(cases(trials))
    if arguments.only != "cases":
        family = arguments.model or "qwen3"
        result |= growth.measured(
            family,
            arguments.seed_base,
            quick=arguments.quick,
            strategies=arguments.strategy or STRATEGIES,
            num_seeds=arguments.table_seeds,
            say=_say,
        )
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
