"""Gradient checkpointing, packed sequences, adapters, as trainers use them: replayed exactly, shares the oracle's.

Tied embeddings: test_attribution.py; mixtures of experts: test_routing.py.
"""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from gradloc.attribution import attribute
from gradloc.localization import localize
from gradloc.policy import Meter, Policy, place
from gradloc.replay import coefficients_of, replay
from gradloc.snapshot import MicroBatch


def attributed(step):
    policy, coefficients = step.policy(), coefficients_of(step.placed)
    replayed = replay(policy, step.placed, coefficients)
    return replayed.gradient, attribute(policy, step.placed, coefficients, replayed.gradient, replayed.logp)


def furthest(shares, expected):
    return max(float((one - other).abs().max()) for one, other in zip(shares, expected, strict=True))


def recomputing(model, reentrant):
    """transformers 5 has it under another name. None: not any more."""
    name = "activation_checkpointing" if hasattr(model, "activation_checkpointing_enable") else "gradient_checkpointing"
    if reentrant is None:
        getattr(model, f"{name}_disable")()
    else:
        getattr(model, f"{name}_enable")({"use_reentrant": reentrant})


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_trainer_that_recomputes_its_activations(trainer, reentrant):
    model = trainer.model()
    recomputing(model, reentrant)
    if reentrant:
        model.enable_input_require_grads()
    assert model.training and any(getattr(part, "gradient_checkpointing", False) for part in model.modules())
    step = trainer.faulty(model, trainer.stale(6.0))
    plain = trainer.faulty(trainer.model(), trainer.stale(6.0))
    assert step.grad_norm == pytest.approx(plain.grad_norm, rel=1e-6)
    recomputing(step.model, None)  # the oracle keeps graphs
    shares, _ = trainer.oracle(step)
    recomputing(step.model, reentrant)
    gradient, found = attributed(step)
    assert gradient.norm == pytest.approx(step.grad_norm, rel=1e-6)
    assert furthest(found.shares, shares) <= 1e-3
    finding = localize(step.policy(), step.placed, step.facts())
    assert finding.fidelity.reproduced and finding.certificate.holds
    assert [(one.rank, one.sequence, one.token) for one in finding.culprits] == [(1, 2, 9)]


class Adapted(nn.Module):
    """A frozen linear layer and a trained low-rank addition."""

    def __init__(self, base, generator, rank=4):
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(rank, base.in_features, generator=generator) * 0.1)
        self.up = nn.Parameter(torch.randn(base.out_features, rank, generator=generator) * 0.1)

    def forward(self, entered):
        return self.base(entered) + entered @ self.down.T @ self.up.T


def test_adapters_on_a_frozen_model(trainer):
    model, generator = trainer.model(), torch.Generator().manual_seed(5)
    model.requires_grad_(False)
    for block in model.model.layers:
        for name in ("q_proj", "v_proj"):
            setattr(block.self_attn, name, Adapted(getattr(block.self_attn, name), generator))
    step = trainer.faulty(model, trainer.stale(6.0))
    shares, _ = trainer.oracle(step)
    gradient, found = attributed(step)
    assert len(gradient.tensors) == 12 and all(".self_attn." in name for name in gradient.tensors)
    assert gradient.norm == pytest.approx(step.grad_norm, rel=1e-6)
    assert furthest(found.shares, shares) <= 1e-3
    finding = localize(step.policy(), step.placed, step.facts())
    assert finding.fidelity.reproduced and finding.certificate.holds
    assert [(one.rank, one.sequence, one.token) for one in finding.culprits] == [(1, 2, 9)]


def packed(step):
    """The step with all sequences of a micro-batch in one row: positions begin again with each, padding is gone."""
    ranks = []
    for batches in step.ranks:
        rows = []
        for batch in batches:
            keep = [batch.attention_mask_BT[row] for row in range(len(batch.ids_BT))]
            joined = {}
            for name in ("mask_BR", "logp_BR", "coefficient_BR", "rollout_logp_BR", "advantage_BR"):
                values = getattr(batch, name)
                missing = batch.ids_BT.shape[1] - values.shape[1]
                whole = torch.nn.functional.pad(values, (missing, 0))  # nothing is learnt from a prompt
                joined[name] = torch.cat([whole[row][keep[row]] for row in range(len(whole))])[None, 1:]
            rows.append(
                MicroBatch(
                    ids_BT=torch.cat([batch.ids_BT[row][keep[row]] for row in range(len(keep))])[None],
                    position_ids_BT=torch.cat([torch.arange(int(one.sum())) for one in keep])[None],
                    **joined,
                )
            )
        ranks.append(tuple(rows))
    return replace(step, ranks=ranks)


