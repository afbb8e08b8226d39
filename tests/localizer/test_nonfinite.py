"""NaN and infinities: in a coefficient, a logp, outside the mask, or born inside the network."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from gradloc.localization import localize
from gradloc.policy import Meter, Policy, place
from gradloc.replay import coefficients_of, replay
from gradloc.snapshot import MicroBatch


def with_value(step, name, value, rank=1, index=0, row=2, column=3):
    """The step with one entry of one tensor replaced, and the norm that its trainer saw."""
    batch = step.ranks[rank][index]
    tensor = getattr(batch, name).clone()
    tensor[row, column] = value
    batches = list(step.ranks[rank])
    batches[index] = replace(batch, **{name: tensor})
    step.ranks[rank] = tuple(batches)
    step.grad_norm = math.nan
    step.layer_norms = {}
    return step


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("strategy", ["attribution", "bisect"])
def test_a_coefficient_that_is_not_finite_is_named(trainer, value, strategy):
    step = with_value(trainer.faulty(trainer.model(), None), "coefficient_BR", value)
    finding = localize(step.policy(), step.placed, step.facts(), strategy=strategy)
    assert finding.verdict == "non-finite"
    assert [(c.rank, c.micro_batch, c.sequence, c.token) for c in finding.culprits] == [(1, 0, 2, 9)]
    assert finding.certificate.holds
    assert finding.certificate.norm_without < 2 * step.healthy_norm
    assert finding.fidelity.reproduced


def test_nan_outside_the_mask_is_a_mask_fault(trainer):
    """A NaN old logp at a masked position: the loss stays finite, the gradient does not."""
    step = with_value(trainer.faulty(trainer.model(), None, seed=5), "coefficient_BR", math.nan, row=1, column=11)
    assert not bool(step.placed[2].batch.mask_BR[1, 11])
    finding = localize(step.policy(), step.placed, step.facts())
    assert finding.verdict == "mask"
    assert finding.causes[0].name == "mask-fault"
    assert (finding.culprits[0].sequence, finding.culprits[0].token) == (1, 17)
    assert finding.certificate.holds


def test_an_overflowing_ratio_is_a_token_mismatch(trainer):
    step = with_value(trainer.faulty(trainer.model(), None), "coefficient_BR", -math.inf)
    step = with_value(step, "rollout_logp_BR", -math.inf)
    finding = localize(step.policy(), step.placed, step.facts())
    assert finding.causes[0].name == "token-mismatch"
    assert finding.culprits[0].ratio == math.inf


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_logp_that_is_not_finite_is_named(trainer, value):
    step = with_value(trainer.faulty(trainer.model(), None), "logp_BR", value)
    finding = localize(step.policy(), step.placed, step.facts())
    assert finding.verdict == "non-finite"
    assert finding.culprits[0].token == 9
    assert finding.causes[0].name == "non-finite-logp"


def test_a_logp_that_is_not_finite_but_unused_blames_nobody(trainer):
    step = trainer.faulty(trainer.model(), trainer.stale(9.0), seed=5)
    norm, layers = step.grad_norm, step.layer_norms
    step = with_value(step, "logp_BR", math.nan, row=1, column=11)
    step.grad_norm, step.layer_norms = norm, layers
    finding = localize(step.policy(), step.placed, step.facts())
    assert finding.verdict == "token"
    assert finding.culprits[0].token == 9


class Rooted(nn.Module):
    """A causal model of sums whose square root has an infinite slope at a sum of exactly zero."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(8, 4)
        self.mixer = nn.Linear(4, 4, bias=False)
        self.root = Root()
        self.head = nn.Linear(4, 8, bias=False)
        with torch.no_grad():
            self.embed.weight[7] = 0.0

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.root(self.mixer(self.embed(input_ids))))


class Root(nn.Module):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.square().sum(dim=-1, keepdim=True).sqrt() * torch.ones(4)


def rooted_step():
    """Rank 1's row 1 holds token 7 at position 2: its root is zero there, and the gradient NaN."""
    generator = torch.Generator().manual_seed(1)
    ranks = []
    for rank in range(2):
        ids = torch.randint(0, 7, (3, 5), generator=generator)
        if rank == 1:
            ids[1, 2] = 7
        ones = torch.ones(3, 4)
        ranks.append([MicroBatch(ids, ones.bool(), -ones, ones / 24)])
    return place([(batches, 1.0) for batches in ranks])


@pytest.mark.parametrize("strategy", ["attribution", "bisect"])
def test_a_gradient_that_breaks_inside_the_network_is_bisected_to_its_token_and_module(trainer, strategy):
    model = Rooted()
    batches = rooted_step()
    policy = Policy(model, Meter(30))
    assert not replay(policy, batches, coefficients_of(batches)).gradient.is_finite
    facts = trainer.step(trainer.model()).facts(grad_norm=math.nan, layer_norms={}, limit=None, healthy_norm=None)
    finding = localize(policy, batches, facts, strategy=strategy)
    assert finding.verdict == "non-finite"
    assert finding.strategy == "bisect"
    # Token 3 is predicted at position 2, where the root is; behind it zero times infinity is NaN as well.
    assert [(c.rank, c.micro_batch, c.sequence, c.token) for c in finding.culprits] == [(1, 0, 1, 3), (1, 0, 1, 4)]
    cause = finding.causes[0]
    assert cause.name == "non-finite-network"
    assert (cause.evidence["module"], cause.evidence["position"]) == ("mixer", 2.0)
    assert finding.certificate.holds


def test_weights_that_are_not_finite_are_nobodys_token(trainer):
    step = trainer.faulty(trainer.model(), None)
    step.grad_norm = math.nan
    step.layer_norms = {}
    with torch.no_grad():
        step.model.get_input_embeddings().weight.fill_(math.nan)
    finding = localize(step.policy(), step.placed, step.facts())
    assert finding.verdict == "non-finite"
    assert not (finding.certificate and finding.certificate.holds)


def test_a_finite_report_of_a_replay_that_is_not_is_inconclusive(trainer):
    step = trainer.faulty(trainer.model(), None)
    norm = step.grad_norm
    step = with_value(step, "coefficient_BR", math.nan)
    step.grad_norm = norm
    finding = localize(step.policy(), step.placed, step.facts())
    assert finding.verdict == "inconclusive"
    assert not finding.fidelity.reproduced
