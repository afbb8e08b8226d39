"""Coefficients dL/dlogp where the loss does not leave log-probabilities that a hook could stay on.

Two cases, one device: a leaf tensor that stands in for the log-probabilities. Hooks on it see c, and what they make of
it is what the loss goes on with. Knows no trainer. Shapes: B rows, T positions, R = T - 1, V vocabulary.
"""

import torch
from torch import Tensor

_SMALLEST = 1e-30  # of <d, d>: the label is certain, and its gradient zero whatever c is


def standing_in(values_BR: Tensor, mask_BR: Tensor) -> Tensor:
    """A leaf for values that a fused head fills with a constant outside the labels: the loss may well have a
    coefficient there, but it reaches no token."""
    leaf_BR = values_BR.detach().requires_grad_()

    def saw(grad_BR: Tensor) -> Tensor:
        return through(leaf_BR, grad_BR.masked_fill(~mask_BR, 0.0))

    values_BR.register_hook(saw)  # type: ignore[no-untyped-call]
    return leaf_BR


class CoefficientsFromLogits:
    """logp_BR: the labels' log-probabilities, a leaf that receives c when the loss is differentiated.

    A loss that knows the logits through the labels' log-probabilities has the gradient G = c (1_y - p) at them, so
    c = <G, d> / <d, d> with d = 1_y - p. What such a projection leaves over (label smoothing, distillation) is no
    token's and shows as the rest. changes: hooks on logp_BR change c, and the loss is to go on with what they make.
    """

    def __init__(self, logits_BTV: Tensor, labels_BT: Tensor, mask_BR: Tensor, *, changes: bool = False) -> None:
        if not logits_BTV.requires_grad or logits_BTV.shape[:2] != labels_BT.shape:
            raise ValueError(
                f"logits have shape {tuple(logits_BTV.shape)} for labels {tuple(labels_BT.shape)}; "
                "expected one a position, with a gradient"
            )
        self._changes = changes
        self._logits_BTV = logits_BTV.detach()
        self._targets_BR = labels_BT[:, 1:].masked_fill(~mask_BR, 0).to(logits_BTV.device)
        rows = [self._row_logp(row) for row in range(logits_BTV.shape[0])]  # one at a time: V is large
        self.logp_BR = torch.stack(rows).requires_grad_()
        logits_BTV.register_hook(self._saw)  # type: ignore[no-untyped-call]

    def _row_logp(self, row: int) -> Tensor:
        logits_RV = self._logits_BTV[row, :-1].float()
        picked_R = logits_RV.gather(-1, self._targets_BR[row].unsqueeze(-1)).squeeze(-1)
        return picked_R - logits_RV.logsumexp(dim=-1)

    def _saw(self, grad_BTV: Tensor) -> Tensor | None:
        rows = range(grad_BTV.shape[0])
        c_BR = torch.stack([self._coefficient(grad_BTV[row, :-1], self._off(row)) for row in rows])
        changed_BR = through(self.logp_BR, c_BR)
        if not self._changes:
            return None
        grad_BTV = grad_BTV.clone()
        for row in rows:
            more_R1 = (changed_BR[row] - c_BR[row]).unsqueeze(-1)
            grad_BTV[row, :-1] += (more_R1 * self._off(row)).to(grad_BTV.dtype)
        return grad_BTV

    def _off(self, row: int) -> Tensor:
        """d = 1_y - p of a row, [R, V]."""
        off_RV = -torch.softmax(self._logits_BTV[row, :-1].float(), dim=-1)
        return off_RV.scatter_add_(1, self._targets_BR[row].unsqueeze(-1), off_RV.new_ones(off_RV.shape[0], 1))

    def _coefficient(self, grad_RV: Tensor, off_RV: Tensor) -> Tensor:
        return (grad_RV.float() * off_RV).sum(-1) / off_RV.square().sum(-1).clamp(min=_SMALLEST)


def through(leaf_BR: Tensor, grad_BR: Tensor) -> Tensor:
    """What the hooks on a leaf make of a gradient."""
    leaf_BR.grad = None
    leaf_BR.backward(grad_BR.to(leaf_BR.dtype))  # type: ignore[no-untyped-call]
    changed_BR, leaf_BR.grad = leaf_BR.grad, None
    assert changed_BR is not None
    return changed_BR
