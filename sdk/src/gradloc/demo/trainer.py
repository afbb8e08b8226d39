"""The demo's GRPO loop on two ranks over gloo; one process a rank.

    python -m gradloc.demo.trainer --rank 0 --world-size 2 --work DIR --run R --seed 1 --steps 60 ...

A plain PyTorch loop that gradloc watches, as a user's would be. What may go wrong in it comes from
`faults`, by the environment; nothing here, in its logs or in its messages says whether it did.
Shapes: B rows, T positions, R response positions.
"""

import gc
import json
import logging
import math
import os
import sys
import time
from collections import deque
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradloc
from gradloc.demo import courses
from gradloc.demo.courses import Course
from gradloc.demo.envelope import CHECKPOINT, MODELS, TINY, WEIGHTS
from gradloc.demo.faults import from_environment
from gradloc.demo.grpo import token_losses
from gradloc.demo.model import load_weights, response_logp
from gradloc.demo.moment import Fault, Moment
from gradloc.demo.rollout import Problem, Rollouts
from gradloc.demo.settings import (
    GRAD_NORM_MAX,
    GROUP_SIZE,
    LEARNING_RATE,
    NUM_MICRO_BATCHES,
)

RENDEZVOUS_TIMEOUT_S = 120.0
WEIGHTS_TIMEOUT_S = 420.0  # pretraining and services start meanwhile
HEALTHY_WINDOW = 16
_log = logging.getLogger("gradloc.demo")


@dataclass(frozen=True)
class Settings:
    """One rank's part of a run. `work` is the run's own folder, shared by its ranks."""

    work: Path
    run: str
    seed: int
    steps: int
    rank: int = 0
    world_size: int = 1
    redis: str | None = None
    store: str | None = None
    model: str = TINY


@dataclass(frozen=True)
class Batch:
    """One rank's rows of a step, with what the loss needs."""

    rollouts: Rollouts
    rewards_B: torch.Tensor
    advantage_B: torch.Tensor
    old_logp_BR: torch.Tensor

    def rows(self, index: int) -> slice:
        """The rows of micro-batch `index`."""
        num_rows = len(self.rewards_B) // NUM_MICRO_BATCHES
        return slice(index * num_rows, (index + 1) * num_rows)

    def tensors(self, index: int) -> dict[str, torch.Tensor]:
        """Micro-batch `index`, by name."""
        rows = self.rows(index)
        return {
            "ids_BT": self.rollouts.ids_BT[rows],
            "mask_BR": self.rollouts.mask_BR[rows],
            "rollout_logp_BR": self.rollouts.logp_BR[rows],
            "old_logp_BR": self.old_logp_BR[rows],
            "advantage_B": self.advantage_B[rows],
        }


def train(settings: Settings, fault: Fault, course: Course | None = None) -> None:
    """Train; the process group is there already where world_size > 1."""
    torch.set_num_threads(MODELS[settings.model].num_threads)
    course = course or courses.named(settings.model)
    model = course.new_model(settings.seed)
    if course.needs_weights:
        load_weights(model, _awaited(settings.work / WEIGHTS))
    copy = fault.inference_copy(model, 1_000 * settings.seed + settings.rank)
    ddp = DistributedDataParallel(model) if settings.world_size > 1 else model
    optimizer = course.optimizer(model.parameters())
    probe = gradloc.watch(
        ddp,
        optimizer,
        run=settings.run,
        redis=settings.redis,
        store=settings.store,
        tokenizer=course.tokenizer(),
        labels={"task": course.task, "algorithm": "grpo"},
    )
    rng = np.random.default_rng([settings.seed, 2, settings.rank])
    norms: deque[float] = deque(maxlen=HEALTHY_WINDOW)
    previous: Rollouts | None = None
    for step in range(settings.steps):
        copy.sync(model)
        rollouts = copy.sample(_problems(course, rng))
        if previous is not None and norms:
            healthy_norm = float(np.nanmedian(norms))
            checkpoint = settings.work / CHECKPOINT
            rollouts = fault.strike(
                Moment(step, settings.rank, rollouts, previous, copy, model, healthy_norm, checkpoint)
            )
        batch = _batch(model, rollouts, fault, step)
        parts = [batch.tensors(index) for index in range(NUM_MICRO_BATCHES)]
        if fault.struck_at == step:
            fault.testify(settings.rank, model, parts)
        loss = _backward(ddp, batch, probe, settings.world_size, fault, step)
        fault.reduced(step, model)
        metrics = _metrics(batch)
        for group in optimizer.param_groups:
            group["lr"] = fault.learning_rate(step) * (course.learning_rate / LEARNING_RATE)
        lr = optimizer.param_groups[0]["lr"]
        decision = probe.observe(loss=loss, lr=lr, **metrics)  # type: ignore[arg-type]  # none of them is `step`
        fault.observed(step, decision, settings.rank, model, parts)
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), GRAD_NORM_MAX))
        norms.append(norm)
        if math.isfinite(norm):  # as other trainers do: one bad step must not end in weights that are not finite
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        previous = rollouts
        if settings.rank == 0:
            _progress(settings.work, {"step": step, "ts": time.time(), "grad_norm": norm, **metrics})
        if fault.is_over(step):
            break
    stall_s = probe.stall_s  # closing is not part of the loop
    probe.close()
    outcome = {"steps": step + 1, "stall_s": stall_s, "num_events_dropped": probe.num_events_dropped}
    (settings.work / f"outcome-{settings.rank}.json").write_text(json.dumps(outcome))


