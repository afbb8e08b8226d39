"""What one rank does to explain a step in inline mode: its batches, its moved weights, its part of a certificate.

Meets nobody but where a sharded model's own forward pass does. Shapes: B rows, T positions, R positions with a logp.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from gradloc.layers import layer_key
from gradloc.model_inputs import ModelInputs
from gradloc.model_record import sharded_dtype
from gradloc.perturbation import Perturbation
from gradloc.policy import ActivePart, Meter, PlacedBatch, Policy, active_part, cut, place
from gradloc.replay import Gradient, coefficients_of
from gradloc.snapshot import MicroBatch
from gradloc.verification import Place
from gradloc_proto.messages import Limits


@dataclass(frozen=True)
class SpikedStep:
    """What the ranks agreed on: the same on all of them."""

    step: int
    norm: float
    layer_norms: Mapping[str, float]
    limits: Limits
    rules_hit: tuple[str, ...]

    @property
    def limit(self) -> float:
        return self.limits.norm if self.limits.norm is not None else self.norm


def in_focus(spike: SpikedStep) -> tuple[SpikedStep, frozenset[str] | None]:
    """Where the whole norm is harmless and some layers are not: the step of those layers alone, and their keys."""
    if not math.isfinite(spike.norm) or "norm" in spike.rules_hit:
        return spike, None
    keys = frozenset(key for key, norm in spike.layer_norms.items() if norm > spike.limits.layers.get(key, math.inf))
    if not keys:
        return spike, None
    norm = math.sqrt(math.fsum(spike.layer_norms[key] ** 2 for key in keys))
    limit = math.sqrt(math.fsum(spike.limits.layers[key] ** 2 for key in keys))
    return replace(spike, norm=norm, limits=spike.limits.model_copy(update={"norm": limit})), keys


@dataclass(frozen=True)
class Work:
    """All that one explanation needs on this rank, made before the ranks meet."""

    module: nn.Module
    policy: Policy
    placed: tuple[PlacedBatch, ...]
    coefficients: list[Tensor]
    gradient: Gradient  # its norms alone: the tensors lie in `direction`
    direction: dict[str, Tensor]
    passes: list[tuple[int, ActivePart]]
    dummy: MicroBatch
    perturbation: Perturbation
    modes: list[tuple[nn.Module, bool]]
    buffers: list[tuple[Tensor, Tensor]]
    coefficient_max: float

    @classmethod
    def prepared(
        cls,
        module: nn.Module,
        spike: SpikedStep,
        micro_batches: tuple[MicroBatch, ...],
        *,
        rank: int,
        grad_factor: float,
        autocast_dtype: torch.dtype | None,
        keys: frozenset[str] | None,
    ) -> "Work":
        """keys: layers that are explained alone; None: all. The gradient is in `.grad`."""
        _reshard(module)
        placed = tuple(replace(one, rank=rank) for one in place([(_on_host(micro_batches), grad_factor)]))
        coefficients = coefficients_of(placed)
        modes = [(part, part.training) for part in module.modules()]
        num_tokens = sum(one.batch.ids_BT.numel() for one in placed)
        try:
            policy = Policy(module, Meter(num_tokens), autocast_dtype=autocast_dtype, grid=sharded_dtype(module))
        finally:
            _set_modes(modes)
        passes = [
            (index, part)
            for index, (one, own) in enumerate(zip(placed, coefficients, strict=True))
            if (part := active_part(one.batch, own)) is not None
        ]
        moved = {
            name: parameter
            for name, parameter in policy.parameters.items()
            if parameter.grad is not None and (keys is None or layer_key(name) in keys)
        }
        direction = {name: _local(parameter.grad) for name, parameter in moved.items()}
        local = {name: _local(parameter) for name, parameter in moved.items()}
        return cls(
            module=module,
            policy=policy,
            placed=placed,
            coefficients=coefficients,
            gradient=Gradient({}, spike.norm, dict(spike.layer_norms)),
            direction=direction,
            passes=passes,
            dummy=_dummy(placed, passes),
            perturbation=Perturbation(local, direction, spike.norm, policy.grid),
            modes=modes,
            buffers=[(buffer, buffer.detach().clone()) for buffer in module.buffers()],
            coefficient_max=max((float(own.abs().max()) for own in coefficients if own.numel()), default=0.0),
        )

    @contextlib.contextmanager
    def quiet(self, device: torch.device) -> Iterator[None]:
        """Evaluation mode inside; modes, buffers and random state as before outside."""
        with torch.random.fork_rng(devices=_indices(device), device_type=_fork_type(device)):
            self.module.eval()
            try:
                yield
            finally:
                _set_modes(self.modes)
                with torch.no_grad():
                    for buffer, original in self.buffers:
                        buffer.copy_(original)

    def moved_logp(self, eps: float, num_passes: int) -> list[Tensor]:
        """Logps of this rank's tokens at theta + eps v, float64 [B, R] a batch; equally many passes on all ranks."""
        logp = [torch.zeros(own.shape, dtype=torch.float64) for own in self.coefficients]
        with self.perturbation.moved(eps), torch.no_grad():
            try:
                for number in range(num_passes):
                    if number >= len(self.passes):
                        self.policy.log_probs(self.dummy)
                        continue
                    index, part = self.passes[number]
                    moved_BR = self.policy.log_probs(part.batch, to_the_end=part.to_the_end)
                    logp[index][part.rows, : part.num_columns] = moved_BR.double().cpu()
            finally:
                _reshard(self.module)  # what was gathered is of the moved weights
        return logp

    def norm_without(self, places: Sequence[Place], *, whole_rows: bool) -> float:
        """||g - g_S|| from a backward pass of the culprits' rows alone; NaN beyond the budget of one step.

        places: S, or one token of each of its rows. Only in full precision: differences of gradients in 16 bits
        are noise.
        """
        if self.policy.grid not in (torch.float32, torch.float64):
            return math.nan
        chosen = self._coefficients_of(places, whole_rows=whole_rows)
        parts = [(index, part) for index, own in chosen.items() if (part := active_part(self.placed[index].batch, own))]
        meter = self.policy.meter
        if meter.steps * meter.num_tokens_step + sum(part.num_tokens for _, part in parts) > meter.num_tokens_step:
            return math.nan
        sums: dict[str, Tensor] = {}
        with torch.enable_grad():
            for index, part in parts:
                logp_BR = self.policy.log_probs(part.batch, to_the_end=part.to_the_end)
                own_BR = chosen[index][part.rows, : part.num_columns]
                gradients = self.policy.backward(logp_BR, own_BR, num_tokens=part.num_tokens)
                for name, gradient in zip(self.policy.parameters, gradients, strict=True):
                    if gradient is not None:
                        sums[name] = gradient.detach() if name not in sums else sums[name] + gradient.detach()
        square = 0.0
        for name, whole in self.direction.items():
            left = whole.double() if name not in sums else whole.double() - sums[name].double()
            square += float(left.square().sum())
        return math.sqrt(square)

    def _coefficients_of(self, places: Sequence[Place], *, whole_rows: bool) -> dict[int, Tensor]:
        chosen: dict[int, Tensor] = {}
        for where in places:
            own = self.coefficients[where.batch]
            only = chosen.setdefault(where.batch, torch.zeros_like(own))
            columns = slice(None) if whole_rows else where.column
            only[where.row, columns] = own[where.row, columns]
        return chosen


