"""Log-probabilities at another temperature than the sampler's.

From one step on the inference servers run with a new default: they go on sampling at temperature 1, but
report log-probabilities of logits divided by the default. Shapes: B rows, R response positions.
"""

from dataclasses import replace

import torch

from gradloc.demo.moment import CommonFault, Moment
from gradloc.demo.rollout import Rollouts
from gradloc.demo.task import PROMPT_LENGTH

TEMPERATURE = 0.6


class OtherTemperature(CommonFault):
    """Every token's reported logp is that of another temperature."""

    def strike(self, moment: Moment) -> Rollouts:
        rollouts = super().strike(moment)
        if self.struck_at is None:
            return rollouts
        log_probs_BRV = torch.log_softmax(moment.copy.log_probs(rollouts.ids_BT) / TEMPERATURE, dim=-1)
        logp_BR = log_probs_BRV.gather(-1, rollouts.ids_BT[:, PROMPT_LENGTH:, None])[..., 0]
        return replace(rollouts, logp_BR=logp_BR.masked_fill(~rollouts.mask_BR, 0.0))
