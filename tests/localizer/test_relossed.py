"""Two counterfactuals: tokens masked in the gradient, and tokens that leave the loss itself."""

import dataclasses

import pytest
import torch

from gradloc.localization import localize
from gradloc.policy import place
from gradloc.relossed import origins_of, reading_of, relossed
from gradloc.replay import coefficients_of, replay
from gradloc.snapshot import MicroBatch
from gradloc.verification import Place

STALE = Place(2, 2, 3)  # rank 1, micro-batch 0


def sequence_step(trainer, kind, log_ratio=0.0, without=()):
    """The trainer's step under a loss whose ratio is the row's: its product, or (GSPO) its geometric mean; logp and
    rollout logp stay those of a step by tokens. Tokens in `without` are in no sum and no length."""
    step = trainer.step(trainer.model(), fault=trainer.stale(log_ratio) if log_ratio else None)
    logps, losses = [], []
    for number, placed in enumerate(step.placed):
        batch = placed.batch
        logits = step.model(
            input_ids=batch.ids_BT, attention_mask=batch.attention_mask_BT.long(), position_ids=batch.position_ids_BT
        ).logits[:, -13:-1]
        logp_BR = torch.log_softmax(logits, dim=-1).gather(-1, batch.ids_BT[:, -12:, None]).squeeze(-1)
        logp_BR.retain_grad()
        mask_BR = batch.mask_BR.clone()
        for where in without:
            if where.batch == number:
                mask_BR[where.row, where.column] = False
        difference_BR = torch.where(mask_BR, logp_BR - batch.rollout_logp_BR, 0.0)
        total_B = difference_BR.sum(dim=1)
        if kind == "sequence-mean":
            total_B = total_B / mask_BR.sum(dim=1)
        losses.append(-(total_B.exp() * batch.advantage_BR[:, 0]).sum() / 64)
        logps.append(logp_BR)
    step.model.zero_grad(set_to_none=True)
    sum(losses).backward()
    norm = float(torch.stack([p.grad.norm() for p in step.model.parameters()]).norm())
    step.model.zero_grad(set_to_none=True)
    parts: list[list[MicroBatch]] = [[], []]
    for placed, logp_BR in zip(step.placed, logps, strict=True):
        parts[placed.rank].append(dataclasses.replace(placed.batch, coefficient_BR=logp_BR.grad))
    return dataclasses.replace(step, ranks=[tuple(part) for part in parts], grad_factor=1.0, grad_norm=norm)


@pytest.mark.parametrize("kind", ["sequence-product", "sequence-mean"])
def test_the_loss_without_a_token_is_what_autograd_says(trainer, kind):
    step = sequence_step(trainer, kind, log_ratio=3.0)
    coefficients = coefficients_of(step.placed)
    reading = reading_of(step.placed, coefficients)
    assert reading.kind == kind
    changed = relossed(step.placed, coefficients, [STALE], reading)
    expected = coefficients_of(sequence_step(trainer, kind, log_ratio=3.0, without=(STALE,)).placed)
    for one, other in zip(changed, expected, strict=True):
        assert torch.allclose(one, other, rtol=2e-4, atol=1e-9)


def test_a_loss_by_tokens_is_read_as_such_and_its_mean_counts_its_tokens(trainer):
    step = trainer.step(trainer.model(), fault=trainer.stale(6.0))
    coefficients = coefficients_of(step.placed)
    reading = reading_of(step.placed, coefficients)
    assert (reading.kind, reading.counts) == ("token", True)
    num = sum(placed.batch.num_tokens for placed in step.placed)
    changed = relossed(step.placed, coefficients, [STALE], reading)
    assert float(changed[0][0, 0] / coefficients[0][0, 0]) == pytest.approx(num / (num - 1))
    assert float(changed[STALE.batch][STALE.row, STALE.column]) == 0.0
    assert origins_of(step.placed, STALE[:2], reading) == ()


def test_without_ratios_nothing_is_read(trainer):
    step = trainer.step(trainer.model())
    bare = place(
        [
            ([dataclasses.replace(batch, rollout_logp_BR=None, old_logp_BR=None) for batch in rank], 1.0)
            for rank in step.ranks
        ]
    )
    assert reading_of(bare, coefficients_of(bare)) is None


def test_contributors_and_the_token_whose_ratio_it_was_are_told_apart(trainer):
    """Frozen, the token alone changes nothing; out of the loss, it takes the whole spike with it."""
    step = sequence_step(trainer, "sequence-product", log_ratio=7.0)
    healthy = sequence_step(trainer, "sequence-product")
    step = dataclasses.replace(
        step, healthy_norm=healthy.grad_norm, limit=4 * healthy.grad_norm, layer_norms={}, healthy_layer_norms={}
    )
    finding = localize(step.policy(), step.placed, step.facts())
    assert finding.verdict == "sequence"
    assert (finding.culprits[0].rank, finding.culprits[0].micro_batch, finding.culprits[0].sequence) == (1, 0, 2)
    assert [(one.rank, one.micro_batch, one.sequence, one.token) for one in finding.origins] == [(1, 0, 2, 9)]
    assert finding.certificate.norm_without_relossed <= step.limit
    truth = replay(
        step.policy(), step.placed, coefficients_of(sequence_step(trainer, "sequence-product", 7.0, (STALE,)).placed)
    )
    assert finding.certificate.norm_without_relossed == pytest.approx(truth.gradient.norm, rel=1e-3)
    assert finding.causes[0].name == "sequence-mismatch"
    assert "by the ratio of token 9" in finding.summary


@pytest.mark.parametrize("log_ratio", [-5_000.0, 5_000.0])
def test_ratios_beyond_floats_raise_nothing(trainer, log_ratio):
    step = trainer.step(trainer.model())
    placed = [
        dataclasses.replace(
            one, batch=dataclasses.replace(one.batch, rollout_logp_BR=one.batch.logp_BR.double() - log_ratio)
        )
        for one in step.placed
    ]
    reading = reading_of(placed, coefficients_of(placed))
    assert reading is None or not reading.counts or reading.by_row
