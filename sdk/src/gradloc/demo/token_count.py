"""A loss divided by the wrong number of tokens.

The number comes from the window of micro-batches that are accumulated; at the end of an epoch the
window is empty, its tokens are none, and none is rounded up to one. Shapes: B rows, R response
positions.
"""

import torch

from gradloc.demo.moment import CommonFault


class EmptyWindow(CommonFault):
    """At one step nobody's tokens are counted."""

    def counted(self, step: int, mask_BR: torch.Tensor) -> torch.Tensor:
        return mask_BR[:0] if step == self.struck_at else mask_BR
