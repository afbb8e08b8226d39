"""A NaN where nobody looks: old log-probabilities in a recycled buffer.

The trainer keeps old log-probabilities in a buffer that it recycles, with NaN for "not yet known". At
one step the clearing of what lies behind an answer's end begins one position too late. The loss mask
leaves that position out, so the loss is finite; its gradient is zero times NaN. Shapes: B rows, R
response positions.
"""

import torch

from gradloc.demo.moment import Deed, Moment, PlannedFault, place_of


class MaskedNan(PlannedFault):
    """One position behind an answer's end keeps the buffer's NaN."""

    kind = "non-finite"
    _place: tuple[int, int] | None = None

    def attempt(self, moment: Moment) -> Deed | None:
        mask_BR = moment.rollouts.mask_BR
        ends_B = mask_BR.sum(dim=1)  # answers have no holes at this demo's healthy steps
        rows = torch.nonzero(ends_B < mask_BR.shape[1]).flatten().tolist()
        if not rows:
            return None
        row = int(self._rng.choice(rows))
        self._place = (row, int(ends_B[row]))
        return Deed(moment.rollouts, place_of(row, len(mask_BR), self._place[1]))

    def old_logp(self, step: int, old_logp_BR: torch.Tensor, mask_BR: torch.Tensor) -> torch.Tensor:
        if step != self.struck_at or self._place is None:
            return old_logp_BR
        buffer_BR = torch.full_like(old_logp_BR, torch.nan)
        cleared_BR = ~mask_BR
        cleared_BR[self._place] = False
        buffer_BR[mask_BR], buffer_BR[cleared_BR] = old_logp_BR[mask_BR], 0.0
        return buffer_BR
