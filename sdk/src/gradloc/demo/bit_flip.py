"""Bad hardware: one bit of one gradient flips on one rank.

The gradients were reduced over ranks and lie in one rank's memory when the topmost bit of one value's
exponent flips. Nothing in the batch or the code explains what follows.
"""

import numpy as np
import torch

from gradloc.demo.moment import CommonFault, Moment
from gradloc.demo.rollout import Rollouts

BIT = 30  # the exponent's topmost: for a value below 2 it is zero, and one makes it astronomic


class FlippedBit(CommonFault):
    """One value of one parameter's gradient."""

    kind = "rank"

    def strike(self, moment: Moment) -> Rollouts:
        rollouts = super().strike(moment)
        if self.struck_at == moment.step:
            self._own = moment.rank == self._rank
            self._planted["rank"] = self._rank
        return rollouts

    def reduced(self, step: int, model: torch.nn.Module) -> None:
        if step != self.struck_at or not self._own:
            return
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        gradient = gradients[int(self._rng.integers(len(gradients)))]
        bits = gradient.view(-1).view(torch.int32)
        alive = torch.nonzero(bits).flatten()
        at = int(alive[int(self._rng.integers(len(alive)))])
        with torch.no_grad():
            bits[at] ^= int(np.int32(1 << BIT))
