"""What is trained on what: a model, a task, and the size of a step; each under the name of `gradloc demo --model`."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from gradloc.demo import arithmetic, smollm2, task
from gradloc.demo.envelope import SMOLLM2
from gradloc.demo.model import new_model
from gradloc.demo.rollout import Problem
from gradloc.demo.settings import GROUPS_PER_RANK, LEARNING_RATE

# Past the rules' warm-up of eight steps; each takes seconds.
FIRST_STEPS_SMOLLM2 = (10, 13)
# With plain descent and a clipped gradient this is the length of a step: about that of AdamW at 1e-6.
LEARNING_RATE_SMOLLM2 = 1e-2


@dataclass(frozen=True)
class Course:
    """`new_model(seed)`: its initial state; `needs_weights`: those of the pretraining are to be loaded into it."""

    task: str
    num_prompts: int
    problem: Callable[[int], Problem]
    new_model: Callable[[int], Any]
    tokenizer: Callable[[], Any]
    optimizer: Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]
    groups_per_rank: int = GROUPS_PER_RANK
    learning_rate: float = LEARNING_RATE
    needs_weights: bool = True
    first_steps: tuple[int, int] | None = None  # when a fault may strike, if not as usual


def named(name: str) -> Course:
    """The course of a model in `envelope.MODELS`. Raises WeightsMissing where its weights are not installed."""
    return _language_model() if name == SMOLLM2 else _tiny()


def _tiny() -> Course:
    return Course(
        task="sort",
        num_prompts=task.NUM_PROMPTS,
        problem=task.problem,
        new_model=new_model,
        tokenizer=task.tokenizer,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.0),
    )


def _language_model() -> Course:
    loaded = smollm2.load()

    def optimizer(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        # AdamW's two moments would take another gigabyte.
        return torch.optim.SGD(parameters, lr=LEARNING_RATE_SMOLLM2)

    return Course(
        task="sums",
        num_prompts=arithmetic.NUM_PROMPTS,
        problem=lambda index: arithmetic.problem(index, loaded.tokenizer),
        new_model=lambda _seed: loaded.model,
        tokenizer=lambda: loaded.tokenizer,
        optimizer=optimizer,
        groups_per_rank=1,
        learning_rate=LEARNING_RATE_SMOLLM2,
        needs_weights=False,
        first_steps=FIRST_STEPS_SMOLLM2,
    )