def _reshard(module: nn.Module) -> None:
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def _dummy(placed: Sequence[PlacedBatch], passes: Sequence[tuple[int, ActivePart]]) -> MicroBatch:
    """The smallest thing that can be run forward, for ranks with fewer micro-batches than others."""
    if passes or (placed and placed[0].batch.logp_BR.numel()):
        source = passes[0][1].batch if passes else placed[0].batch
        return cut(source, torch.tensor([0]), source.first_position + 1)
    ids_BT = torch.zeros(1, 2, dtype=torch.int64)
    blank_BR = torch.zeros(1, 1)
    return MicroBatch(ids_BT=ids_BT, mask_BR=blank_BR.bool(), logp_BR=blank_BR, coefficient_BR=blank_BR)


def _on_host(micro_batches: tuple[MicroBatch, ...]) -> tuple[MicroBatch, ...]:
    def moved(one: MicroBatch, value: Any) -> Any:
        if isinstance(value, ModelInputs):
            return value.moved("cpu").attributed(one.ids_BT.cpu())
        return value.detach().cpu() if isinstance(value, Tensor) else value

    return tuple(MicroBatch(**{name: moved(one, value) for name, value in vars(one).items()}) for one in micro_batches)


def _local(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _set_modes(modes: Sequence[tuple[nn.Module, bool]]) -> None:
    for part, training in modes:
        part.training = training


def _indices(device: torch.device) -> list[int]:
    return [device.index or 0] if device.type != "cpu" else []


def _fork_type(device: torch.device) -> str:
    return device.type if device.type != "cpu" else "cuda"
