"""How a trainer makes log-probabilities of hidden states, where it rounds in other places than a plain forward pass.

It matters in bf16 and fp16 only, and there for a thousandth of the norm. Knows no snapshot and no trainer's code.
Shapes: B rows, R positions, V vocabulary, H width.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

# plain: the model's own. wide: gradients at the head are accumulated in float32 and never rounded on the way, as TRL's
# fused head does. scaled: logits are divided by the temperature in their own format, as verl does.
Head = Literal["plain", "wide", "scaled"]
NARROW = (torch.bfloat16, torch.float16)


def logp_and_entropy(
    logits_BRV: Tensor, targets_BR: Tensor, temperature: float, head: Head, *, narrow: bool, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of the targets and, if wished for, the entropy, float32 or wider [B, R].

    narrow: made in the logits' own format, as the trainer made them, so that gradients round alike. Differences of
    such values say nothing.
    """
    logits_BRV = _scaled(logits_BRV, temperature, head)
    entropy_BR = None
    if narrow and entropy:
        # First, and of these very terms: autograd adds their gradients in the order of making, and rounds each sum.
        p_BRV = torch.softmax(logits_BRV, dim=-1)
        entropy_BR = _wide_of(torch.logsumexp(logits_BRV, dim=-1) - torch.sum(p_BRV * logits_BRV, dim=-1))
    logp_BRV = torch.log_softmax(logits_BRV if narrow else _wide_of(logits_BRV), dim=-1)
    if entropy and not narrow:
        entropy_BR = -(logp_BRV.exp() * logp_BRV).sum(dim=-1)
    return _wide_of(logp_BRV.gather(-1, targets_BR.unsqueeze(-1)).squeeze(-1)), entropy_BR


def _wide_of(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _scaled(logits_BRV: Tensor, temperature: float, head: Head) -> Tensor:
    """Logits over the temperature."""
    if head == "scaled" and temperature != 1.0:
        # One divisor a row: a number alone would be divided by without rounding it first.
        return logits_BRV / logits_BRV.new_full((logits_BRV.shape[0], 1, 1), max(temperature, 1e-8))
    return _wide_of(logits_BRV) / temperature


@contextlib.contextmanager
def as_trained(model: nn.Module, head: Head, dtype: torch.dtype) -> Iterator[None]:
    """The model's head as the trainer ran it, for forward passes that compute in `dtype`."""
    module = getattr(model, "get_output_embeddings", lambda: None)()
    if head != "wide" or dtype not in NARROW or not isinstance(module, nn.Linear):
        yield
        return
    module.forward = lambda hidden: _wide(hidden, module.weight, module.bias, dtype)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del module.forward


def _wide(hidden: Tensor, weight_VH: Tensor, bias_V: Tensor | None, dtype: torch.dtype) -> Tensor:
    with torch.autocast(hidden.device.type, enabled=False):
        logits: Tensor = _WideHead.apply(hidden, weight_VH, dtype)  # type: ignore[no-untyped-call]
        return logits if bias_V is None else logits + bias_V.to(dtype)


class _WideHead(torch.autograd.Function):
    """hidden @ weight.T in `dtype`; the products of the backward pass stay in float32."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight_VH: Tensor, dtype: torch.dtype) -> Tensor:
        narrow, narrow_VH = hidden.to(dtype), weight_VH.to(dtype)
        ctx.save_for_backward(narrow, narrow_VH)
        ctx.dtypes = hidden.dtype, weight_VH.dtype
        return narrow @ narrow_VH.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        narrow, narrow_VH = (one.float() for one in ctx.saved_tensors)
        grad = grads[0].float()
        hidden_dtype, weight_dtype = ctx.dtypes
        grad_VH = grad.flatten(0, -2).t() @ narrow.flatten(0, -2)
        return (grad @ narrow_VH).to(hidden_dtype), grad_VH.to(weight_dtype), None
