"""Where finite differences fail, exact derivatives step in."""

import torch
from torch import Tensor, nn

from gradloc.attribution import attribute
from gradloc.policy import Meter, Policy
from gradloc.replay import coefficients_of, replay


class Stepped(nn.Module):
    """Logits on a coarse grid, with the derivatives of those off it: as a router that flips, small moves jump."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, ids_BT: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Tensor:
        logits = self.inner(ids_BT, attention_mask=attention_mask, position_ids=position_ids).logits
        return logits + (torch.round(logits * 10) / 10 - logits).detach()


def attributed(policy, step):
    coefficients = coefficients_of(step.placed)
    replayed = replay(policy, step.placed, coefficients)
    return attribute(policy, step.placed, coefficients, replayed.gradient, replayed.logp)


def test_where_no_eps_is_sound_exact_derivatives_are(trainer):
    step = trainer.step(trainer.model(), fault=trainer.stale(6.0))
    found = attributed(Policy(Stepped(step.model), Meter(1)), step)
    assert found.eps == 0.0
    assert abs(found.checksum - 1) <= 1e-3


def test_behind_a_residual_stream_that_nearly_cancels_shares_are_the_oracles(trainer, cancel):
    """The logp bends within any eps that rounding allows, or nearly."""
    model = trainer.model(0, num_layers=6, hidden_size=64, tied=False)
    shape = {"seed": 5, "num_micro_batches": 3}
    calm = trainer.step(model, **shape)
    cancel(model, calm.ranks[1][1].ids_BT[2, :9], token_id=1)

    def tool_token(inputs):
        inputs[1][1]["ids"][2, 9] = 1

    step = trainer.step(model, fault=tool_token, **shape)
    shares, _ = trainer.oracle(step)
    found = attributed(step.policy(), step)
    assert abs(found.checksum - 1) <= 5e-3
    differences = [float((one - other).abs().max()) for one, other in zip(found.shares, shares, strict=True)]
    assert max(differences) <= 5e-3
