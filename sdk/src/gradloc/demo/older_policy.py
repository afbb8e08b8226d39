"""Sequence-level train/inference mismatch: one answer comes from an older policy.

A worker of the inference fleet missed the weights of long ago and serves one answer, with the
log-probabilities that it truthfully computed. Each token's ratio is harmless; their product, by which
this run corrects, is not. Truthful log-probabilities make a ratio beyond R at most 1/R likely, so it
takes many answers until one does harm. Shapes: B rows, R response positions.
"""

from dataclasses import replace

import torch
import torch.distributed as dist

from gradloc.demo.grpo import token_losses
from gradloc.demo.model import load_weights, new_model, response_logp
from gradloc.demo.moment import Deed, Moment, PlannedFault, place_of
from gradloc.demo.rollout import InferenceCopy, Rollouts
from gradloc.demo.settings import rewards_of
from gradloc.demo.task import PROMPT_LENGTH

ANSWERS_EACH = 32  # that the old worker has for each request; the one that does most harm is served
NUM_TRIED = 32
TOKEN_RATIO_MAX = 4.0
GROWTH_MIN = 8.0  # of the norm of its own gradient over that of usual steps: twice what the median rule asks for
ADVANTAGE_MIN = 0.5


class SequenceMismatch(PlannedFault):
    """One answer, sampled and scored by the policy of an early checkpoint."""

    kind = "sequence"
    by_sequence = True
    _older: InferenceCopy | None = None

    def attempt(self, moment: Moment) -> Deed | None:
        if self._older is None:
            assert moment.checkpoint is not None
            model = new_model(0)
            load_weights(model, moment.checkpoint)
            self._older = InferenceCopy(model, seed=int(self._rng.integers(2**31)))
        problems = moment.rollouts.problems
        answers = self._older.sample(problems * ANSWERS_EACH)
        best: tuple[float, Rollouts, int] | None = None
        for index in self._harmful(moment, answers):
            row = index % len(problems)
            rollouts = _with_row(moment.rollouts, row, answers, index)
            growth = self._norm(moment, rollouts, row) / moment.healthy_norm
            if growth >= GROWTH_MIN and (best is None or growth > best[0]):
                best = (growth, rollouts, row)
        if best is None:
            return None
        growth, rollouts, row = best
        return Deed(rollouts, {**place_of(row, len(problems)), "growth": growth})

    def _harmful(self, moment: Moment, answers: Rollouts) -> list[int]:
        """Answers whose ratio is far from one though no token's is, the largest first."""
        with torch.no_grad():
            gap_BR = (response_logp(moment.model, answers.ids_BT) - answers.logp_BR).masked_fill(~answers.mask_BR, 0.0)
        calm_B = gap_BR.abs().max(dim=1).values <= torch.tensor(TOKEN_RATIO_MAX).log()
        total_B = gap_BR.sum(dim=1).masked_fill(~calm_B, 0.0)
        order = total_B.argsort(descending=True)[:NUM_TRIED].tolist()
        return [index for index in order if float(total_B[index]) > 1.0]

    def _norm(self, moment: Moment, rollouts: Rollouts, row: int) -> float:
        """Norm of the answer's own part of the step's gradient."""
        advantage_B = self.advantages(moment.step, rewards_of(rollouts))
        if abs(float(advantage_B[row])) < ADVANTAGE_MIN:
            return 0.0
        only = slice(row, row + 1)
        logp_1R = response_logp(moment.model, rollouts.ids_BT[only])
        losses_1R = token_losses(
            logp_1R,
            logp_1R.detach(),
            rollouts.logp_BR[only],
            advantage_B[only],
            rollouts.mask_BR[only],
            by_sequence=True,
        )
        num_ranks = dist.get_world_size() if dist.is_initialized() else 1
        loss = losses_1R.sum() / (rollouts.mask_BR.sum() * num_ranks)
        gradients = torch.autograd.grad(loss, list(moment.model.parameters()))
        return float(sum(gradient.square().sum() for gradient in gradients) ** 0.5)


def _with_row(rollouts: Rollouts, row: int, answers: Rollouts, index: int) -> Rollouts:
    ids_BT, mask_BR, logp_BR = rollouts.ids_BT.clone(), rollouts.mask_BR.clone(), rollouts.logp_BR.clone()
    ids_BT[row, PROMPT_LENGTH:] = answers.ids_BT[index, PROMPT_LENGTH:]
    mask_BR[row], logp_BR[row] = answers.mask_BR[index], answers.logp_BR[index]
    return replace(rollouts, ids_BT=ids_BT, mask_BR=mask_BR, logp_BR=logp_BR)
