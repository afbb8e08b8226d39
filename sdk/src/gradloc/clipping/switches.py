"""The remedies as objects: what a trainer switches on, with what each did and how often.

    gradloc.watch(model, optimizer, run=..., remedies=[TokenClip(), SeqClip(), LayerClip()])

TokenClip and SeqClip act on the coefficients dL/dlogp as the backward pass hands them to the network:
the loss is not touched, nor is its number of tokens. LayerClip acts on gradients, before the trainer's
own clipping. None talks to other ranks: LayerClip decides from the layer norms that all ranks agreed on.
Shapes: B rows, R response positions, L layers.
"""

import contextlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from gradloc.clipping import layer, reward, sequence, token
from gradloc.clipping.stream import RESIDUAL_FLOOR, ResidualStream, is_below
from gradloc.layers import block_of, layer_key


class Tally:
    """How many were looked at and how many acted on; on the device until somebody asks."""

    def __init__(self) -> None:
        self.num_seen = 0
        self.num_acted = 0
        self._seen: list[Tensor] = []
        self._acted: list[Tensor] = []

    def add(self, seen: Tensor, acted: Tensor) -> None:
        self._seen.append(seen.detach())
        self._acted.append(acted.detach())

    def take(self) -> float | None:
        """Fraction acted on since the last call, None where nothing was looked at."""
        if not self._seen:
            return None
        # One transfer for the step's micro-batches, so that a GPU is waited for once.
        seen, acted = torch.stack([torch.stack(self._seen).sum(), torch.stack(self._acted).sum()]).tolist()
        self._seen, self._acted = [], []
        self.num_seen += int(seen)
        self.num_acted += int(acted)
        return acted / seen if seen else None


class _Counted:
    """num_seen and num_acted: over the whole run so far (of this process, not of its state)."""

    def __init__(self) -> None:
        self.tally = Tally()

    @property
    def num_seen(self) -> int:
        return self.tally.num_seen

    @property
    def num_acted(self) -> int:
        return self.tally.num_acted


class TokenClip(_Counted):
    """Bounds on each token's importance ratio exp(logp - rollout_logp); see `token.token_clip`.

    mode "mask" (default) leaves tokens outside [low, high] out; "clip" only lowers the weight of those above.
    """

    def __init__(self, low: float = token.LOW, high: float = token.HIGH, mode: token.Mode = "mask") -> None:
        super().__init__()
        token.token_clip(torch.zeros(0), low, high, mode)  # raises for what cannot be meant
        self.low, self.high, self.mode = low, high, mode

    def factor(self, log_ratio_BR: Tensor, mask_BR: Tensor) -> Tensor:
        """Factor of each coefficient: [B, R]; 1 outside the mask, where there is no token of the loss."""
        factor_BR = token.token_clip(log_ratio_BR, self.low, self.high, self.mode)
        factor_BR = torch.where(mask_BR, factor_BR, 1.0)
        self.tally.add(mask_BR.sum(), (factor_BR < 1).sum())
        return factor_BR


class SeqClip(_Counted):
    """Bounds on each answer's importance ratio; answers outside are left out. See `sequence.seq_clip`."""

    def __init__(
        self,
        low: float = sequence.LOW,
        high: float = sequence.HIGH,
        mean: sequence.Mean | Literal["both"] = "both",
    ) -> None:
        super().__init__()
        sequence.seq_clip(torch.zeros(0, 1), torch.ones(0, 1), low, high, mean)  # raises for what cannot be meant
        self.low, self.high, self.mean = low, high, mean

    def factor(self, log_ratio_BR: Tensor, mask_BR: Tensor) -> Tensor:
        """Factor of each coefficient: [B, 1]."""
        factor_B = sequence.seq_clip(log_ratio_BR, mask_BR, self.low, self.high, self.mean)
        self.tally.add(mask_BR.any(dim=1).sum(), (factor_B < 1).sum())
        return factor_B.unsqueeze(1)


class RewardGuard(_Counted):
    """Clamps or rejects rewards before advantages are made of them; see `reward.guard_rewards`.

        rewards, keep = guard(rewards)
        advantages = group_advantages(rewards, keep, group_size)

    The trainer calls it; handed to `watch` as well, what it did is published with the step.
    """

    def __init__(self, low: float, high: float, mode: reward.Mode = "clamp") -> None:
        super().__init__()
        reward.guard_rewards(torch.zeros(0), low, high, mode)  # raises for what cannot be meant
        self.low, self.high, self.mode = low, high, mode

    def __call__(self, rewards_B: Tensor) -> tuple[Tensor, Tensor]:
        guarded_B, keep_B = reward.guard_rewards(rewards_B, self.low, self.high, self.mode)
        untouched_B = keep_B & (guarded_B == rewards_B)
        self.tally.add(torch.tensor(rewards_B.numel()), (~untouched_B).sum().cpu())
        return guarded_B, keep_B