def _problems(course: Course, rng: np.random.Generator) -> tuple[Problem, ...]:
    picked = rng.choice(course.num_prompts, course.groups_per_rank, replace=False)
    return tuple(course.problem(int(index)) for index in picked for _ in range(GROUP_SIZE))


def _batch(model: torch.nn.Module, rollouts: Rollouts, fault: Fault, step: int) -> Batch:
    rewards_B = fault.rewards(step, rollouts)
    with torch.no_grad():
        chunks = rollouts.ids_BT.chunk(NUM_MICRO_BATCHES)
        old_logp_BR = torch.cat([response_logp(model, ids_BT, rollouts.prompt_length) for ids_BT in chunks])
    old_logp_BR = fault.old_logp(step, old_logp_BR, rollouts.mask_BR)
    return Batch(rollouts, rewards_B, fault.advantages(step, rewards_B), old_logp_BR)


def _backward(ddp: Any, batch: Batch, probe: gradloc.Probe, world_size: int, fault: Fault, step: int) -> float:
    """All micro-batches' backward; the loss is a mean over the tokens of all ranks."""
    num_tokens = fault.counted(step, batch.rollouts.mask_BR).sum().double()
    if world_size > 1:
        dist.all_reduce(num_tokens)
    num_tokens.clamp_(min=1)
    total = 0.0
    for index in range(NUM_MICRO_BATCHES):
        part = batch.tensors(index)
        last = index == NUM_MICRO_BATCHES - 1
        with nullcontext() if last or world_size == 1 else ddp.no_sync():
            logp_BR = response_logp(ddp, part["ids_BT"], batch.rollouts.prompt_length)
            probe.tokens(
                logp_BR,
                part["ids_BT"],
                part["mask_BR"],
                rollout_logp=part["rollout_logp_BR"],
                old_logp=part["old_logp_BR"],
                advantage=part["advantage_B"],
                uid=[one.uid for one in batch.rollouts.problems[batch.rows(index)]],
                rollout_ids=batch.rollouts.sampled[batch.rows(index)],
            )
            losses_BR = token_losses(
                logp_BR,
                part["old_logp_BR"],
                part["rollout_logp_BR"],
                part["advantage_B"],
                part["mask_BR"],
                by_sequence=fault.by_sequence,
            )
            # DDP averages over ranks; times world_size makes it the sum that the mean needs.
            loss = losses_BR.sum() * (world_size / num_tokens.item())
            torch.autograd.backward(loss)
        total += loss.item()
    return total


def _metrics(batch: Batch) -> dict[str, float]:
    rewards_NG = batch.rewards_B.view(-1, GROUP_SIZE)
    return {
        "reward_mean": float(rewards_NG.mean()),
        "reward_std": float(rewards_NG.std()),
        "accuracy": float((rewards_NG == 1).float().mean()),
        "num_zero_variance_groups": float((rewards_NG.std(dim=1) == 0).sum()),
    }


def _progress(work: Path, row: dict[str, float]) -> None:
    with (work / "progress.jsonl").open("a") as lines:
        lines.write(json.dumps(row) + "\n")


def _awaited(path: Path) -> Path:
    """The path, once the file is there. Raises TimeoutError."""
    deadline = time.monotonic() + WEIGHTS_TIMEOUT_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path} did not appear within {WEIGHTS_TIMEOUT_S:.0f} s")
        time.sleep(0.1)
    return path


@click.command()
@click.option("--work", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--run", required=True)
@click.option("--seed", type=int, required=True)
@click.option("--steps", type=click.IntRange(1, 100_000), required=True)
@click.option("--rank", type=int, default=0)
@click.option("--world-size", type=click.IntRange(1, 64), default=1)
@click.option("--redis", default=None)
@click.option("--store", default=None)
@click.option("--model", type=click.Choice(list(MODELS)), default=TINY)
def main(**options: Any) -> None:
    """One rank of the demo's training run."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    settings = Settings(**options)
    if settings.world_size > 1:
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            "gloo",
            init_method=f"file://{settings.work / 'rendezvous'}",
            rank=settings.rank,
            world_size=settings.world_size,
            timeout=timedelta(seconds=RENDEZVOUS_TIMEOUT_S),
        )
    _log.info("rank %d of %d begins", settings.rank, settings.world_size)
    try:
        course = courses.named(settings.model)
        train(settings, from_environment(settings.seed, settings.world_size, course.first_steps), course)
    finally:
        if dist.is_initialized():
            # DDP sits in cycles and holds the group: its threads would outlive the interpreter, which then aborts.
            gc.collect()
            dist.destroy_process_group()
    _log.info("rank %d has finished", settings.rank)


if __name__ == "__main__":
    main()
