"""A token that the copy gave probability zero: log-probabilities after the sampler's filter.

One worker samples from all of the distribution but reports log-probabilities of its nucleus: a token
outside it has probability zero, the importance ratio is infinite. Shapes: B rows, R response
positions, V vocabulary.
"""

from dataclasses import replace

import torch

from gradloc.demo.moment import Deed, Moment, PlannedFault, place_of
from gradloc.demo.task import PROMPT_LENGTH

TOP_P = 0.95
ADVANTAGE_MIN = 0.3


def nucleus_log_probs(log_probs_NV: torch.Tensor) -> torch.Tensor:
    """Log-probabilities after the filter: minus infinity outside the fewest tokens that hold TOP_P. [..., V]"""
    sorted_NV, order_NV = log_probs_NV.sort(dim=-1, descending=True)
    before_NV = sorted_NV.exp().cumsum(dim=-1) - sorted_NV.exp()
    kept_NV = torch.zeros_like(before_NV, dtype=torch.bool).scatter(-1, order_NV, before_NV < TOP_P)
    return torch.log_softmax(log_probs_NV.masked_fill(~kept_NV, -torch.inf), dim=-1)


class ZeroProbability(PlannedFault):
    """One answer's log-probabilities are those after the filter, and one of its tokens is outside."""

    kind = "non-finite"

    def attempt(self, moment: Moment) -> Deed | None:
        rollouts = moment.rollouts
        filtered_BRV = nucleus_log_probs(moment.copy.log_probs(rollouts.ids_BT))
        reported_BR = filtered_BRV.gather(-1, rollouts.ids_BT[:, PROMPT_LENGTH:, None])[..., 0]
        reported_BR = reported_BR.masked_fill(~rollouts.mask_BR, 0.0)
        outside_BR = torch.isinf(reported_BR)
        advantage_B = self.advantages(moment.step, self.rewards(moment.step, rollouts))
        fitting_B = (outside_BR.sum(dim=1) == 1) & (advantage_B.abs() >= ADVANTAGE_MIN)
        rows = torch.nonzero(fitting_B).flatten().tolist()
        if not rows:
            return None
        row = int(self._rng.choice(rows))
        logp_BR = rollouts.logp_BR.clone()
        logp_BR[row] = reported_BR[row]
        place = place_of(row, len(rollouts.problems), int(outside_BR[row].nonzero()[0]))
        return Deed(replace(rollouts, logp_BR=logp_BR), place)
