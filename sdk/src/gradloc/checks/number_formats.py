"""Checks of number formats and of compilation: half-precision logp, fill values, scaling, compiled against eager.

Part of the policy layer. `F.kl_div` under autocast already computes in float32 on an accelerator; the
guide's memory doubling is that cast. What goes wrong is log_softmax in half precision and fill values
beyond a format's range.
"""

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from gradloc.checks.finding import CheckFinding, finding

_HALF = (torch.float16, torch.bfloat16)
COMPILE_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-8}
COMPILE_TOLERANCE_HALF = 5e-2


def check_logp_format(logp: Tensor) -> tuple[CheckFinding, ...]:
    """bf16 has 8 bits: near logp -10 it steps by .06, an error of 6 % in every ratio."""
    if logp.dtype not in _HALF:
        return ()
    return (finding("policy.logp-half", f"logp is {str(logp.dtype).removeprefix('torch.')}"),)


def check_fill_value(value: float, dtype: torch.dtype) -> tuple[CheckFinding, ...]:
    """A fill value for masked logits must be negative and fit its format; 1e9 attends to padding, -1e9 is no
    float16 (largest 65,504). -inf fits, but a row that is masked whole then becomes NaN."""
    bounds = torch.finfo(dtype)
    if value < 0 and (value >= bounds.min or value == -math.inf):
        return ()
    what = f"masked_fill({value:g}) in {str(dtype).removeprefix('torch.')}, whose largest number is {bounds.max:g}"
    return (finding("policy.fill-overflow", what, value=value),)


def check_formats(
    parameters: Iterable[tuple[str, Tensor]], *, autocast: torch.dtype | None = None, scaler: bool = False
) -> tuple[CheckFinding, ...]:
    """Check formats of trainable parameters (named) and of autocast. scaler: gradients are scaled."""
    found = []
    first: dict[torch.dtype, str] = {}
    for name, parameter in parameters:
        if parameter.requires_grad:
            first.setdefault(parameter.dtype, name)
    if len(first) > 1:
        names = ", ".join(f"{str(dtype).removeprefix('torch.')} ({name})" for dtype, name in first.items())
        found.append(finding("policy.mixed-formats", names, {"parameter": list(first.values())[1]}, num=len(first)))
    if (autocast == torch.float16 or torch.float16 in first) and not scaler:
        what = "gradients below 6e-8 become 0 in float16"
        found.append(finding("policy.no-loss-scaling", what, smallest=torch.finfo(torch.float16).smallest_normal))
    return tuple(found)


def check_compiled(
    eager: Callable[[Tensor], Tensor] | nn.Module, compiled: Callable[[Tensor], Tensor] | nn.Module, inputs: Tensor
) -> tuple[CheckFinding, ...]:
    """Run both on the same inputs; they must agree within the format's rounding."""
    with torch.no_grad():
        first, second = eager(inputs), compiled(inputs)
    tolerance = COMPILE_TOLERANCE.get(first.dtype, COMPILE_TOLERANCE_HALF)
    scale = float(torch.nan_to_num(first.double()).abs().max().clamp(min=1e-12))
    difference = (first.double() - second.double()).abs() / scale
    size = float(torch.nan_to_num(difference, nan=math.inf).max()) if difference.numel() else 0.0
    if first.dtype == second.dtype and size <= tolerance:
        return ()
    what = f"relative difference {size:.2g} (tolerance {tolerance:g}); formats {first.dtype}, {second.dtype}"
    return (finding("policy.compile-drift", what, rel_difference=size, tolerance=tolerance),)