def test_sequences_packed_into_one_row(trainer):
    """What the padded rows say, token by token: their gradients do not know of each other."""
    padded = trainer.faulty(trainer.model(), trainer.stale(6.0), padding="right")
    shares, _ = trainer.oracle(padded)
    step = packed(padded)
    assert [placed.batch.ids_BT.shape[0] for placed in step.placed] == [1, 1, 1, 1]
    gradient, found = attributed(step)
    assert gradient.norm == pytest.approx(padded.grad_norm, rel=1e-5)
    as_padded = [shares_BR[batch.batch.mask_BR.bool()] for shares_BR, batch in zip(shares, padded.placed, strict=True)]
    as_packed = [
        shares_BR[batch.batch.mask_BR.bool()] for shares_BR, batch in zip(found.shares, step.placed, strict=True)
    ]
    assert furthest(as_packed, as_padded) <= 1e-3
    finding = localize(step.policy(), step.placed, step.facts())
    assert finding.fidelity.reproduced and finding.certificate.holds and finding.certificate.num_culprits == 1
    (culprit,) = finding.culprits
    before = int(padded.ranks[1][0].attention_mask_BT[:2].sum())
    assert (culprit.rank, culprit.micro_batch, culprit.sequence, culprit.token) == (1, 0, 0, before + 9)


def test_packing_that_is_not_told_is_no_replay(trainer):
    """Without the positions one sequence would see the other: the replay says so instead of blaming anybody."""
    step = packed(trainer.faulty(trainer.model(), trainer.stale(6.0), padding="right"))
    step.ranks = [tuple(replace(batch, position_ids_BT=None) for batch in batches) for batches in step.ranks]
    finding = localize(copy.deepcopy(step).policy(), place([(b, step.grad_factor) for b in step.ranks]), step.facts())
    assert not finding.fidelity.reproduced


def narrow_gradient(model, step):
    """As a trainer would make it in bf16 that runs each micro-batch as one row of what its rows show."""
    sums = [torch.zeros(p.shape) for p in model.parameters()]
    for placed in step.placed:
        batch, shown_BT = placed.batch, placed.batch.attention_mask_BT.bool()
        positions_1N = (shown_BT.cumsum(dim=1) - 1)[shown_BT][None]
        logits_1NV = model(batch.ids_BT[shown_BT][None], position_ids=positions_1N, use_cache=False).logits
        logp_NV = torch.log_softmax(logits_1NV[0].float(), dim=-1)
        logp_N = logp_NV.gather(-1, batch.ids_BT.roll(-1, dims=1)[shown_BT][:, None])[:, 0]
        c_BT = torch.nn.functional.pad(placed.coefficient_BR().float(), (batch.first_position - 1, 1))
        gradients = torch.autograd.grad((logp_N * c_BT[shown_BT]).sum(), list(model.parameters()))
        for total, part in zip(sums, gradients, strict=True):
            total += part.float()
    return sums


def test_rows_that_ran_as_one_in_bf16_are_replayed_as_one(trainer):
    step = trainer.faulty(trainer.model(), trainer.stale(6.0), padding="right")
    step = replace(step, ranks=[tuple(replace(batch, packed=True) for batch in batches) for batches in step.ranks])
    model = copy.deepcopy(step.model).to(torch.bfloat16).eval()
    truth = narrow_gradient(model, step)
    norm = float(sum(part.double().square().sum() for part in truth)) ** 0.5
    policy = Policy(copy.deepcopy(model), Meter(1000))
    replayed = replay(policy, step.placed, coefficients_of(step.placed))
    assert replayed.gradient.norm == pytest.approx(norm, rel=1e-6)
    ranks = [tuple(replace(batch, packed=False) for batch in batches) for batches in step.ranks]
    by_row = place([(batches, step.grad_factor) for batches in ranks])
    other = replay(Policy(copy.deepcopy(model), Meter(1000)), by_row, coefficients_of(by_row))
    assert other.gradient.norm != pytest.approx(norm, rel=1e-6), "bf16 rounds otherwise row by row"
    for one, another, batch in zip(replayed.logp, other.logp, step.placed, strict=True):
        used_BR = batch.batch.mask_BR.bool() & ~another.isnan()
        assert torch.allclose(one[used_BR], another[used_BR], atol=0.1), "each token in its own place"
    order = step.facts()
    finding = localize(Policy(copy.deepcopy(model), Meter(1000)), step.placed, replace(order, grad_norm=norm))
    assert finding.fidelity.replayed_norm == pytest.approx(norm, rel=1e-6)
    assert [(one.rank, one.sequence, one.token) for one in finding.culprits] == [(1, 2, 9)]


def test_a_lone_packed_row_is_run_no_further_than_its_last_coefficient_where_that_is_asked(trainer):
    step = trainer.faulty(trainer.model(), trainer.stale(6.0, row=0), num_rows=1, padding="right")
    step = replace(step, ranks=[tuple(replace(batch, packed=True) for batch in batches) for batches in step.ranks])
    policy = Policy(copy.deepcopy(step.model).to(torch.bfloat16).eval(), Meter(1000))
    early = [torch.zeros_like(own) for own in coefficients_of(step.placed)]
    early[0][0, 0] = 1.0
    replay(policy, step.placed, early, by_row=True)
    assert policy.meter.num_tokens_forward == step.placed[0].batch.first_position
