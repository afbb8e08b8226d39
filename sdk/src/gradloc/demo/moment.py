"""When and where something goes wrong in the demo's trainer; what goes wrong is for each fault to say.

A fault strikes once, at the first step from its planned one on where its mechanism has an effect. All
ranks agree on that by a broadcast, and the testimony goes to the judge's folder alone. Shapes: B rows,
R response positions.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from gradloc.demo.grpo import advantages
from gradloc.demo.rollout import InferenceCopy, Rollouts
from gradloc.demo.settings import GROUP_SIZE, LEARNING_RATE, NUM_MICRO_BATCHES, rewards_of
from gradloc.demo.task import PROMPT_LENGTH
from gradloc.demo.testimony import write_batch, write_planted, write_weights

FIRST_STEP_MIN, FIRST_STEP_MAX = 20, 28  # past the warm-up, and enough steps left to see that training goes on
MicroBatches = list[dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Moment:
    """What a fault may look at and change: one rank's step before the trainer uses the rollouts."""

    step: int
    rank: int
    rollouts: Rollouts
    previous: Rollouts  # of the step before: who had the copy's slots
    copy: InferenceCopy
    model: Any  # the trainer's, unwrapped
    healthy_norm: float
    checkpoint: Path | None = None  # an earlier state of the policy


@dataclass(frozen=True)
class Deed:
    """What a fault did on its rank. `embedding` is a token id and its new row, for all ranks."""

    rollouts: Rollouts
    planted: dict[str, Any]
    embedding: tuple[int, torch.Tensor] | None = None


class Fault:
    """The fault that never strikes, and the interface of those that do: what the trainer does by it, step by step.

    `by_sequence`: the run corrects for the copy by the ratio of whole sequences.
    """

    struck_at: int | None = None
    by_sequence = False

    def inference_copy(self, model: Any, seed: int) -> InferenceCopy:
        return InferenceCopy(model, seed)

    def strike(self, moment: Moment) -> Rollouts:
        """The rollouts the trainer shall use."""
        return moment.rollouts

    def rewards(self, step: int, rollouts: Rollouts) -> torch.Tensor:
        """Reward of each row: [B]."""
        return rewards_of(rollouts)

    def advantages(self, step: int, rewards_B: torch.Tensor) -> torch.Tensor:
        return advantages(rewards_B, GROUP_SIZE)

    def old_logp(self, step: int, old_logp_BR: torch.Tensor, mask_BR: torch.Tensor) -> torch.Tensor:
        return old_logp_BR

    def counted(self, step: int, mask_BR: torch.Tensor) -> torch.Tensor:
        """The mask whose tokens are counted: their number divides the loss."""
        return mask_BR

    def reduced(self, step: int, model: torch.nn.Module) -> None:
        """Gradients are reduced over ranks and not yet used."""

    def learning_rate(self, step: int) -> float:
        return LEARNING_RATE

    def observed(self, step: int, decision: str, rank: int, model: torch.nn.Module, parts: MicroBatches) -> None:
        """The watcher has decided about this step; weights have not moved yet."""

    def is_over(self, step: int) -> bool:
        """Whether there is nothing left to see after this step."""
        return False

    def testify(self, rank: int, model: torch.nn.Module, parts: MicroBatches) -> None:
        """Keep what the judge needs of the step that was struck."""


class PlannedFault(Fault):
    """Strikes at a step and on a rank that the seed chooses."""

    kind = "token"  # what the judge shall look for

    def __init__(
        self,
        seed: int,
        world_size: int,
        judge_dir: Path,
        first_steps: tuple[int, int] = (FIRST_STEP_MIN, FIRST_STEP_MAX),
    ) -> None:
        self._rng = np.random.default_rng([seed, 3])
        self._first_step = int(self._rng.integers(*first_steps))
        self._rank = int(self._rng.integers(world_size))
        self._judge_dir = judge_dir
        self._planted: dict[str, Any] = {}

    def attempt(self, moment: Moment) -> Deed | None:
        """Do it on this rank, or None where this step offers no place."""
        raise NotImplementedError

    def strike(self, moment: Moment) -> Rollouts:
        if self.struck_at is not None or moment.step < self._first_step:
            return moment.rollouts
        deed = self.attempt(moment) if moment.rank == self._rank else None
        table_VH = moment.model.get_input_embeddings().weight
        told = torch.zeros(2 + table_VH.shape[1], dtype=torch.float64)
        told[1] = -1
        if deed is not None:
            told[0] = 1
            if deed.embedding is not None:
                told[1], told[2:] = deed.embedding[0], deed.embedding[1]
        if dist.is_initialized():
            dist.broadcast(told, src=self._rank)
        if not told[0]:
            return moment.rollouts
        self.struck_at = moment.step
        if told[1] >= 0:
            with torch.no_grad():
                table_VH[int(told[1])] = told[2:].to(table_VH.dtype)
            moment.copy.sync(moment.model)
        if deed is None:
            return moment.rollouts
        self._planted = {"step": moment.step, "rank": moment.rank, **deed.planted}
        return deed.rollouts

    def testify(self, rank: int, model: torch.nn.Module, parts: MicroBatches) -> None:
        write_batch(self._judge_dir, rank, parts)
        if rank == self._rank:
            write_weights(self._judge_dir, model)
            write_planted(self._judge_dir, {**self._planted, "kind": self.kind, "by_sequence": self.by_sequence})


class CommonFault(PlannedFault):
    """Strikes on every rank at its step: nobody is to blame but the code."""

    kind = "no token"

    def strike(self, moment: Moment) -> Rollouts:
        if self.struck_at is None and moment.step >= self._first_step:
            self.struck_at = moment.step
            self._planted = {"step": moment.step}
        return moment.rollouts


def place_of(row: int, num_rows: int, at: int | None = None, prompt_length: int = PROMPT_LENGTH) -> dict[str, int]:
    """Where a rank's row (and response position) is, in the words of the testimony."""
    rows_each = num_rows // NUM_MICRO_BATCHES
    place = {"micro_batch": row // rows_each, "sequence": row % rows_each}
    return place if at is None else {**place, "token": prompt_length + at}
