"""Where in the network a token's gradient arises: by layer and by position, from one backward pass.

A linear module's gradient is a sum over positions, sum_t delta_t x_t^T, so <G, delta_t x_t^T> / ||g||^2
splits the exact share over layers and positions. Also the size of the residual stream after each
block: where it nearly cancels, everything below explodes (docs/algorithm.md, "Type B").
Knows no limit and no verdict. Shapes: L layer keys, K blocks, T positions.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from gradloc.layers import KINDS, VISION, block_index, is_block, is_vision, layer_key
from gradloc.policy import Policy
from gradloc.replay import Gradient
from gradloc.shards import whole
from gradloc.snapshot import MicroBatch

_DOTS_AT_ONCE = 1 << 24  # entries of an intermediate product, to bound memory


@dataclass(frozen=True)
class GradientProfile:
    """Share by layer key and position; `residual_rms_KT` is the residual stream's size after each block."""

    layers: tuple[str, ...]
    share_LT: Tensor
    residual_rms_KT: Tensor


def profile_row(policy: Policy, row: MicroBatch, coefficient_R: Tensor, gradient: Gradient) -> GradientProfile:
    """Profile of one row (a MicroBatch with B = 1) under the given coefficients."""
    num_positions = row.ids_BT.shape[1]
    shares: dict[str, Tensor] = {}

    def add(key: str, share_T: Tensor) -> None:
        total = shares.setdefault(key, torch.zeros(num_positions, dtype=torch.float64))
        # A head may see only the last positions (logits_to_keep).
        total[num_positions - len(share_T) :] += share_T

    with _recording(policy.model, gradient, add), residual_sizes(policy.model) as sizes:
        logp_BR = policy.log_probs(row)
        own = policy.backward(logp_BR, coefficient_R.unsqueeze(0), num_tokens=num_positions)
    for key, share_T in _of_pictures(policy, row, own, gradient).items():
        add(key, share_T)
    keys = sorted(shares, key=_order)
    empty = torch.zeros(0, num_positions, dtype=torch.float64)
    return GradientProfile(
        layers=tuple(keys),
        share_LT=torch.stack([shares[key] for key in keys]) if keys else empty,
        residual_rms_KT=sizes[-1][:, 0] if sizes else empty,
    )


def _of_pictures(
    policy: Policy, row: MicroBatch, own: Sequence[Tensor | None], gradient: Gradient
) -> dict[str, Tensor]:
    """The share of what makes vectors of pictures, spread evenly over the positions that stand for them: inside, its
    positions are patches."""
    found: dict[str, Tensor] = {}
    if row.inputs is None:
        return found
    stand_T = row.inputs.stand_in(row.ids_BT)[0].double()
    if not stand_T.sum():
        return found
    for name, part in zip(policy.parameters, own, strict=True):
        if part is not None and is_vision(name):
            share = float((gradient.tensors[name].double() * part.double()).sum()) / gradient.norm**2
            key = layer_key(name)
            found[key] = found.get(key, 0.0) + share * stand_T / stand_T.sum()
    return found


@contextlib.contextmanager
def residual_sizes(model: nn.Module) -> Iterator[list[Tensor]]:
    """Collects, for each forward pass inside, the rms of the residual stream after each block, [K, B, T]."""
    blocks = [module for name, module in model.named_modules() if is_block(name) and not is_vision(name)]
    collected: list[Tensor] = []
    if not blocks:
        yield collected
        return
    current: list[Tensor] = []

    def record(module: nn.Module, _inputs: Any, output: Any) -> None:
        hidden = output if isinstance(output, Tensor) else output[0]
        current.append(hidden.detach().double().square().mean(dim=-1).sqrt().cpu())
        if module is blocks[-1]:
            collected.append(torch.stack(current))
            current.clear()

    handles = [block.register_forward_hook(record) for block in blocks]
    try:
        yield collected
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _recording(model: nn.Module, gradient: Gradient, add: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Hooks every module with a weight so that its backward adds its part of the share, by position."""
    square = gradient.norm**2
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    handles = []

    def hook_for(module: nn.Module, key: str, weight: Tensor, bias: Tensor | None) -> Callable[..., None]:
        def on_forward(_module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            if not (isinstance(output, Tensor) and output.requires_grad and inputs):
                return
            entered = inputs[0].detach()
            left = output.detach()
            cast(Any, output).register_hook(
                lambda delta: add(
                    key,
                    _positions(
                        module, whole(weight), None if bias is None else whole(bias), entered, left, delta.detach()
                    )
                    / square,
                )
            )

        return on_forward

    for name, module in model.named_modules():
        parameter = getattr(module, "weight", None)
        if is_vision(name):
            continue
        if isinstance(parameter, nn.Parameter) and names.get(id(parameter)) in gradient.tensors:
            weight = gradient.tensors[names[id(parameter)]]
            own_bias = getattr(module, "bias", None)
            bias = gradient.tensors.get(names.get(id(own_bias), "")) if own_bias is not None else None
            handles.append(module.register_forward_hook(hook_for(module, layer_key(f"{name}.weight"), weight, bias)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _positions(
    module: nn.Module, weight: Tensor, bias: Tensor | None, entered: Tensor, left: Tensor, delta: Tensor
) -> Tensor:
    """<G, contribution of position t> for one module, float64 [T]; the first axis is the row (of one)."""
    if isinstance(module, nn.Embedding):
        dots = (weight[entered[0]].double() * delta[0].double()).sum(dim=-1)
    elif weight.dim() == 2 and entered.dim() >= 3:
        # Hugging Face's Conv1D keeps its weight as [in, out].
        if type(module).__name__ == "Conv1D":
            weight = weight.T
        dots = _bilinear(delta[0], weight, entered[0])
    elif weight.dim() == 1:
        scale = module.get_parameter("weight").detach().double()
        shift = 0.0 if bias is None else module.get_parameter("bias").detach().double()
        normalised = torch.where(scale == 0, 0.0, (left[0].double() - shift) / scale)
        dots = (weight.double() * delta[0].double() * normalised).sum(dim=-1)
    else:
        dots = torch.zeros(delta.shape[1])
    if bias is not None and not isinstance(module, nn.Embedding):
        dots = dots + (bias.double() * delta[0].double()).sum(dim=-1)
    # Heads and other axes between position and feature are summed (q_norm sees [1, T, heads, features]).
    if dots.dim() > 1:
        dots = dots.flatten(1).sum(dim=1)
    return dots.double().cpu()


def _bilinear(delta_TO: Tensor, weight_OI: Tensor, entered_TI: Tensor) -> Tensor:
    """delta_t^T G x_t for every t, [T, ...], in chunks of positions."""
    chunk = max(1, _DOTS_AT_ONCE // max(weight_OI.shape))
    parts = [
        ((delta.to(weight_OI.dtype) @ weight_OI).double() * entered.double()).sum(dim=-1)
        for delta, entered in zip(torch.split(delta_TO, chunk), torch.split(entered_TI, chunk), strict=True)
    ]
    return torch.cat(parts)


def _order(key: str) -> tuple[int, int, str]:
    """Pictures first, the embedding, then blocks in order, then what comes after them."""
    if key.startswith(VISION):
        place, of_kind, own = _order(key.removeprefix(VISION))
        return (place - (1 << 31), of_kind, own)
    index = block_index(key)
    kind = key.rsplit(".", maxsplit=1)[-1]
    if index is not None:
        return (1 + index, KINDS.index(kind), key)
    return (0 if key == "embedding" else 1 << 30, KINDS.index(kind), key)
