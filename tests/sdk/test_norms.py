"""Layer norms: right under overflow, absent gradients, sparse gradients and tied weights."""

import math

import pytest
import torch
from torch import nn

from gradloc.layers import block_index, block_of, kind_of, layer_key
from gradloc.norms import LayerNorms


def norms_of(module: nn.Module, world_size: int = 1) -> dict[str, float]:
    norms = LayerNorms(module.named_parameters(), world_size)
    return dict(zip(norms.names, norms.local_squares().sqrt().tolist(), strict=True))


def with_grad(shape: tuple[int, ...], value: float) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(shape))
    parameter.grad = torch.full(shape, value)
    return parameter


def test_a_thousand_entries_of_1e18_do_not_overflow() -> None:
    module = nn.ParameterDict({"head": with_grad((1000,), 1e18)})
    assert norms_of(module)["head"] == pytest.approx(1e18 * math.sqrt(1000), rel=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_stays_in_its_layer(bad: float) -> None:
    module = nn.ParameterDict({"head": with_grad((4,), bad), "embed": with_grad((4,), 2.0)})
    norms = norms_of(module)
    assert not math.isfinite(norms["head"])
    assert norms["embedding"] == 4.0


def test_parameters_without_gradient_or_frozen_count_nothing() -> None:
    module = nn.ParameterDict({"head": nn.Parameter(torch.ones(3)), "norm": with_grad((4,), 1.0)})
    module["embed"] = nn.Parameter(torch.ones(3), requires_grad=False)
    assert norms_of(module) == {"head": 0.0, "norm": 2.0}


def test_sparse_gradients_are_measured_where_rows_repeat() -> None:
    embedding = nn.Embedding(5, 2, sparse=True)
    (embedding(torch.tensor([1, 1, 3])).sum()).backward()
    expected = math.sqrt(2 * (2.0**2) + 2 * 1.0)
    assert norms_of(nn.ModuleDict({"embed": embedding}))["embedding"] == pytest.approx(expected)


def test_replicas_add_up_to_one_gradient() -> None:
    module = nn.ParameterDict({"head": with_grad((4,), 3.0)})
    norms = LayerNorms(module.named_parameters(), world_size=4)
    assert (4 * norms.local_squares()).sqrt().tolist() == [6.0]


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("model.embed_tokens.weight", "embedding"),
        ("model.layers.0.self_attn.q_norm.weight", "layers.0.attention"),
        ("model.layers.11.post_attention_layernorm.weight", "layers.11.norm"),
        ("model.layers.1.mlp.experts.3.up_proj.weight", "layers.1.mlp"),
        ("module.model.layers.2.input_layernorm.weight", "layers.2.norm"),
        ("transformer.h.3.attn.c_attn.weight", "layers.3.attention"),
        ("transformer.h.3.ln_1.weight", "layers.3.norm"),
        ("transformer.wte.weight", "embedding"),
        ("transformer.ln_f.weight", "norm"),
        ("gpt_neox.layers.4.attention.query_key_value.weight", "layers.4.attention"),
        ("lm_head.weight", "head"),
        ("model.norm.weight", "norm"),
        ("something", "other"),
    ],
)
def test_parameters_are_named_by_layer_and_kind(name: str, key: str) -> None:
    assert layer_key(name) == key


def test_keys_come_apart_again() -> None:
    assert (kind_of("layers.3.mlp"), block_of("layers.3.mlp"), block_index("layers.3.mlp")) == ("mlp", "layers.3", 3)
    assert (kind_of("head"), block_of("head"), block_index("head")) == ("head", "head", None)
