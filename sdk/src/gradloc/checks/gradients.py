"""Checks of gradients: finite, present, their distribution, dead and growing layers, spikes, token imbalance.

Part of the gradient layer. The guide's spike rule (largest entry above 10 times the mean) is refused: on a
healthy model the largest is thousands of times the mean, since most entries are near 0. A step is judged
against its own run by the rules that detector and probe share. Shapes: N entries.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gradloc.checks.finding import CheckFinding, Report, Skipped, finding
from gradloc.layers import layer_key
from gradloc.norms import local_of
from gradloc_proto import rules

SAMPLE_MAX = 1 << 17  # torch.quantile refuses more than 2^24 entries and sorts; this many place p95 within .2 %
GROWTH = 4.0  # against a layer's healthy norm, as in the detector's rules
DEAD = 1e-6  # of the median layer
DEAD_LAYERS_MIN = 3
IMBALANCE = 0.5  # of the coefficients' squares
IMBALANCE_TOKENS_MIN = 32
IMBALANCE_OVER_MEDIAN = 50.0


@dataclass(frozen=True)
class Distribution:
    """Of |gradient entries|: exact but for p95, which a strided sample of at most SAMPLE_MAX entries gives."""

    mean: float
    std: float
    largest: float
    p95: float
    num: int


def distribution(gradients: Iterable[Tensor]) -> Distribution:
    """Mean, standard deviation, maximum and 95th percentile of |entries|; NaN where an entry is."""
    total = square = largest = 0.0
    num = 0
    kept: list[Tensor] = []
    tensors = [gradient.detach().flatten() for gradient in gradients]
    stride = max(1, math.ceil(sum(one.numel() for one in tensors) / SAMPLE_MAX))
    for flat in tensors:
        sizes = flat.abs()
        num += flat.numel()
        if flat.numel():
            total += float(sizes.sum(dtype=torch.float64))
            square += float(torch.linalg.vector_norm(flat, dtype=torch.float64)) ** 2
            # max() of Python would drop a NaN that comes second.
            peak = float(sizes.max())
            largest = math.nan if math.isnan(peak) or math.isnan(largest) else max(largest, peak)
            kept.append(sizes[::stride].float())
    if not num:
        return Distribution(0.0, 0.0, 0.0, 0.0, 0)
    mean = total / num
    spread = math.sqrt(max(0.0, square / num - mean * mean)) if math.isfinite(square) else math.nan
    return Distribution(mean, spread, largest, float(torch.quantile(torch.cat(kept), 0.95)), num)


def check_gradients(
    named_parameters: Iterable[tuple[str, Tensor]], *, healthy_layer_norms: Mapping[str, float] | None = None
) -> Report:
    """Check `.grad` of a model's parameters, after the last backward and before clipping.

    Of sharded parameters only this rank's shards are looked at, without a collective.
    """
    found: list[CheckFinding] = []
    squares: dict[str, float] = {}
    missing: list[str] = []
    bad: list[tuple[str, float]] = []
    gradients: list[Tensor] = []
    for name, parameter in named_parameters:
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            missing.append(name)
            continue
        gradient = local_of(parameter.grad)
        gradients.append(gradient)
        norm = float(torch.linalg.vector_norm(gradient, dtype=torch.float64))
        if not math.isfinite(norm):
            bad.append((name, norm))
        squares[layer_key(name)] = squares.get(layer_key(name), 0.0) + norm**2
    if bad:
        what = f"{len(bad)} of {len(gradients)} gradients are not finite"
        found.append(finding("gradient.non-finite", what, {"parameter": bad[0][0]}, num=len(bad), norm=bad[0][1]))
    if missing and gradients:
        what = f"{len(missing)} trainable parameters have none"
        found.append(finding("gradient.missing", what, {"parameter": missing[0]}, num=len(missing)))
    norms = {key: math.sqrt(square) for key, square in squares.items()}
    if not bad:
        found += check_layers(norms, healthy_layer_norms)
    skipped = () if healthy_layer_norms else (Skipped("growth of layers", "no healthy layer norms were given"),)
    spread = distribution(gradients)
    counts = {"entries": spread.num, "mean": spread.mean, "std": spread.std, "max": spread.largest, "p95": spread.p95}
    return Report(tuple(found), skipped, counts)


def check_layers(norms: Mapping[str, float], healthy: Mapping[str, float] | None = None) -> tuple[CheckFinding, ...]:
    """Check norms by layer. With healthy ones: layers that grew although the whole may look harmless."""
    if not norms:
        return ()
    bad = [name for name, norm in norms.items() if not math.isfinite(norm)]
    if bad:
        what = f"norm of {bad[0]} is {norms[bad[0]]}"
        return (finding("gradient.non-finite", what, {"layer": bad[0]}, num=len(bad)),)
    whole = math.sqrt(sum(norm**2 for norm in norms.values()))
    if whole == 0.0:
        return (finding("gradient.vanished", f"all {len(norms)} layers have norm 0"),)
    found = []
    middle = sorted(norms.values())[len(norms) // 2]
    dead = [name for name, norm in norms.items() if norm < DEAD * middle]
    if dead and len(norms) >= DEAD_LAYERS_MIN:
        what = f"{', '.join(dead[:4])}: norm {norms[dead[0]]:.2g}, the median layer has {middle:.2g}"
        found.append(finding("gradient.dead-layer", what, {"layer": dead[0]}, num=len(dead), norm=norms[dead[0]]))
    grown = _grown(norms, healthy or {})
    if grown:
        before = math.sqrt(sum(norm**2 for name, norm in (healthy or {}).items() if name in norms))
        worst = max(grown, key=lambda name: grown[name])
        what = f"{worst} grew {grown[worst]:.3g} times; the whole norm went from {before:.3g} to {whole:.3g}" + (
            f"; also {', '.join(sorted(grown.keys() - {worst})[:4])}" if len(grown) > 1 else ""
        )
        numbers = {"growth": grown[worst], "norm": norms[worst], "whole": whole, "whole_healthy": before}
        found.append(finding("gradient.layer-growth", what, {"layer": worst}, None, **numbers))
    return tuple(found)


def _grown(norms: Mapping[str, float], healthy: Mapping[str, float]) -> dict[str, float]:
    """Growth of the layers that grew, unless all did: then it is the whole step, not a layer."""
    growth = {
        name: norms[name] / healthy[name] if healthy[name] > 0 else math.inf
        for name in norms
        if name in healthy and math.isfinite(healthy[name]) and (norms[name] > 0 or healthy[name] > 0)
    }
    grown = {name: value for name, value in growth.items() if value >= GROWTH}
    calm = [value for value in growth.values() if value < GROWTH]
    if not grown or not calm:
        return {}
    return grown if max(grown.values()) >= GROWTH * max(0.5, sorted(calm)[len(calm) // 2]) else {}


def check_norms(history: Sequence[float]) -> tuple[CheckFinding, ...]:
    """Check a run's gradient norms, step by step, by the rules of detector and probe; names the first bad step
    of each kind."""
    state = rules.RunState()
    found: dict[str, CheckFinding] = {}
    for step, norm in enumerate(history):
        observation = rules.Observation(
            step=step, norm=norm, energy=None, layer_names=(), layer_norms_L=np.zeros(0, dtype=np.float64)
        )
        flags = rules.judge(state, observation)
        state = rules.learn(state, observation, flags)
        if not flags:
            continue
        code = "gradient.spike" if math.isfinite(norm) else "gradient.non-finite"
        if norm < (flags[0].baseline or 0.0):
            code = "gradient.vanished"
        if code not in found:
            what = f"norm {norm:.4g} at step {step} ({flags[0].rule}; usual {flags[0].baseline or math.nan:.3g})"
            found[code] = finding(code, what, {"step": step}, norm=norm, score=flags[0].score)
    return tuple(found.values())


def check_coefficients(coefficient: Tensor, mask: Tensor | None = None) -> tuple[CheckFinding, ...]:
    """Check c_i = dL/dlogp_i of a step, any shape: not finite, or one token with most of the squares."""
    bad = ~torch.isfinite(coefficient)
    if bool(bad.any()):
        where = _place(bad)
        inside = mask is None or bool(mask.bool()[bad].any())
        what = "coefficient not finite" if inside else "coefficient not finite behind the mask"
        return (finding("gradient.non-finite", what, where, num=int(bad.sum())),)
    sizes = coefficient.double().abs()
    used = sizes[sizes > 0]
    if len(used) < IMBALANCE_TOKENS_MIN:
        return ()
    largest, middle = float(used.max()), float(used.median())
    # Divided first: squares of 1e200 would be infinite.
    share = 1.0 / float((used / largest).square().sum())
    if share < IMBALANCE or largest < IMBALANCE_OVER_MEDIAN * middle:
        return ()
    what = f"one token has {share:.0%} of the coefficients' squares, {largest / middle:.3g} times the median"
    return (finding("gradient.token-imbalance", what, _place(sizes == largest), share=share, over=largest / middle),)


def _place(at: Tensor) -> dict[str, int | str]:
    names = {1: ("token",), 2: ("row", "token"), 3: ("batch", "row", "token")}.get(at.dim(), ())
    return dict(zip(names, at.nonzero()[0].tolist(), strict=False))
