"""Spikes that nobody planted, explained and compared with a brute-force oracle.

    python benchmarks/natural_spikes.py --json              6 seeds; half an hour on 2 cores
    python benchmarks/natural_spikes.py --json --quick      1 seed, 60 steps: shows that it runs
    python benchmarks/natural_spikes.py --json --resume F   lines go to F; seeds finished in it are not run again

The harsh setting of benchmarks/remedies.py: a tiny policy that sorts digits, 220 supervised steps, then GRPO of
12 x 8 with PPO's clip at learning rate 1e-4, answers sampled (top-p .999) by a copy of 3 bits that is 8 steps stale
and reports the log-probability it sampled with. A spike: more than four times the median of the last 32 calm
norms; that bar is the limit of the localization. The oracle has every token's share by a float64 backward pass.

    right       the finding's first culprit has the oracle's largest share; num_first tokens have it: the same answer
                may have been sampled twice, and then each of its tokens has an equal one
    certified   the norm without the culprits is under the limit, attributed again where need be
"""

import argparse
import copy
import itertools
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from staircase.policy import PROMPT_LENGTH, InferenceCopy, logp_of, pretrained
from staircase.run import HARSH, SPIKE_FACTOR, SPIKE_WINDOW, _rollout, token_losses
from torch import Tensor

from gradloc.fidelity import StepFacts
from gradloc.layers import layer_key
from gradloc.localization import localize
from gradloc.policy import Meter, Policy, place
from gradloc.snapshot import MicroBatch

NUM_SEEDS = 6
SETTING = HARSH
NUM_CALM_MIN = 8
TIE = 1e-9  # relative: twice the same answer in float64


