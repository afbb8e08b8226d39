"""Levenberg-Marquardt over one embedding row, as faults need it whose row makes a residual stream cancel.

Ends where the missed is smaller than `tolerance`, after `steps_max` steps, or where no damping brings it nearer.
"""

from collections.abc import Callable

import torch
from torch import Tensor

DAMPING, DAMPING_MIN, DAMPING_MAX = 1e-3, 1e-12, 1e6
DAMPED_BY = (1e-3, 1e-1, 1.0, 10.0, 100.0, 1_000.0)


def settled(missed: Callable[[Tensor], Tensor], row_H: Tensor, tolerance: float, steps_max: int) -> Tensor:
    """The row [H] to which the search comes from this one; `missed` gives what rows [N, H] miss, [N, H], float64."""
    damping, width = DAMPING, len(row_H)
    eye_HH = torch.eye(width, dtype=torch.float64)
    for _ in range(steps_max):
        # All rows of the Jacobian at once: one copy of the row for each output.
        rows_HH = row_H.repeat(width, 1).requires_grad_(True)
        errors_HH = missed(rows_HH)
        (jacobian_HH,) = torch.autograd.grad(errors_HH.diagonal().sum(), rows_HH)
        with torch.no_grad():
            error_H = errors_HH[0]
            if error_H.norm() < tolerance or damping > DAMPING_MAX:
                break
            square_HH, pull_H = jacobian_HH.T @ jacobian_HH, jacobian_HH.T @ error_H
            tried_NH = torch.stack(
                [row_H - torch.linalg.solve(square_HH + damping * by * eye_HH, pull_H) for by in DAMPED_BY]
            )
            sizes_N = missed(tried_NH).norm(dim=1).nan_to_num(torch.inf)
            best = int(sizes_N.argmin())
            if sizes_N[best] < error_H.norm():
                row_H, damping = tried_NH[best], max(damping * DAMPED_BY[best], DAMPING_MIN)
            else:
                damping *= DAMPED_BY[-1]
    return row_H.detach()
