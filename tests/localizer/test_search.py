"""The search: what it costs, where it may look, and cases that once led it astray."""

import dataclasses
import math

import pytest
import torch

from gradloc.culprits import Scene
from gradloc.localization import localize
from gradloc.policy import Meter, Policy
from gradloc.replay import coefficients_of, masked, replay
from gradloc.search import by_attribution
from gradloc.verification import Place

ONE = Place(3, 2, 3)  # rank 1, micro-batch 0, with three micro-batches a rank


def scene_of(step, policy=None):
    policy = step.policy() if policy is None else policy
    coefficients = coefficients_of(step.placed)
    replayed = replay(policy, step.placed, coefficients)
    return Scene(policy, step.placed, coefficients, replayed.gradient, replayed.logp)


def given_g(scene):
    stages = scene.policy.meter.stages
    return stages["attribution"] + stages.get("verification", 0.0)


@pytest.fixture(scope="module")
def stale(trainer):
    return trainer.faulty(trainer.model(), trainer.stale(9.0), num_micro_batches=3)


def test_a_known_micro_batch_makes_the_search_cheaper_and_its_answer_the_same(stale):
    whole, scoped = scene_of(stale), scene_of(stale)
    found = by_attribution(whole, stale.limit, stale.healthy_norm)
    found_scoped = by_attribution(scoped, stale.limit, stale.healthy_norm, scope=ONE.batch)
    assert found.found.places == found_scoped.found.places == (ONE,)
    assert found_scoped.found.holds
    assert given_g(whole) <= 0.5
    assert given_g(scoped) < given_g(whole)
    assert given_g(scoped) <= 0.25


def test_a_micro_batch_that_is_not_the_one_is_noticed(stale):
    found = by_attribution(scene_of(stale), stale.limit, stale.healthy_norm, scope=0)
    assert found.found.places == (ONE,)


def test_tokens_that_cancel_leave_together_in_one_round(trainer):
    step = trainer.faulty(trainer.model(), trainer.pair(3000.0))
    scene = scene_of(step)
    found = by_attribution(scene, step.limit, step.healthy_norm)
    assert set(found.found.places) == {Place(2, 2, 3), Place(0, 0, 3)}
    assert scene.policy.meter.stages["certificate"] <= 1.0


def test_in_16_bits_the_largest_spikes_are_found_although_shares_are_rough(trainer):
    step = trainer.faulty(trainer.model(), trainer.extra(3e4), num_micro_batches=3)
    assert step.grad_norm > 500 * step.healthy_norm
    policy = Policy(step.model, Meter(1), autocast_dtype=torch.bfloat16)
    found = by_attribution(scene_of(step, policy), step.limit, step.healthy_norm)
    assert found.kind == "token"
    assert found.found.places == (ONE,)
    assert found.found.holds


def test_three_tokens_of_a_short_row_are_tokens(trainer):
    def short(inputs):
        inputs[1][0]["mask"][2] = torch.arange(12) < 5

    large = [trainer.extra(size, column=column) for column, size in ((0, 100.0), (2, -90.0), (4, 80.0))]
    step = trainer.faulty(trainer.model(), trainer.together(short, *large))
    found = by_attribution(scene_of(step), 1.5 * step.healthy_norm, step.healthy_norm)
    assert found.kind == "token"
    assert {place.column for place in found.found.places} == {0, 2, 4}


def test_masking_the_set_gives_the_step_that_never_had_it(trainer, stale):
    """The certificate against a batch from which the token was taken, not only its coefficient."""
    found = by_attribution(scene_of(stale), stale.limit, stale.healthy_norm).found
    placed = list(stale.placed)
    batch = placed[ONE.batch].batch
    coefficient_BR = batch.coefficient_BR.clone()
    coefficient_BR[ONE.row, ONE.column] = 0.0
    placed[ONE.batch] = dataclasses.replace(
        placed[ONE.batch], batch=dataclasses.replace(batch, coefficient_BR=coefficient_BR)
    )
    never = replay(stale.policy(), placed, coefficients_of(placed)).gradient
    assert found.without.norm == never.norm
    again = replay(stale.policy(), stale.placed, masked(coefficients_of(stale.placed), found.places)).gradient
    assert all(torch.equal(again.tensors[name], never.tensors[name]) for name in never.tensors)


def with_entropy(step, size):
    """The step with an entropy term in its loss, by plain autograd; one token's is large."""
    placed = []
    for number, one in enumerate(step.placed):
        batch = one.batch
        d_BR = torch.where(batch.mask_BR, 0.01 / one.grad_factor / 100, 0.0)
        if number == ONE.batch:
            d_BR[ONE.row, ONE.column] = size
        logits = step.model(
            input_ids=batch.ids_BT, attention_mask=batch.attention_mask_BT.long(), position_ids=batch.position_ids_BT
        ).logits[:, -batch.logp_BR.shape[1] - 1 : -1]
        logp_BRV = torch.log_softmax(logits, dim=-1)
        logp_BR = logp_BRV.gather(-1, batch.ids_BT[:, -batch.logp_BR.shape[1] :, None])[..., 0]
        entropy_BR = -(logp_BRV.exp() * logp_BRV).sum(dim=-1)
        ((batch.coefficient_BR * logp_BR + d_BR * entropy_BR).sum() * one.grad_factor).backward()
        batch = dataclasses.replace(batch, entropy_BR=entropy_BR.detach(), entropy_coefficient_BR=d_BR)
        placed.append(dataclasses.replace(one, batch=batch))
    squares = [float(p.grad.double().square().sum()) for p in step.model.parameters() if p.grad is not None]
    step.model.zero_grad(set_to_none=True)
    return placed, math.sqrt(sum(squares))


def test_an_entropy_term_is_part_of_its_token(trainer, stale):
    step = trainer.faulty(trainer.model(), None, num_micro_batches=3)
    placed, norm = with_entropy(step, 200.0)
    assert norm > 4 * step.healthy_norm
    facts = step.facts(grad_norm=norm, layer_norms={})
    finding = localize(Policy(step.model, Meter(1)), placed, facts)
    assert finding.fidelity.rel_error <= 1e-5
    assert abs(finding.checksum - 1) <= 5e-3
    assert finding.verdict == "token"
    (culprit,) = finding.culprits
    assert (culprit.rank, culprit.micro_batch, culprit.sequence, culprit.token) == (1, 0, 2, 9)
    assert finding.certificate.norm_without == pytest.approx(step.healthy_norm, rel=0.3)
