"""The loss: advantages of a group, the clipped ratio, and the weight that corrects for the copy."""

import pytest
import torch

from gradloc.demo.grpo import CLIP, advantages, token_losses


def test_advantages_of_a_group_cancel_and_do_not_depend_on_other_groups():
    rewards_B = torch.tensor([0.0, 1.0, 0.5, 0.5, 3.0, 3.0, 9.0, 1.0])
    found_NG = advantages(rewards_B, 4).view(2, 4)
    torch.testing.assert_close(found_NG.sum(dim=1), torch.zeros(2), atol=1e-6, rtol=0)
    torch.testing.assert_close(advantages(rewards_B[:4], 4), found_NG[0])


def test_a_group_without_variance_teaches_nothing():
    assert torch.equal(advantages(torch.full((8,), 0.7), 4), torch.zeros(8))


def loss_gradient(old: float, rollout: float, advantage: float, moved: float = 0.0) -> float:
    """dL/dlogp of one token whose policy has moved by `moved` nats since `old`."""
    logp_BR = torch.tensor([[old + moved]], requires_grad=True)
    losses_BR = token_losses(
        logp_BR,
        torch.tensor([[old]]),
        torch.tensor([[rollout]]),
        torch.tensor([advantage]),
        torch.tensor([[True]]),
    )
    (gradient_BR,) = torch.autograd.grad(losses_BR.sum(), logp_BR)
    return float(gradient_BR)


def test_the_coefficient_is_the_advantage_times_the_weight():
    assert loss_gradient(-1.0, -1.0, 2.0) == pytest.approx(-2.0)
    assert loss_gradient(-1.0, -11.0, -2.0) == pytest.approx(2.0 * 22026.4658, rel=1e-5)


def test_the_clip_stops_a_policy_that_has_moved_far_enough():
    assert loss_gradient(-1.0, -1.0, 1.0, moved=2 * CLIP) == 0.0
    assert loss_gradient(-1.0, -1.0, -1.0, moved=2 * CLIP) != 0.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 0.0])
def test_what_is_masked_is_not_in_the_loss(bad: float):
    losses_BR = token_losses(
        torch.tensor([[-1.0, -1.0]]),
        torch.tensor([[-1.0, bad]]),
        torch.tensor([[-1.0, bad]]),
        torch.tensor([1.0]),
        torch.tensor([[True, False]]),
    )
    assert losses_BR.tolist() == [[-1.0, 0.0]]


def test_an_empty_batch_has_an_empty_loss():
    none_BR = torch.zeros(0, 3)
    assert token_losses(none_BR, none_BR, none_BR, torch.zeros(0), none_BR.bool()).shape == (0, 3)
