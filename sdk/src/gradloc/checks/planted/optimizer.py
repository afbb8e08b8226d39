"""Planted faults of the optimizer layer."""

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from gradloc.checks.finding import CheckFinding
from gradloc.checks.memory import MemoryWatch
from gradloc.checks.optimizer_state import (
    check_left_out,
    check_lr_history,
    check_optimizer,
    check_skip,
    check_update,
)
from gradloc.checks.planted import Garden
from gradloc.checks.planted.gradient import SmallModel, healthy_model, loss_of

GARDEN = Garden()
Spoil = Callable[[SmallModel, torch.optim.Optimizer], None]


def trained(num_steps: int = 2) -> tuple[SmallModel, torch.optim.AdamW]:
    """A model after some updates."""
    model = healthy_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(num_steps):
        loss_of(model).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def _state(optimizer: torch.optim.Optimizer, model: SmallModel) -> dict[str, Tensor]:
    found: dict[str, Tensor] = optimizer.state[model.lm_head.weight]
    return found


def _plant(code: str, name: str, spoil: Spoil) -> None:
    def run(faulty: bool) -> Iterable[CheckFinding]:
        model, optimizer = trained()
        if faulty:
            spoil(model, optimizer)
        named = list(model.named_parameters())
        return (*check_optimizer(optimizer, named), *check_left_out(optimizer, named))

    GARDEN.plant(code, name)(run)


def _set_state(key: str, change: Callable[[Tensor], Tensor]) -> Spoil:
    def spoil(model: SmallModel, optimizer: torch.optim.Optimizer) -> None:
        state = _state(optimizer, model)
        state[key] = change(state[key])

    return spoil


def _set_entry(value: float) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        changed = tensor.clone()
        changed[0, 0] = value
        return changed

    return change


def _replaced(model: SmallModel, _optimizer: torch.optim.Optimizer) -> None:
    model.lm_head = nn.Linear(16, 40, bias=False)


def _stale(model: SmallModel, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["params"] = [p for p in model.parameters() if p is not model.lm_head.weight]


def _epsilon(model: SmallModel, optimizer: torch.optim.Optimizer) -> None:
    state = _state(optimizer, model)
    state["exp_avg_sq"] = state["exp_avg_sq"].half()


def _adapter(model: SmallModel, _optimizer: torch.optim.Optimizer) -> None:
    model.add_module("adapter", nn.Linear(16, 4))


def _rate(value: float) -> Spoil:
    def spoil(_model: SmallModel, optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[0]["lr"] = value

    return spoil


_plant("optimizer.state-shape", "a head that grew under its state", _set_state("exp_avg", lambda one: one[:20]))
_plant("optimizer.state-format", "moments in bfloat16", _set_state("exp_avg", lambda one: one.bfloat16()))
_plant("optimizer.state-non-finite", "a NaN moment", _set_state("exp_avg", _set_entry(math.nan)))
_plant("optimizer.state-negative", "a negative second moment", _set_state("exp_avg_sq", _set_entry(-1e-3)))
_plant("optimizer.step-mismatch", "one parameter re-added", _set_state("step", lambda one: one * 0))
_plant("optimizer.stale-state", "a parameter taken out of its group", _stale)
_plant("optimizer.foreign-parameter", "a head that was replaced", _replaced)
_plant("optimizer.left-out", "an adapter added later", _adapter)
_plant("optimizer.epsilon", "eps 1e-8 in float16", _epsilon)
_plant("optimizer.lr", "a learning rate of 0", _rate(0.0))
_plant("optimizer.lr", "a NaN learning rate", _rate(math.nan))


@GARDEN.plant("optimizer.lr-jump", "a schedule that starts again on resume")
def _lr_jump(faulty: bool) -> Iterable[CheckFinding]:
    warm_up = [1e-6 * step / 10 for step in range(10)]
    decay = [1e-6 * (1 + math.cos(math.pi * step / 50)) / 2 for step in range(45)]
    return check_lr_history([*warm_up, *decay, *([1e-6] * 3 if faulty else [])])


@GARDEN.plant("optimizer.lr", "a negative learning rate in the history")
def _lr_negative(faulty: bool) -> Iterable[CheckFinding]:
    return check_lr_history([1e-6, 1e-6, -1e-6 if faulty else 1e-6])


@GARDEN.plant("optimizer.update-ratio", "a learning rate of 1")
def _update_ratio(faulty: bool) -> Iterable[CheckFinding]:
    model = healthy_model()
    before = {name: p.detach().clone() for name, p in model.named_parameters() if "layernorm" not in name}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0 if faulty else 1e-4)
    loss_of(model).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return check_update(before, {name: p.detach() for name, p in model.named_parameters()})


@GARDEN.plant("optimizer.update-lost", "updates of 1e-6 to bfloat16 weights")
def _update_lost(faulty: bool) -> Iterable[CheckFinding]:
    dtype = torch.bfloat16 if faulty else torch.float32
    before = torch.linspace(0.5, 1.5, 64).to(dtype)
    step = torch.full((64,), 1e-6)
    return check_update({"weight": before}, {"weight": (before + step).to(dtype)}, expected={"weight": step})


@GARDEN.plant("optimizer.zero-gradients", "zeroed gradients to skip an update")
def _zero_gradients(faulty: bool) -> Iterable[CheckFinding]:
    model, optimizer = trained()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if faulty else None
    return check_skip(optimizer)


class _Loop:
    """A training loop that keeps its losses, detached or not."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []
        self.kept: list[Tensor] = []


@GARDEN.plant("optimizer.graph-held", "losses kept with their graphs")
def _graph_held(faulty: bool) -> Iterable[CheckFinding]:
    model, loop, watch = healthy_model(), _Loop(), MemoryWatch()
    found: tuple[CheckFinding, ...] = ()
    for _ in range(5):
        loss = loss_of(model)
        loop.losses.append(loss if faulty else loss.detach())
        del loss
        found = watch.after_step() or found
    return found


@GARDEN.plant("optimizer.memory-growth", "a batch kept every step")
def _memory(faulty: bool) -> Iterable[CheckFinding]:
    loop, watch = _Loop(), MemoryWatch()
    found: tuple[CheckFinding, ...] = ()
    for _ in range(5):
        loop.kept.append(torch.zeros(1 << 20))
        if not faulty:
            loop.kept = loop.kept[-1:]
        found = watch.after_step() or found
    return found
