"""Coefficients dL/dlogp where a trainer's loss starts from logits and leaves no log-probabilities.

A loss that knows the logits through the labels' log-probabilities has the gradient G = c (1_y - p) at them, so
c = <G, d> / <d, d> with d = 1_y - p. What such a projection leaves over (label smoothing, distillation) is no
token's and shows as the rest. Knows no trainer. Shapes: B rows, T positions, R = T - 1, V vocabulary.
"""

import torch
from torch import Tensor

_SMALLEST = 1e-30  # of <d, d>: the label is certain, and its gradient zero whatever c is


class CoefficientsFromLogits:
    """logp_BR: the labels' log-probabilities, a leaf that receives c when the loss is differentiated."""

    def __init__(self, logits_BTV: Tensor, labels_BT: Tensor, mask_BR: Tensor) -> None:
        if not logits_BTV.requires_grad or logits_BTV.shape[:2] != labels_BT.shape:
            raise ValueError(
                f"logits have shape {tuple(logits_BTV.shape)} for labels {tuple(labels_BT.shape)}; "
                "expected one a position, with a gradient"
            )
        self._logits_BTV = logits_BTV.detach()
        self._targets_BR = labels_BT[:, 1:].masked_fill(~mask_BR, 0).to(logits_BTV.device)
        rows = [self._row_logp(row) for row in range(logits_BTV.shape[0])]  # one at a time: V is large
        self.logp_BR = torch.stack(rows).requires_grad_()
        logits_BTV.register_hook(self._saw)  # type: ignore[no-untyped-call]

    def _row_logp(self, row: int) -> Tensor:
        logits_RV = self._logits_BTV[row, :-1].float()
        picked_R = logits_RV.gather(-1, self._targets_BR[row].unsqueeze(-1)).squeeze(-1)
        return picked_R - logits_RV.logsumexp(dim=-1)

    def _saw(self, grad_BTV: Tensor) -> None:
        rows = [self._row_coefficient(row, grad_BTV[row, :-1]) for row in range(grad_BTV.shape[0])]
        self.logp_BR.backward(torch.stack(rows))  # type: ignore[no-untyped-call]

    def _row_coefficient(self, row: int, grad_RV: Tensor) -> Tensor:
        off_RV = -torch.softmax(self._logits_BTV[row, :-1].float(), dim=-1)
        off_RV.scatter_add_(1, self._targets_BR[row].unsqueeze(-1), off_RV.new_ones(off_RV.shape[0], 1))
        return (grad_RV.float() * off_RV).sum(-1) / off_RV.square().sum(-1).clamp(min=_SMALLEST)
