"""Checks of an optimizer: its state against its parameters, learning rates, size of updates, skipped steps.

Part of the optimizer layer. Corrections to the guide: AdamW's moments are not resized with a parameter (the
next step fails, or broadcasts); `zero_grad(set_to_none=True)` makes no new state; and zeroed gradients
still move AdamW by its momentum.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradloc.checks.finding import CheckFinding, Tally, finding
from gradloc.norms import local_of

UPDATE_RATIO_MAX = 0.1
UPDATE_WEIGHTS_MIN = 16  # entries: a scalar's ratio says nothing
LOST_SHARE = 0.9  # of the entries that should move
LR_JUMP = 3.0
WARM_UP_STEPS = 2  # a warm-up from 0 multiplies at first
_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg")
_SQUARES = ("exp_avg_sq", "max_exp_avg_sq", "square_avg")
_HALF = (torch.float16, torch.bfloat16)


def check_optimizer(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, Tensor]] | None = None
) -> tuple[CheckFinding, ...]:
    """Check state and settings as they are, best after a step. named_parameters: of the model that is trained."""
    tally = Tally()
    names = {id(p): name for name, p in named_parameters} if named_parameters is not None else {}
    grouped: dict[int, Tensor] = {}
    for index, group in enumerate(optimizer.param_groups):
        for one in check_lr(group.get("lr", 0.0), group=index):
            tally.add(one)
        for parameter in group["params"]:
            grouped[id(parameter)] = parameter
            name = names.get(id(parameter), f"group {index}, {tuple(parameter.shape)}")
            for one in _state(name, parameter, optimizer.state.get(parameter, {}), group):
                tally.add(one)
    stale = [p for p in optimizer.state if isinstance(p, Tensor) and id(p) not in grouped]
    if stale:
        what = f"{len(stale)} states of tensors in no group, the first of shape {tuple(stale[0].shape)}"
        tally.add(finding("optimizer.stale-state", what, num=len(stale)))
    for one in _steps(optimizer):
        tally.add(one)
    if named_parameters is not None:
        for one in _membership(names, grouped, optimizer):
            tally.add(one)
    return tally.findings()


def _state(name: str, parameter: Tensor, state: Mapping[str, Any], group: Mapping[str, Any]) -> list[CheckFinding]:
    found = []
    for key in _MOMENTS:
        moment = state.get(key)
        if not isinstance(moment, Tensor):
            continue
        where: dict[str, int | str] = {"parameter": name, "state": key}
        if moment.shape != parameter.shape:
            what = f"{key} is {tuple(moment.shape)}, the parameter {tuple(parameter.shape)}"
            found.append(finding("optimizer.state-shape", what, where))
        moment = local_of(moment)
        if not bool(torch.isfinite(moment).all()):
            num = int((~torch.isfinite(moment)).sum())
            found.append(finding("optimizer.state-non-finite", f"{key} is not finite", where, num=num))
        if moment.dtype in _HALF:
            found.append(finding("optimizer.state-format", f"{key} is {str(moment.dtype)[6:]}", where))
        if key in _SQUARES and bool((moment < 0).any()):
            value = float(moment.min())
            found.append(finding("optimizer.state-negative", f"{key} has {value:.3g}", where, value=value))
        epsilon = group.get("eps")
        if key in _SQUARES and epsilon and torch.tensor(epsilon, dtype=moment.dtype).item() == 0.0:
            what = f"eps {epsilon:g} is 0 in {str(moment.dtype)[6:]}"
            found.append(finding("optimizer.epsilon", what, where, eps=epsilon))
    return found


def _steps(optimizer: torch.optim.Optimizer) -> list[CheckFinding]:
    counts: dict[int, int] = {}
    for state in optimizer.state.values():
        if isinstance(state, dict) and "step" in state:
            step = int(state["step"])
            counts[step] = counts.get(step, 0) + 1
    if len(counts) < 2:
        return []
    text = ", ".join(f"{num} at {step}" for step, num in sorted(counts.items())[:4])
    return [finding("optimizer.step-mismatch", f"updates differ: {text}", least=min(counts), most=max(counts))]


def _membership(
    names: Mapping[int, str], grouped: Mapping[int, Tensor], optimizer: torch.optim.Optimizer
) -> list[CheckFinding]:
    found = []
    foreign = [p for key, p in grouped.items() if key not in names]
    if foreign:
        what = f"{len(foreign)} parameters, the first of shape {tuple(foreign[0].shape)}"
        found.append(finding("optimizer.foreign-parameter", what, num=len(foreign)))
    return found


def check_left_out(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, Tensor]]
) -> tuple[CheckFinding, ...]:
    """Trainable parameters that no group holds, such as an adapter added after the optimizer was made."""
    grouped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    left = [name for name, p in named_parameters if p.requires_grad and id(p) not in grouped]
    if not left:
        return ()
    what = f"{len(left)} trainable parameters are never updated"
    return (finding("optimizer.left-out", what, {"parameter": left[0]}, num=len(left)),)


def check_lr(lr: float | Tensor, *, group: int = 0) -> tuple[CheckFinding, ...]:
    """Check one learning rate."""
    value = float(lr)
    if math.isfinite(value) and value > 0:
        return ()
    return (finding("optimizer.lr", f"learning rate is {value:g}", {"group": group}, lr=value),)


def check_lr_history(rates: Sequence[float]) -> tuple[CheckFinding, ...]:
    """Check a run's learning rates: no number, negative, all zero, or a jump that no schedule makes."""
    tally = Tally()
    for step, rate in enumerate(rates):
        if not math.isfinite(rate) or rate < 0:
            tally.add(finding("optimizer.lr", f"learning rate is {rate:g}", {"step": step}, lr=rate))
    if len(rates) >= 2 and not any(rates):
        tally.add(finding("optimizer.lr", f"learning rate is 0 at all {len(rates)} steps", {"step": 0}, lr=0.0))
    for step in range(WARM_UP_STEPS, len(rates)):
        before, now = rates[step - 1], rates[step]
        if before > 0 and now > LR_JUMP * before and before < max(rates[:step]):
            # Growth from the largest so far is a warm-up; growth out of a decay is a restart.
            what = f"from {before:.3g} to {now:.3g} at step {step}"
            tally.add(finding("optimizer.lr-jump", what, {"step": step}, before=before, now=now))
        elif step > WARM_UP_STEPS and before > 0 and now > 2 * LR_JUMP * before:
            what = f"from {before:.3g} to {now:.3g} at step {step}"
            tally.add(finding("optimizer.lr-jump", what, {"step": step}, before=before, now=now))
    return tally.findings()


