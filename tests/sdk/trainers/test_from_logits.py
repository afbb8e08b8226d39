"""Coefficients from the gradient at the logits: what a hook on log-probabilities would see, remedies included."""

import pytest
import torch
from torch import Tensor

from gradloc.integrations.from_logits import CoefficientsFromLogits, standing_in

LABELS_BT = torch.tensor([[-100, 3, 1, 4], [0, 2, -100, 2]])
MASK_BR = LABELS_BT[:, 1:] != -100
WEIGHT_BR = torch.tensor([[0.5, -2.0, 1e3], [1e-4, 7.0, 0.0]])


def logp_of(logits_BTV: Tensor) -> Tensor:
    targets_BR = LABELS_BT[:, 1:].clamp(min=0)
    return torch.log_softmax(logits_BTV[:, :-1], -1).gather(-1, targets_BR.unsqueeze(-1)).squeeze(-1)


@pytest.mark.parametrize("sharpness", [1.0, 12.0])
def test_they_are_what_the_loss_says(sharpness: float) -> None:
    logits_BTV = (sharpness * torch.randn(2, 4, 5)).requires_grad_()
    capture = CoefficientsFromLogits(logits_BTV, LABELS_BT, MASK_BR)
    seen: list[Tensor] = []
    capture.logp_BR.register_hook(seen.append)
    (WEIGHT_BR * MASK_BR * logp_of(logits_BTV)).sum().backward()
    torch.testing.assert_close(capture.logp_BR.detach()[MASK_BR], logp_of(logits_BTV).detach()[MASK_BR])
    torch.testing.assert_close(seen[0], WEIGHT_BR * MASK_BR, rtol=1e-4, atol=1e-5)


def test_what_a_hook_makes_of_them_is_what_the_loss_goes_on_with() -> None:
    logits_BTV = torch.randn(2, 4, 5, dtype=torch.float64)
    changed, expected = logits_BTV.clone().requires_grad_(), logits_BTV.clone().requires_grad_()
    capture = CoefficientsFromLogits(changed, LABELS_BT, MASK_BR, changes=True)
    capture.logp_BR.register_hook(lambda grad: grad * 0.25)
    (WEIGHT_BR * MASK_BR * logp_of(changed)).sum().backward()
    (0.25 * WEIGHT_BR * MASK_BR * logp_of(expected)).sum().backward()
    torch.testing.assert_close(changed.grad, expected.grad, rtol=1e-3, atol=1e-4)


def test_a_coefficient_outside_the_labels_reaches_no_token() -> None:
    values_BR = torch.randn(2, 3, requires_grad=True)
    given_BR = values_BR * 1.0
    leaf_BR = standing_in(given_BR, MASK_BR)
    seen: list[Tensor] = []
    leaf_BR.register_hook(seen.append)
    (WEIGHT_BR + 1).mul(given_BR).sum().backward()
    torch.testing.assert_close(seen[0], (WEIGHT_BR + 1) * MASK_BR)


def test_logits_that_are_not_one_a_position_are_refused() -> None:
    with pytest.raises(ValueError, match="expected one a position"):
        CoefficientsFromLogits(torch.randn(2, 3, 5, requires_grad=True), LABELS_BT, MASK_BR)
