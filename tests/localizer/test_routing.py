"""A mixture of experts keeps its experts while its weights are moved, and its shares are the oracle's."""

import copy

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from gradloc.attribution import attribute
from gradloc.replay import coefficients_of, replay
from gradloc.routing import Routing
from gradloc.snapshot import MicroBatch


def mixture(trainer, seed):
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        "qwen3_moe", vocab_size=trainer.vocabulary, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=64, initializer_range=0.08,
        num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, tie_word_embeddings=True,
    )  # fmt: skip
    config._experts_implementation = "eager"  # the fused kernel knows no float64, which the oracle needs
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)


@pytest.mark.parametrize("seed", [0, 1])
def test_shares_of_a_mixture_are_the_oracles_without_exact_derivatives(trainer, seed):
    step = trainer.step(mixture(trainer, seed), fault=trainer.stale(6.0))
    shares, _ = trainer.oracle(step)
    policy = step.policy()
    coefficients = coefficients_of(step.placed)
    replayed = replay(policy, step.placed, coefficients)
    found = attribute(policy, step.placed, coefficients, replayed.gradient, replayed.logp)
    assert found.eps > 0
    assert abs(found.checksum - 1) <= 1e-3
    assert max(float((one - other).abs().max()) for one, other in zip(found.shares, shares, strict=True)) <= 1e-3


def batch():
    blank_BR = torch.zeros(3, 4)
    return MicroBatch(
        ids_BT=torch.zeros(3, 5).long(), mask_BR=blank_BR.bool(), logp_BR=blank_BR, coefficient_BR=blank_BR
    )


def test_choices_are_made_again_for_rows_cut_on_the_right_and_values_are_new():
    routing, source = Routing(), batch()
    scores_BTE = torch.rand(3, 5, 6)
    with routing.recorded(source, torch.arange(3), 5):
        _, chosen = torch.topk(scores_BTE.flatten(0, 1), 2, dim=-1)
    moved_BTE = torch.rand(3, 5, 6)[[2, 0], :4]
    with routing.held(source, torch.tensor([2, 0]), 4):
        values, again = moved_BTE.flatten(0, 1).topk(2)
    assert torch.equal(again.view(2, 4, 2), chosen.view(3, 5, 2)[[2, 0], :4])
    assert torch.equal(values, moved_BTE.flatten(0, 1).gather(-1, again))


def test_choices_of_rows_that_ran_as_one_belong_to_their_places():
    routing, source = Routing(), batch()
    shown_BT = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]).bool()
    scores_BTE = torch.rand(3, 5, 6)
    with routing.recorded(source, torch.arange(3), 5, shown_BT):
        torch.topk(scores_BTE[shown_BT], 2, dim=-1)
    chosen_BTK = torch.topk(scores_BTE, 2, dim=-1)[1]
    with routing.held(source, torch.tensor([2, 1]), 4):
        _, again = torch.rand(8, 6).topk(2)
    shown = shown_BT[[2, 1], :4]
    assert torch.equal(again.view(2, 4, 2)[shown], chosen_BTK[[2, 1], :4][shown])


def test_what_was_not_recorded_is_not_held():
    routing, source = Routing(), batch()
    scores = torch.rand(5, 6)
    with routing.recorded(source, torch.tensor([1]), 5):
        torch.topk(scores, 2)
    other = torch.rand(5, 6)
    for of, rows, num in ((source, [0], 5), (source, [1], 6), (copy.copy(source), [1], 5)):
        with routing.held(of, torch.tensor(rows), num):
            assert torch.equal(torch.topk(other, 2).indices, other.topk(2).indices)
