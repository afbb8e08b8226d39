"""The remedies of one probe: in which order they act, what they refuse, what they report.

Knows the probe's moments (before a backward, before the ranks agree, after) but not the probe.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from gradloc.clipping.stream import ResidualStream
from gradloc.clipping.switches import LayerClip, RewardGuard, SeqClip, TokenClip

Remedy = TokenClip | SeqClip | LayerClip | RewardGuard
# Names under which fractions are published: fields of StepObserved.
FRACTION_NAMES: dict[type[Remedy], str] = {
    TokenClip: "tokens_remedied",
    SeqClip: "sequences_remedied",
    RewardGuard: "rewards_remedied",
    LayerClip: "layers_remedied",
}
# Wrappers that hide which parameter belongs to which layer, or keep gradients to themselves.
_NOT_FOR_LAYER_CLIP = {
    "FullyShardedDataParallel": "FSDP1's flat parameters mix layers; use FSDP2 (fully_shard)",
    "DeepSpeedEngine": "DeepSpeed keeps gradients in partitions of its own; use DDP or FSDP2",
    "MegatronDDP": "Megatron's distributed optimizer keeps gradients in buffers of its own; use DDP or FSDP2",
}


class AppliedRemedies:
    """Refuses, with ValueError and by name, remedies that cannot work here or are given twice."""

    def __init__(
        self,
        remedies: Sequence[Remedy],
        model: torch.nn.Module,
        module: torch.nn.Module,
        factor: Callable[[], float],
        on_error: Callable[[Exception], None],
        *,
        is_loss_scaled: bool = False,
    ) -> None:
        """factor, on_error: as ResidualStream takes them. Acts from `start` to `close`."""
        for remedy in remedies:
            if type(remedy) not in FRACTION_NAMES:
                raise ValueError(
                    f"remedies: {type(remedy).__name__} is none; expected TokenClip, SeqClip, LayerClip or RewardGuard"
                )
        kinds = [type(remedy).__name__ for remedy in remedies]
        for kind in kinds:
            if kinds.count(kind) > 1:
                raise ValueError(f"remedies: {kind} is given twice; expected each kind once")
        self._on_coefficients = [one for one in remedies if isinstance(one, TokenClip | SeqClip)]
        self._layer_clip = next((one for one in remedies if isinstance(one, LayerClip)), None)
        self._counted = [one for one in remedies if not isinstance(one, LayerClip)]
        self._stream: ResidualStream | None = None
        if self._layer_clip is not None:
            _refuse_wrapper(model)
            if self._layer_clip.positions:
                floor = self._layer_clip.residual_floor
                self._stream = ResidualStream(module, factor, on_error, floor, passes_overflow=is_loss_scaled)
            self._layer_clip.attach(module.named_parameters(), self._stream)

    def start(self) -> None:
        """Hook the model."""
        if self._stream is not None:
            self._stream.start()

    def close(self) -> None:
        """Nothing is held back any more: nobody would learn limits or tell."""
        if self._stream is not None:
            self._stream.remove()

    def before_backward(self, logp_BR: Tensor, mask: Tensor, rollout_logp: Tensor | None) -> None:
        """Hook the coefficients of one micro-batch. Raises ValueError without rollout_logp, where it is needed."""
        if not self._on_coefficients or not logp_BR.requires_grad:
            return
        if rollout_logp is None:
            names = " and ".join(type(one).__name__ for one in self._on_coefficients)
            raise ValueError(f"{names} need rollout_logp=, which probe.tokens() did not get; nothing was clipped")
        mask_BR = mask.detach().bool()[:, -logp_BR.shape[1] :]
        if rollout_logp.shape != logp_BR.shape or mask_BR.shape != logp_BR.shape:
            raise ValueError(
                f"rollout_logp has shape {tuple(rollout_logp.shape)} and mask {tuple(mask.shape)}; "
                f"expected {tuple(logp_BR.shape)} as logp; nothing was clipped"
            )
        precise = torch.promote_types(logp_BR.dtype, torch.float32)
        log_ratio_BR = logp_BR.detach().to(precise) - rollout_logp.detach().to(logp_BR.device, precise)
        factor_BR = torch.ones_like(log_ratio_BR)
        for remedy in self._on_coefficients:
            factor_BR = factor_BR * remedy.factor(log_ratio_BR, mask_BR)
        logp_BR.register_hook(_times(factor_BR.to(logp_BR.dtype)))  # type: ignore[no-untyped-call]

    def fractions(self) -> dict[str, float]:
        """What this rank's remedies did at this step, LayerClip apart; starts the next step's count."""
        found = {FRACTION_NAMES[type(remedy)]: remedy.tally.take() for remedy in self._counted}
        return {name: fraction for name, fraction in found.items() if fraction is not None}

    def entering(self) -> Mapping[str, tuple[float, float]]:
        """What went into the layers from above at this step on this rank, for ranks to add up: by layer, as
        `ResidualStream.take`; starts the next step's."""
        if self._stream is None:
            return {}
        squares_K, held_K = self._stream.take().tolist()
        return dict(zip(self._stream.names, zip(squares_K, held_K, strict=True), strict=True))

    def suspended(self) -> contextlib.AbstractContextManager[None]:
        """Backward passes inside are gradloc's own: none of the step's."""
        return contextlib.nullcontext() if self._stream is None else self._stream.suspended()

    def after_agreement(
        self, layer_norms: Mapping[str, float], entering_norms: Mapping[str, float], num_held: Mapping[str, int]
    ) -> dict[str, float]:
        """Clip layers by the norms of all ranks; what that did, which is the same on every rank."""
        if self._layer_clip is None:
            return {}
        return {FRACTION_NAMES[LayerClip]: self._layer_clip.clip(layer_norms, entering_norms, num_held)}


def _times(factor_BR: Tensor) -> Callable[[Tensor], Tensor]:
    def hook(grad_BR: Tensor) -> Tensor:
        # Where a token is left out, so is its NaN: 0 * NaN would keep it.
        return torch.where(factor_BR == 0, torch.zeros_like(grad_BR), grad_BR * factor_BR)

    return hook


def _refuse_wrapper(model: torch.nn.Module) -> None:
    for part in (model, *model.modules()):
        for cls in type(part).__mro__:
            if cls.__name__ in _NOT_FOR_LAYER_CLIP:
                raise ValueError(f"LayerClip cannot work with {cls.__name__}: {_NOT_FOR_LAYER_CLIP[cls.__name__]}")