@dataclass(frozen=True)
class LayerAction:
    """What LayerClip did to one layer at one step. `limit` is None where the norm was not finite.

    num_positions: how many positions were held back on their way into the layer, so that it and all below got nothing
    from them; `norm` and `limit` are then those of what enters. 0: the layer's own gradient was scaled.
    """

    name: str
    norm: float
    limit: float | None
    scale: float
    num_positions: int = 0


class LayerClip(_Counted):
    """Holds each layer to limits from its own history, in two places.

    Between blocks, while the backward pass runs (`stream.py`): a position whose gradient alone is above what all
    positions together may send into a block sends nothing into it and those below, and one where the residual stream
    was left under `residual_floor` of the median position's sends nothing into any. So one token cannot explode the
    layers, and all other tokens' gradients stay as they are; `positions=False` leaves this out. After the backward
    pass: a layer whose gradient exceeds its limit all the same is scaled down (`layer.py`).

    by "block": a transformer block, the embedding, the head are a layer each; by "kind": attention, MLP and
    norms of a block count apart. `last` is what it did at the last step, `changed` the layers that got another gradient
    than without it. A layer whose norm is not finite gets no gradient at all (None): a zero would still move an
    optimizer with momentum. Keep `state_dict` in the checkpoint, on every rank or on one: it is the same on all.
    """

    def __init__(
        self,
        factor_of_max: float = 3.0,
        factor_of_median: float = 6.0,
        power: float = 2.0,
        *,
        ceiling_of_median: float = 10.0,
        suspect_of_median: float = 2.0,
        by: Literal["block", "kind"] = "block",
        positions: bool = True,
        residual_floor: float = RESIDUAL_FLOOR,
        window: int = 32,
        num_warmup: int = 8,
        regime_steps: int = 12,
    ) -> None:
        super().__init__()
        if by not in ("block", "kind"):
            raise ValueError(f"LayerClip: by is {by!r}; expected 'block' or 'kind'")
        self.settings = layer.LayerLimits(
            factor_of_max,
            factor_of_median,
            ceiling_of_median,
            suspect_of_median,
            power,
            window,
            num_warmup,
            regime_steps,
        )
        if not 0.0 <= residual_floor < 1.0:
            raise ValueError(
                f"LayerClip: residual_floor is {residual_floor}; expected a fraction of the median position's residual "
                "stream from 0 (no position counts as cancelled) to below 1"
            )
        self.by = by
        self.residual_floor = residual_floor
        self.positions = positions
        self.last: tuple[LayerAction, ...] = ()
        self.changed: tuple[str, ...] = ()
        self._parameters: dict[str, list[torch.nn.Parameter]] = {}
        self._history: layer.LayerHistory | None = None
        self._entering: layer.LayerHistory | None = None
        self.stream: ResidualStream | None = None
        self._loaded: Mapping[str, Any] | None = None

    def attach(
        self, named_parameters: Iterable[tuple[str, torch.nn.Parameter]], stream: ResidualStream | None = None
    ) -> None:
        """Learn which parameters make a layer, and where it is entered. Raises ValueError when it watches a model
        already."""
        if self._history is not None:
            raise ValueError("LayerClip: this one watches a model already; expected one LayerClip a model")
        for name, parameter in named_parameters:
            if parameter.requires_grad:
                self._parameters.setdefault(self._layer_of(layer_key(name)), []).append(parameter)
        self._history = layer.empty_history(tuple(self._parameters), self.settings)
        self.stream = stream if self.positions else None
        self._entering = layer.empty_history(() if self.stream is None else self.stream.names, self.settings)
        if self._loaded is not None:
            self.load_state_dict(self._loaded)

    def limits(self) -> dict[str, float]:
        """Limit of each layer for the next step; layers still learning are missing."""
        return _known(layer.limits_from(self._attached(), self.settings), self._attached().names)

    def entering_limits(self) -> dict[str, float]:
        """Limit of a position's gradient on its way into each layer; layers still learning are missing."""
        self._attached()
        assert self._entering is not None
        return _known(layer.limits_from(self._entering, self.settings), self._entering.names)

    def clip(
        self,
        layer_norms: Mapping[str, float],
        entering_norms: Mapping[str, float] | None = None,
        num_held: Mapping[str, int] | None = None,
    ) -> float:
        """Scale the gradients in place, then learn. Fraction of layers that got another gradient than without.

        `layer_norms`: norm over all ranks of each layer key, as measured before any clipping. On a sharded
        model every rank scales its own shard by the same number. entering_norms, num_held: of what enters each layer
        from above, over all ranks, and how many positions of it were held back at this step.
        """
        history = self._attached()
        norms_L = self._norms(history, layer_norms)
        limits_L = layer.limits_from(history, self.settings)
        medians_L = layer.medians_from(history)
        scale_L = layer.layer_clip(norms_L, limits_L, medians_L, self.settings.power)
        held = self._held(entering_norms or {}, num_held or {})
        learned_L = norms_L
        if held or bool((scale_L < 1.0).any()):
            is_over_L, strict_L = scale_L < 1.0, layer.strict_limits_from(history, self.settings)
            limits_L = np.where(is_over_L, limits_L, strict_L)
            scale_L = layer.layer_clip(norms_L, limits_L, medians_L, self.settings.power)
            learned_L = np.where((scale_L < 1.0) & ~is_over_L, math.nan, norms_L)
        scaled = tuple(
            LayerAction(name, norm, limit if math.isfinite(norm) else None, scale)
            for name, norm, limit, scale in zip(
                history.names, norms_L.tolist(), limits_L.tolist(), scale_L.tolist(), strict=True
            )
            if scale < 1.0
        )
        for action in scaled:
            _scale(self._parameters[action.name], action.scale)
        self.last = (*held, *scaled)
        self.changed = tuple(
            name
            for name, scale in zip(history.names, scale_L.tolist(), strict=True)
            if scale < 1.0 or any(is_below(name, one.name) for one in held)
        )
        self._history = layer.learn(history, learned_L, self.settings)
        self._learn_entering(entering_norms or {})
        self.tally.num_seen += len(history.names)
        self.tally.num_acted += len(self.changed)
        return len(self.changed) / max(len(history.names), 1)

    def state_dict(self) -> dict[str, Any]:
        """The histories, as plain numbers."""
        state = layer.dump_history(self._attached())
        assert self._entering is not None
        return state | {"entering": layer.dump_history(self._entering)} if self._entering.names else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a history; before or after `watch`. Raises ValueError for one of another model. What enters the
        layers is learned anew where the state is of before that was watched, or of positions=False."""
        if self._history is None:
            self._loaded = dict(state)
            return
        assert self._entering is not None
        history, entering = layer.load_history(state, self._history.names, self.settings), self._entering
        if entering.names and isinstance(state.get("entering"), Mapping):
            entering = layer.load_history(state["entering"], entering.names, self.settings)
        self._history, self._entering = history, entering
        self._set_stream_limits()

    def _held(self, entering_norms: Mapping[str, float], num_held: Mapping[str, int]) -> tuple[LayerAction, ...]:
        limits = self.entering_limits()
        return tuple(
            LayerAction(name, entering_norms.get(name, math.nan), limits.get(name), 0.0, number)
            for name, number in num_held.items()
            if number > 0
        )

    def _learn_entering(self, entering_norms: Mapping[str, float]) -> None:
        assert self._entering is not None
        if not self._entering.names:
            return
        norms_K = np.array([entering_norms.get(name, 0.0) for name in self._entering.names], dtype=np.float64)
        self._entering = layer.learn(self._entering, norms_K, self.settings)
        self._set_stream_limits()

    def _set_stream_limits(self) -> None:
        assert self._entering is not None
        if self.stream is not None:
            self.stream.set_limits(layer.limits_from(self._entering, self.settings).tolist())

    def suspended(self) -> contextlib.AbstractContextManager[None]:
        """Backward passes inside are none of a step's: no position is held back or learned from."""
        return contextlib.nullcontext() if self.stream is None else self.stream.suspended()

    def _norms(self, history: layer.LayerHistory, layer_norms: Mapping[str, float]) -> layer.Array:
        squares = dict.fromkeys(history.names, 0.0)
        for key, norm in layer_norms.items():
            squares[self._layer_of(key)] += norm * norm
        return np.sqrt(np.array([squares[name] for name in history.names], dtype=np.float64))

    def _layer_of(self, key: str) -> str:
        return block_of(key) if self.by == "block" else key

    def _attached(self) -> layer.LayerHistory:
        if self._history is None:
            raise ValueError("LayerClip: it watches no model yet; give it to gradloc.watch(remedies=[...])")
        return self._history


def _known(limits_L: layer.Array, names: tuple[str, ...]) -> dict[str, float]:
    return {name: limit for name, limit in zip(names, limits_L.tolist(), strict=True) if limit > 0}


def _scale(parameters: list[torch.nn.Parameter], scale: float) -> None:
    if scale == 0.0:
        for parameter in parameters:
            parameter.grad = None
        return
    for parameter in parameters:
        if parameter.grad is not None:
            # A DTensor's shard is scaled where it lies: a scalar needs no communication.
            grad = parameter.grad
            (grad.to_local() if isinstance(grad, DTensor) else grad).mul_(scale)
