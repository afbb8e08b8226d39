"""Planted faults of the gradient layer."""

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from gradloc.checks.anomaly import find_bad_operation
from gradloc.checks.finding import CheckFinding
from gradloc.checks.gradients import check_coefficients, check_gradients, check_layers, check_norms
from gradloc.checks.planted import Garden

GARDEN = Garden()


class SmallModel(nn.Module):
    """Embedding, two blocks named as transformers name theirs, head. Logits [B, T, V]."""

    def __init__(self, num_ids: int = 32, width: int = 16) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(num_ids, width)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"mlp": nn.Linear(width, width), "input_layernorm": nn.LayerNorm(width)}) for _ in range(2)
        )
        self.lm_head = nn.Linear(width, num_ids, bias=False)

    def forward(self, ids_BT: Tensor) -> Tensor:
        hidden: Tensor = self.embed_tokens(ids_BT)
        hidden = hidden + torch.cumsum(hidden, dim=1) * 0.1
        for layer in self.layers:
            block: nn.ModuleDict = layer  # type: ignore[assignment]
            hidden = hidden + torch.tanh(block["mlp"](block["input_layernorm"](hidden)))
        logits: Tensor = self.lm_head(hidden)
        return logits


def healthy_model(seed: int = 0) -> SmallModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return SmallModel()


def loss_of(model: nn.Module) -> Tensor:
    """A supervised loss of two rows: float32 []."""
    ids_BT = torch.arange(16).view(2, 8)
    log_probs: Tensor = torch.log_softmax(model(ids_BT)[:, :-1], dim=-1)
    return -log_probs.gather(-1, ids_BT[:, 1:, None]).mean()


def _gradients(spoil: Callable[[SmallModel], None] | None) -> Iterable[CheckFinding]:
    model = healthy_model()
    loss_of(model).backward()  # type: ignore[no-untyped-call]
    if spoil is not None:
        spoil(model)
    return check_gradients(model.named_parameters()).findings


def _head(model: SmallModel) -> Tensor:
    assert model.lm_head.weight.grad is not None
    return model.lm_head.weight.grad


def _nan(model: SmallModel) -> None:
    _head(model)[3, 3] = math.nan


def _infinite(model: SmallModel) -> None:
    _head(model)[3, 3] = math.inf


def _detached(model: SmallModel) -> None:
    model.lm_head.weight.grad = None


def _zero(model: SmallModel) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)


def _dead(model: SmallModel) -> None:
    _head(model).mul_(1e-9)


for _code, _name, _spoil in (
    ("gradient.non-finite", "one NaN entry", _nan),
    ("gradient.non-finite", "one infinite entry", _infinite),
    ("gradient.missing", "a detached head", _detached),
    ("gradient.vanished", "all advantages zero", _zero),
    ("gradient.dead-layer", "a head that hears nothing", _dead),
):
    GARDEN.plant(_code, _name)(lambda faulty, spoil=_spoil: _gradients(spoil if faulty else None))  # type: ignore[misc]


@GARDEN.plant("gradient.layer-growth", "the head grows sixfold, the rest stays")
def _growth(faulty: bool) -> Iterable[CheckFinding]:
    healthy = {"head": 0.1, "layers.0.mlp": 0.11, "layers.1.mlp": 0.12, "layers.1.attention": 0.11}
    return check_layers({**healthy, "head": 0.6 if faulty else 0.13}, healthy)


@GARDEN.plant("gradient.layer-growth", "everything below block 2 explodes")
def _type_b(faulty: bool) -> Iterable[CheckFinding]:
    healthy = {f"layers.{index}.mlp": 0.1 for index in range(6)}
    factor = 900.0 if faulty else 1.2
    return check_layers({name: 0.1 * (factor if int(name[7]) < 2 else 1.1) for name in healthy}, healthy)


def healthy_norms() -> list[float]:
    generator = torch.Generator().manual_seed(5)
    return (0.4 * torch.exp(0.2 * torch.randn(80, generator=generator))).tolist()


@GARDEN.plant("gradient.spike", "a norm of 640 among 0.4")
def _spike(faulty: bool) -> Iterable[CheckFinding]:
    return check_norms([*healthy_norms(), 640.0 if faulty else 0.5, 0.4])


@GARDEN.plant("gradient.non-finite", "a NaN norm in the history")
def _nan_norm(faulty: bool) -> Iterable[CheckFinding]:
    return check_norms([*healthy_norms(), math.nan if faulty else 0.5])


@GARDEN.plant("gradient.token-imbalance", "one coefficient a thousand times its peers")
def _imbalance(faulty: bool) -> Iterable[CheckFinding]:
    generator = torch.Generator().manual_seed(6)
    coefficient_BR = torch.randn(4, 16, generator=generator) / 64
    if faulty:
        coefficient_BR[2, 5] = 16.0
    return check_coefficients(coefficient_BR)


@GARDEN.plant("gradient.non-finite", "a NaN coefficient")
def _nan_coefficient(faulty: bool) -> Iterable[CheckFinding]:
    coefficient_BR = torch.full((2, 20), 0.01)
    if faulty:
        coefficient_BR[1, 3] = math.nan
    return check_coefficients(coefficient_BR)


@GARDEN.plant("gradient.bad-operation", "sqrt at 0 in backward")
def _sqrt(faulty: bool) -> Iterable[CheckFinding]:
    model = healthy_model()
    return find_bad_operation(model, lambda: (loss_of(model) * (0.0 if faulty else 1.0)).sqrt())


@GARDEN.plant("gradient.bad-operation", "log of 0 in the loss")
def _log(faulty: bool) -> Iterable[CheckFinding]:
    model = healthy_model()
    return find_bad_operation(model, lambda: (loss_of(model) * (0.0 if faulty else 1.0)).log())


@GARDEN.plant("gradient.bad-operation", "an overflowing module")
def _module(faulty: bool) -> Iterable[CheckFinding]:
    model = healthy_model()
    if faulty:
        with torch.no_grad():
            model.lm_head.weight[0, 0] = math.inf
    return find_bad_operation(model, lambda: loss_of(model))