def spikes_of(seed: int, num_steps: int) -> Iterator[dict[str, Any]]:
    """One entry a spike of this run."""
    torch.manual_seed(seed)
    model = pretrained(seed, SETTING.pretraining_steps, SETTING.swap)
    inference = InferenceCopy(model, SETTING.copy, seed=1_000 + seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=SETTING.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    rng, fault_rng = np.random.default_rng([seed, 2]), np.random.default_rng([seed, 3])
    calm: list[float] = []
    for step in range(num_steps):
        batch, _, _ = _rollout(SETTING, model, inference, step, rng, fault_rng)
        logp_BR = logp_of(model, batch.ids_BT)
        logp_BR.retain_grad()
        losses_BR = token_losses(logp_BR, batch.logp_BR, batch.advantage_B, batch.mask_BR)
        (losses_BR.sum() / batch.mask_BR.sum()).backward()
        squares: dict[str, float] = {}
        for name, parameter in model.named_parameters():
            square = float(parameter.grad.double().square().sum())
            squares[layer_key(name)] = squares.get(layer_key(name), 0.0) + square
        norm = math.sqrt(sum(squares.values()))
        if len(calm) >= NUM_CALM_MIN and norm > SPIKE_FACTOR * statistics.median(calm[-SPIKE_WINDOW:]):
            micro_batch = MicroBatch(
                ids_BT=batch.ids_BT,
                mask_BR=batch.mask_BR,
                logp_BR=logp_BR.detach(),
                coefficient_BR=logp_BR.grad,
                rollout_logp_BR=batch.logp_BR,
                advantage_BR=batch.advantage_B[:, None].expand_as(batch.logp_BR).clone(),
            )
            layer_norms = {key: math.sqrt(square) for key, square in squares.items()}
            healthy = statistics.median(calm[-SPIKE_WINDOW:])
            yield {"seed": seed, "step": step} | explained(
                copy.deepcopy(model), micro_batch, norm, layer_norms, healthy
            )
        elif norm > 0:
            calm.append(norm)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def explained(
    model: Any, batch: MicroBatch, norm: float, layer_norms: dict[str, float], healthy: float
) -> dict[str, Any]:
    facts = StepFacts(
        step=0, grad_norm=norm, layer_norms=layer_norms, limit=SPIKE_FACTOR * healthy, healthy_norm=healthy
    )
    model.zero_grad(set_to_none=True)
    policy = Policy(model, Meter(batch.ids_BT.numel()))
    finding = localize(policy, place([([batch], 1.0)]), facts)
    share_BR = oracle_shares(model, batch)
    largest = float(share_BR.max())
    first_BR = share_BR >= largest * (1 - TIE)
    first = finding.culprits[0] if finding.culprits else None
    at = None if first is None else (first.sequence, first.token - PROMPT_LENGTH)
    given_g = sum(policy.meter.stages.get(name, 0.0) for name in ("attribution", "verification"))
    return {
        "times_healthy": norm / healthy,
        "verdict": finding.verdict,
        "right": at is not None and bool(first_BR[at]),
        "num_first": int(first_BR.sum()),
        "top_share_oracle": largest,
        "share_reported": None if first is None else first.share,
        "share_error": None if at is None else abs(float(share_BR[at]) - (first.share if first is not None else 0.0)),
        "checksum": finding.checksum,
        "num_culprits": 0 if finding.certificate is None else finding.certificate.num_culprits,
        "certified": finding.certificate is not None and finding.certificate.holds,
        "ratio": None if first is None else first.ratio,
        "advantage": None if first is None else first.advantage,
        "cause": finding.causes[0].name if finding.causes else None,
        "cost_steps": given_g,
    }


def oracle_shares(model: Any, batch: MicroBatch) -> Tensor:
    """<g_i, g> / ||g||² of every token, float64 [B, R], by one backward pass each."""
    exact = copy.deepcopy(model).double()
    parameters = [parameter for parameter in exact.parameters() if parameter.requires_grad]
    coefficient_BR = batch.coefficient_BR.double()
    whole = torch.autograd.grad((_logp(exact, batch.ids_BT) * coefficient_BR).sum(), parameters)
    square = sum(float(g.square().sum()) for g in whole)
    share_BR = torch.zeros_like(coefficient_BR)
    for row in range(coefficient_BR.shape[0]):
        columns = coefficient_BR[row].nonzero().squeeze(-1).tolist()
        logp_R = _logp(exact, batch.ids_BT[row : row + 1])[0]
        for column in columns:
            mine = torch.autograd.grad(logp_R[column], parameters, retain_graph=True)
            dot = sum(float((g * u).sum()) for g, u in zip(whole, mine, strict=True))
            share_BR[row, column] = coefficient_BR[row, column] * dot / square
    return share_BR


def _logp(model: Any, ids_BT: Tensor) -> Tensor:
    logits_BRV = model(input_ids=ids_BT, use_cache=False).logits[:, PROMPT_LENGTH - 1 : -1]
    return torch.log_softmax(logits_BRV, dim=-1).gather(-1, ids_BT[:, PROMPT_LENGTH:, None])[..., 0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one line for machines at the end")
    parser.add_argument("--quick", action="store_true", help="one seed, 60 steps")
    parser.add_argument("--seed-base", type=int, default=301, help="first seed (default 301, as in remedies.py)")
    parser.add_argument("--seeds", type=int, default=NUM_SEEDS, help=f"how many (default {NUM_SEEDS})")
    parser.add_argument("--resume", type=Path, help="file of lines to go on from and to add to")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    started = time.time()
    known: list[dict[str, Any]] = []  # of a seed that was broken off they are found again
    if arguments.resume is not None and arguments.resume.exists():
        known = [json.loads(line) for line in arguments.resume.read_text().splitlines()]
    finished = {one["finished"] for one in known if "finished" in one}
    seeds = range(arguments.seed_base, arguments.seed_base + (1 if arguments.quick else arguments.seeds))
    found = [one for one in known if one.get("seed") in finished]
    for seed in seeds:
        if seed in finished:
            continue
        for one in itertools.chain(spikes_of(seed, 60 if arguments.quick else SETTING.num_steps), [{"finished": seed}]):
            found += [one] if "seed" in one else []
            sys.stderr.write(json.dumps(one) + "\n")
            if arguments.resume is not None:
                with arguments.resume.open("a") as file:
                    file.write(json.dumps(one) + "\n")
    checksums = sorted(abs(one["checksum"] - 1) for one in found if one["checksum"] is not None)
    result = {
        "seeds": list(seeds),
        "spikes": len(found),
        "right_rate": statistics.fmean(one["right"] for one in found) if found else None,
        "certified_rate": statistics.fmean(one["certified"] for one in found) if found else None,
        "checksum_error_max": checksums[-1] if checksums else None,
        "cost_steps_median": statistics.median(one["cost_steps"] for one in found) if found else None,
        "commit": _commit(),
        "seconds": round(time.time() - started),
        "found": found,
    }
    sys.stdout.write((json.dumps(result) if arguments.json else json.dumps(result, indent=1)) + "\n")
    return 0


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=Path(__file__).parent, check=False
    ).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