def check_update(
    before: Mapping[str, Tensor], after: Mapping[str, Tensor], *, expected: Mapping[str, Tensor] | None = None
) -> tuple[CheckFinding, ...]:
    """Check what an update did to weights, by name. expected: the update in float32, to see what rounding lost."""
    tally = Tally()
    for name, old in before.items():
        new = after.get(name)
        if new is None or old.shape != new.shape or old.numel() < UPDATE_WEIGHTS_MIN:
            continue
        change = new.double() - old.double()
        size, weight = float(change.norm()), float(old.double().norm())
        if weight > 0 and not size <= UPDATE_RATIO_MAX * weight:
            what = f"{name} moved by {size / weight:.1%} of its norm"
            tally.add(finding("optimizer.update-ratio", what, {"parameter": name}, ratio=size / weight))
        wanted = None if expected is None else expected.get(name)
        if wanted is not None:
            should = wanted != 0
            lost = float(((change == 0) & should).sum()) / max(1, int(should.sum()))
            if lost > LOST_SHARE:
                what = f"{lost:.0%} of {name}'s entries do not move: smaller than {str(old.dtype)[6:]} can show"
                tally.add(finding("optimizer.update-lost", what, {"parameter": name}, share=lost))
    return tally.findings()


def check_skip(optimizer: torch.optim.Optimizer) -> tuple[CheckFinding, ...]:
    """Check, where an update is about to be skipped, that it will be: gradients must be None.

    Zeros are a gradient: AdamW goes on by its momentum and its weight decay.
    """
    held = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if not held or any(bool(p.grad.any()) for p in held if p.grad is not None):
        return ()
    moving = sum(bool(optimizer.state.get(p, {}).get("exp_avg", torch.zeros(1)).any()) for p in held)
    if not moving:
        return ()
    what = f"{len(held)} gradients are zero, {moving} momenta are not: step() would still move the weights"
    return (finding("optimizer.zero-gradients", what, num=moving),)
