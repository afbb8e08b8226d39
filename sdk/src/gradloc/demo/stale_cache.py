"""Token-level train/inference mismatch: the copy scores one token from stale state.

A slot of the inference copy still holds the key/value cache of the sequence that had it the step
before; one token's logp is computed against that prefix and reported as if it were the token's own.
Shapes: B rows, T positions, P prompt, R response positions, V vocabulary.
"""

import math
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from gradloc.demo.growth import logits_pull
from gradloc.demo.grpo import advantages
from gradloc.demo.moment import Deed, MicroBatches, Moment, PlannedFault, place_of
from gradloc.demo.rollout import InferenceCopy, Rollouts
from gradloc.demo.settings import GROUP_SIZE, rewards_of
from gradloc.demo.testimony import write_batch, write_planted, write_weights

GROWTH_MIN = 80.0  # of the gradient at the logits over that of the whole rank: smaller is no spike to speak of
GROWTH_MAX_OF_TWO = 800.0  # so that neither of two is nothing beside the other


def stale_logp(copy: InferenceCopy, previous: Rollouts, rollouts: Rollouts) -> torch.Tensor:
    """What the copy would report for each token with the previous occupant's cache before it: [B, R]."""
    columns = []
    for position in range(rollouts.prompt_length, rollouts.ids_BT.shape[1]):
        contexts_BS = torch.cat(
            [previous.ids_BT[:, : position - 1], rollouts.ids_BT[:, position - 1 : position]], dim=1
        )
        log_probs_BV = copy.log_probs_after(contexts_BS)
        columns.append(log_probs_BV.gather(-1, rollouts.ids_BT[:, position, None]))
    return torch.cat(columns, dim=1)


class TokenMismatch(PlannedFault):
    """One token's reported logp is stale."""

    growth_max = math.inf

    def attempt(self, moment: Moment) -> Deed | None:
        rollouts = moment.rollouts
        stale_BR = stale_logp(moment.copy, moment.previous, rollouts)
        growth_BR = _growth(moment, stale_BR)
        places = torch.nonzero((growth_BR >= GROWTH_MIN) & (growth_BR <= self.growth_max)).tolist()
        if not places:
            return None
        row, at = places[int(self._rng.integers(len(places)))]
        planted = {
            **place_of(row, len(rollouts.problems), at, rollouts.prompt_length),
            "growth": float(growth_BR[row, at]),
            "reported_logp": float(rollouts.logp_BR[row, at]),
            "stale_logp": float(stale_BR[row, at]),
        }
        return Deed(rollouts.with_logp(row, at, float(stale_BR[row, at])), planted)


class TwoMismatches(TokenMismatch):
    """A stale token on every rank, at one step."""

    kind = "tokens"
    growth_max = GROWTH_MAX_OF_TWO

    def __init__(self, seed: int, world_size: int, judge_dir: Path) -> None:
        super().__init__(seed, world_size, judge_dir)
        self._seed = seed

    def strike(self, moment: Moment) -> Rollouts:
        if self.struck_at is not None or moment.step < self._first_step:
            return moment.rollouts
        # The same generator on every rank would choose the same place.
        self._rng = np.random.default_rng([self._seed, 3, moment.step, moment.rank])
        deed = self.attempt(moment)
        found = torch.tensor(float(deed is not None))
        if dist.is_initialized():
            dist.all_reduce(found, op=dist.ReduceOp.MIN)
        if not found or deed is None:
            return moment.rollouts
        self.struck_at = moment.step
        self._planted = {"step": moment.step}
        return deed.rollouts

    def testify(self, rank: int, model: torch.nn.Module, parts: MicroBatches) -> None:
        write_batch(self._judge_dir, rank, parts)
        if rank == 0:
            write_weights(self._judge_dir, model)
            write_planted(self._judge_dir, {**self._planted, "kind": self.kind})


def _growth(moment: Moment, stale_BR: torch.Tensor) -> torch.Tensor:
    """Gradient at the logits of each token with its stale logp, over that of the rank's whole batch: [B, R]."""
    rollouts = moment.rollouts
    pull_BR, logp_BR = logits_pull(moment.model, rollouts, advantages(rewards_of(rollouts), GROUP_SIZE))
    whole = (pull_BR * torch.exp(logp_BR - rollouts.logp_BR)).square().sum().sqrt()
    return pull_BR * torch.exp(logp_BR - stale_BR) / whole.clamp(min=1e-30)
