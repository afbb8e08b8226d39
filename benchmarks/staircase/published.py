"""Published ways to clip gradients, re-implemented from their papers to compare with. One process, plain tensors.

Each is called once a step after backward and changes `.grad` in place; none is followed by further clipping.
"""

import math
from collections.abc import Callable
from typing import Any

import torch

from gradloc.layers import kind_of, layer_key

Clipper = Callable[[int], None]


def _norm(grads: list[torch.Tensor]) -> float:
    return float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads))))


def _scale(grads: list[torch.Tensor], factor: float) -> None:
    torch._foreach_mul_(grads, factor)


def _grads(model: torch.nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def unclipped(_model: torch.nn.Module, _optimizer: Any) -> Clipper:
    return lambda _step: None


def global_clip(model: torch.nn.Module, _optimizer: Any, norm_max: float = 1.0) -> Clipper:
    def clip(_step: int) -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), norm_max)

    return clip


def zclip(model: torch.nn.Module, _optimizer: Any) -> Clipper:
    """ZClip (Kumar et al. 2025): alpha .97, z 2.5, 25 warm-up steps, adaptive scaling mean + std * z_max² / z."""
    alpha, z_max, num_warmup = 0.97, 2.5, 25
    seen: list[float] = []
    mean, variance = 0.0, 0.0

    def clip(_step: int) -> None:
        nonlocal mean, variance
        grads = _grads(model)
        norm = _norm(grads)
        if len(seen) < num_warmup:
            seen.append(norm)
            mean = sum(seen) / len(seen)
            variance = sum((value - mean) ** 2 for value in seen) / len(seen)
            return
        std = math.sqrt(variance) + 1e-6
        z = (norm - mean) / std
        kept = mean + std * z_max * z_max / z if z > z_max else norm
        if kept < norm:
            _scale(grads, kept / (norm + 1e-6))
        mean = alpha * mean + (1 - alpha) * kept
        variance = alpha * variance + (1 - alpha) * (kept - mean) ** 2

    return clip


def adagc(model: torch.nn.Module, _optimizer: Any) -> Clipper:
    """AdaGC (Wang et al. 2025): each tensor to 1.05 times its EMA (.98); global 1.0 for 20 steps (paper: 100)."""
    relative, beta, num_warmup = 1.05, 0.98, 20
    averages: dict[int, float] = {}

    def clip(step: int) -> None:
        if step < num_warmup:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for index, parameter in enumerate(model.parameters()):
            if parameter.grad is None:
                continue
            norm = float(parameter.grad.norm())
            if step < num_warmup:
                averages[index] = min(averages.get(index, norm), norm)
                continue
            factor = min(1.0, relative * averages[index] / max(norm, 1e-12))
            parameter.grad.mul_(factor)
            averages[index] = beta * averages[index] + (1 - beta) * factor * norm

    return clip


def aggc(model: torch.nn.Module, _optimizer: Any) -> Clipper:
    """AGGC-like (Li, Wu, Chang 2026): groups by kind of module, band [.5, 1.5] times the group's EMA (.95)."""
    beta, low, high = 0.95, 0.5, 1.5
    groups: dict[str, list[torch.nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        groups.setdefault(kind_of(layer_key(name)), []).append(parameter)
    averages: dict[str, float] = {}

    def clip(_step: int) -> None:
        for kind, parameters in groups.items():
            grads = [p.grad for p in parameters if p.grad is not None]
            if not grads:
                continue
            norm = _norm(grads)
            averages[kind] = beta * averages.get(kind, norm) + (1 - beta) * norm
            bound = min(max(norm, low * averages[kind]), high * averages[kind])
            if bound != norm and norm > 0:
                _scale(grads, bound / (norm + 1e-12))

    return clip


def spam(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Clipper:
    """SPAM-like (Huang et al. 2025): entries with g² > 50 v become sign(g) sqrt(50 v); moments reset every 50 steps.

    The paper's threshold is 5000 and its interval 500 steps of runs a hundred times as long.
    """
    threshold, interval = 50.0, 50

    def clip(step: int) -> None:
        for parameter in model.parameters():
            state = optimizer.state.get(parameter, {})
            if parameter.grad is None or "exp_avg_sq" not in state:
                continue
            if step and step % interval == 0:
                state["exp_avg"].zero_()
                state["exp_avg_sq"].zero_()
                state["step"].zero_()
                continue
            if step % interval < 5:
                continue  # moments that are a few steps old say nothing yet
            age = float(state["step"])
            beta2 = optimizer.param_groups[0]["betas"][1]
            bound = (threshold * state["exp_avg_sq"] / (1 - beta2**age)).sqrt()
            parameter.grad.copy_(
                torch.where(parameter.grad.abs() > bound, parameter.grad.sign() * bound, parameter.grad)
            )

    return clip
