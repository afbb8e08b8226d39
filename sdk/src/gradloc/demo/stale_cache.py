"""Token-level train/inference mismatch: the copy scores one token from stale state.

A slot of the inference copy still holds the key/value cache of the sequence that had it the step
before; one token's logp is computed against that prefix and reported as if it were the token's own.
Shapes: B rows, T positions, P prompt, R response positions, V vocabulary.
"""

import torch

from gradloc.demo.grpo import advantages
from gradloc.demo.model import response_log_probs
from gradloc.demo.moment import Deed, Moment, PlannedFault
from gradloc.demo.rollout import InferenceCopy, Rollouts
from gradloc.demo.settings import GROUP_SIZE, NUM_MICRO_BATCHES, rewards_of
from gradloc.demo.task import PROMPT_LENGTH

GROWTH_MIN = 80.0  # of the gradient at the logits over that of the whole rank: smaller is no spike to speak of


def stale_logp(copy: InferenceCopy, previous: Rollouts, rollouts: Rollouts) -> torch.Tensor:
    """What the copy would report for each token with the previous occupant's cache before it: [B, R]."""
    columns = []
    for position in range(PROMPT_LENGTH, rollouts.ids_BT.shape[1]):
        contexts_BS = torch.cat(
            [previous.ids_BT[:, : position - 1], rollouts.ids_BT[:, position - 1 : position]], dim=1
        )
        log_probs_BV = copy.log_probs_after(contexts_BS)
        columns.append(log_probs_BV.gather(-1, rollouts.ids_BT[:, position, None]))
    return torch.cat(columns, dim=1)


class TokenMismatch(PlannedFault):
    """One token's reported logp is stale."""

    def attempt(self, moment: Moment) -> Deed | None:
        rollouts = moment.rollouts
        stale_BR = stale_logp(moment.copy, moment.previous, rollouts)
        growth_BR = _growth(moment, stale_BR)
        places = torch.nonzero(growth_BR >= GROWTH_MIN).tolist()
        if not places:
            return None
        row, at = places[int(self._rng.integers(len(places)))]
        num_rows = len(rollouts.problems) // NUM_MICRO_BATCHES
        planted = {
            "micro_batch": row // num_rows,
            "sequence": row % num_rows,
            "token": PROMPT_LENGTH + at,
            "growth": float(growth_BR[row, at]),
            "reported_logp": float(rollouts.logp_BR[row, at]),
            "stale_logp": float(stale_BR[row, at]),
        }
        return Deed(rollouts.with_logp(row, at, float(stale_BR[row, at])), planted)


@torch.no_grad()
def _growth(moment: Moment, stale_BR: torch.Tensor) -> torch.Tensor:
    """Gradient at the logits of each token with its stale logp, over that of the rank's whole batch: [B, R]."""
    rollouts = moment.rollouts
    advantage_B1 = advantages(rewards_of(rollouts), GROUP_SIZE)[:, None]
    log_probs_BRV = response_log_probs(moment.model, rollouts.ids_BT)
    logp_BR = log_probs_BRV.gather(-1, rollouts.ids_BT[:, PROMPT_LENGTH:, None])[..., 0]
    logits_norm_BR = (1 - 2 * logp_BR.exp() + log_probs_BRV.exp().square().sum(-1)).clamp(min=0).sqrt()
    pull_BR = (advantage_B1.abs() * logits_norm_BR).masked_fill(~rollouts.mask_BR, 0.0)
    whole = (pull_BR * torch.exp(logp_BR - rollouts.logp_BR)).square().sum().sqrt()
    return pull_BR * torch.exp(logp_BR - stale_BR) / whole.clamp(min=1e-30)
