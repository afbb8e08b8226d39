"""Supervised training before GRPO, just long enough that rewards are not all zero.

The demonstrations are noisy: neighbouring digits are swapped now and then. So the model is sure of what
cannot come next but not of what comes, and GRPO has something left to improve.

    python -m gradloc.demo.pretraining --seed 1 --out weights.safetensors

One process, one thread; the result is a function of the seed.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

from gradloc.demo.envelope import CHECKPOINT
from gradloc.demo.model import new_model, response_logp, save_weights
from gradloc.demo.task import NUM_PROMPTS, PAD, RESPONSE_LENGTH, problem

NUM_STEPS = 260
CHECKPOINT_STEP = 60
BATCH_ROWS = 32
LEARNING_RATE = 4e-3
SWAP_PROBABILITY = 0.2


def pretrained(seed: int, after_step: Callable[[int, Any], None] = lambda step, model: None) -> Any:
    """A model that sorts some of the time."""
    torch.set_num_threads(1)
    model = new_model(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    rng = np.random.default_rng([seed, 1])
    for step in range(NUM_STEPS):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / 20) * 0.5 * (1 + math.cos(math.pi * step / NUM_STEPS))
        ids_BT, mask_BR = _batch(rng)
        logp_BR = response_logp(model, ids_BT)
        loss = -(logp_BR * mask_BR).sum() / mask_BR.sum()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        after_step(step, model)
    return model


def _batch(rng: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    rows, masks = [], []
    for index in rng.integers(0, NUM_PROMPTS, BATCH_ROWS):
        asked = problem(int(index))
        shown = _demonstration(asked.answer, rng)
        padding = RESPONSE_LENGTH - len(shown)
        rows.append([*asked.prompt, *shown, *[PAD] * padding])
        masks.append([1.0] * len(shown) + [0.0] * padding)
    return torch.tensor(rows), torch.tensor(masks)


def _demonstration(answer: tuple[int, ...], rng: np.random.Generator) -> list[int]:
    """The answer with neighbouring digits swapped now and then; <eos> stays last."""
    shown, at = list(answer), 0
    while at < len(shown) - 2:
        if rng.random() < SWAP_PROBABILITY:
            shown[at], shown[at + 1] = shown[at + 1], shown[at]
            at += 1
        at += 1
    return shown


@click.command()
@click.option("--seed", type=int, required=True)
@click.option("--out", type=click.Path(path_type=Path), required=True)
def main(seed: int, out: Path) -> None:
    """Train and write the weights, and on the way an earlier state beside them."""

    def keep(step: int, model: Any) -> None:
        if step == CHECKPOINT_STEP:
            save_weights(model, out.parent / CHECKPOINT)

    model = pretrained(seed, keep)
    part = out.with_suffix(".part")
    save_weights(model, part)
    part.rename(out)


if __name__ == "__main__":
    main()
