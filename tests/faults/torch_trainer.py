"""A tiny trainer on torch that gradloc watches as it would a user's: real gradients, real snapshots, and now and then
one token whose reported log-probability is stale.

Writes each step down before it is published ("attempt step spike"), so that what was lost is known later.

    python torch_trainer.py URL STORE RUN ATTEMPT FIRST_STEP RATE SEED TRUTH
"""

import random
import signal
import sys
import time
from pathlib import Path

import torch
from tiny_policy import policy
from torch import Tensor, nn

import gradloc

CALM_STEPS = 36  # of an attempt, before its first spike
APART_STEPS = 40  # between two spikes: more than an incident needs to be resolved
# Steps beyond those, on average: the pool localizes one at a time, in ten seconds of a busy machine, and a queue that
# is longer than a minute says nothing about faults.
SPIKE_EVERY = 60
ROWS, LENGTH = 8, 12


def spikes(seed: int, run: str, attempt: int) -> set[int]:
    """Numbers of the attempt's steps that are spikes; the same for whoever asks."""
    dice = random.Random(f"{seed}/{run}/{attempt}")
    found, number = set(), CALM_STEPS
    while number < 10_000:
        number += int(dice.expovariate(1 / SPIKE_EVERY))
        found.add(number)
        number += APART_STEPS
    return found


def step(model: nn.Module, probe: gradloc.Probe, *, is_spike: bool) -> float:
    """Sample, take the gradient and show it to gradloc; returns the loss."""
    with torch.no_grad():
        ids_BT = torch.randint(10, (ROWS, 1))
        for _ in range(LENGTH):
            ids_BT = torch.cat([ids_BT, torch.multinomial(torch.softmax(model(ids_BT)[:, -1], -1), 1)], dim=1)
    logp_BR = torch.log_softmax(model(ids_BT)[:, :-1], -1).gather(-1, ids_BT[:, 1:, None])[..., 0]
    rollout_logp_BR: Tensor = logp_BR.detach().clone()
    advantage_B = torch.randn(ROWS)
    if is_spike:
        rollout_logp_BR[5, 7] -= 8.0
        advantage_B[5] = 1.0 + advantage_B[5].abs()
    probe.tokens(logp_BR, ids_BT, torch.ones_like(logp_BR), rollout_logp=rollout_logp_BR, advantage=advantage_B)
    loss = -(torch.exp(logp_BR - rollout_logp_BR) * advantage_B[:, None]).mean()
    loss.backward()
    return loss.item()


def main(arguments: list[str]) -> None:
    url, store, run, attempt, first, rate, seed, truth = arguments
    torch.set_num_threads(1)
    torch.manual_seed(int(seed))
    model = policy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    probe = gradloc.watch(
        model, optimizer, run=run, attempt=int(attempt), first_step=int(first), redis=url, store=store,
        model_factory="tiny_policy:policy",
    )  # fmt: skip
    asked_to_stop = False

    def stop(*_: object) -> None:
        nonlocal asked_to_stop
        asked_to_stop = True

    signal.signal(signal.SIGTERM, stop)
    planned = spikes(int(seed), run, int(attempt))
    number, due = 0, time.monotonic()
    with Path(truth).open("a", buffering=1) as lines:
        while not asked_to_stop:
            is_spike = number in planned
            lines.write(f"{attempt} {int(first) + number} {int(is_spike)}\n")
            loss = step(model, probe, is_spike=is_spike)
            probe.observe(loss=loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            number += 1
            due = max(due + 1 / float(rate), time.monotonic() - 1.0)
            time.sleep(max(0.0, due - time.monotonic()))
    probe.close()


if __name__ == "__main__":
    main(sys.argv[1:])
