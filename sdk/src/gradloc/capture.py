"""Capture of the coefficients c_i = dL/dlogp_i by a hook on the log-probabilities.

Loss-agnostic: no loss code is touched. Keeps one step's micro-batches and forgets them at the next;
knows nothing of norms, ranks or Redis. Shapes: B rows, T positions, R positions with a logp (the
last R of T).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from gradloc.model_inputs import BYTES_MAX, ModelInputs, model_inputs
from gradloc.snapshot import MicroBatch

# What one rank tells the others of its tokens: see `summarize`.
SUMMARY_FIELDS = (
    "num_tokens",
    "coefficient_abs_max",
    "micro_batch",
    "sequence",
    "token",
    "log_ratio_max",
    "log_ratio_min",
    "sequence_log_ratio_max",
    "energy",
)


@dataclass
class _Captured:
    ids_BT: torch.Tensor
    mask_BR: torch.Tensor
    logp_BR: torch.Tensor
    attention_mask_BT: torch.Tensor | None
    position_ids_BT: torch.Tensor | None
    rollout_logp_BR: torch.Tensor | None
    old_logp_BR: torch.Tensor | None
    advantage_BR: torch.Tensor | None
    ref_logp_BR: torch.Tensor | None
    rollout_ids_BR: torch.Tensor | None
    uids: tuple[str, ...]
    temperature: float
    packed: bool
    inputs: ModelInputs | None
    coefficient_BR: torch.Tensor | None = None
    entropy_BR: torch.Tensor | None = None
    entropy_coefficient_BR: torch.Tensor | None = None

    def saw_entropy(self, grad_BR: torch.Tensor) -> None:
        """Hook on the entropy, as `saw`."""
        seen = self.entropy_coefficient_BR
        self.entropy_coefficient_BR = grad_BR.detach().clone() if seen is None else seen + grad_BR.detach()

    def saw(self, grad_BR: torch.Tensor) -> None:
        """Hook: add what this backward saw; a second backward through the same logp adds to the first."""
        grad_BR = grad_BR.detach()
        self.coefficient_BR = grad_BR.clone() if self.coefficient_BR is None else self.coefficient_BR + grad_BR


class Capture:
    """Micro-batches of the step in progress. inputs_bytes_max: of pictures and the like that are kept of a step.
    placeholders: ids that stand for them."""

    def __init__(self, *, inputs_bytes_max: int = BYTES_MAX, placeholders: Mapping[str, int] | None = None) -> None:
        self._captured: list[_Captured] = []
        self._inputs_bytes_max = inputs_bytes_max
        self._placeholders = dict(placeholders or {})

    def tokens(
        self,
        logp_BR: torch.Tensor,
        ids_BT: torch.Tensor,
        mask_BR: torch.Tensor,
        *,
        rollout_logp: torch.Tensor | None,
        old_logp: torch.Tensor | None,
        advantage: torch.Tensor | None,
        uid: Sequence[object] | None,
        rollout_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        temperature: float,
        entropy: torch.Tensor | None = None,
        ref_logp: torch.Tensor | None = None,
        packed: bool = False,
        tensors: Mapping[str, torch.Tensor] | None = None,
        entries: Mapping[str, Sequence[int]] | None = None,
        unseen: Sequence[str] = (),
    ) -> None:
        """Register one micro-batch. Raises ValueError when shapes do not fit together.

        tensors, entries: `model_inputs` of `Probe.tokens`. unseen: what else the model was called with, by name.
        """
        if not logp_BR.requires_grad:  # an evaluation pass: there will be no backward
            return
        _check("ids", ids_BT, (logp_BR.shape[0], None))
        if ids_BT.shape[1] < logp_BR.shape[1]:
            raise ValueError(
                f"logp has {logp_BR.shape[1]} positions but ids only {ids_BT.shape[1]}; "
                "expected logp [B, R] for the last R positions of ids [B, T]"
            )
        if mask_BR.shape == ids_BT.shape != logp_BR.shape:
            mask_BR = mask_BR[:, -logp_BR.shape[1] :]
        _check("mask", mask_BR, tuple(logp_BR.shape))
        if uid is not None and len(uid) != logp_BR.shape[0]:
            raise ValueError(f"uid has {len(uid)} entries for {logp_BR.shape[0]} rows; expected one a row")
        if not (temperature > 0 and math.isfinite(temperature)):
            raise ValueError(f"temperature is {temperature}; expected the positive sampling temperature")
        tensors = dict(tensors or {})
        if position_ids is not None and position_ids.dim() == 3:  # rotary positions of pictures: [axes, B, T]
            tensors["position_ids"], position_ids = position_ids, None
        captured = _Captured(
            ids_BT=ids_BT.detach(),
            mask_BR=mask_BR.detach().bool(),
            logp_BR=logp_BR.detach(),
            attention_mask_BT=_optional("attention_mask", attention_mask, tuple(ids_BT.shape)),
            position_ids_BT=_optional("position_ids", position_ids, tuple(ids_BT.shape)),
            rollout_logp_BR=_optional("rollout_logp", rollout_logp, tuple(logp_BR.shape)),
            old_logp_BR=_optional("old_logp", old_logp, tuple(logp_BR.shape)),
            advantage_BR=_per_token(advantage, logp_BR),
            ref_logp_BR=_optional("ref_logp", ref_logp, tuple(logp_BR.shape)),
            rollout_ids_BR=_optional("rollout_ids", rollout_ids, tuple(logp_BR.shape)),
            uids=tuple(str(one) for one in uid) if uid is not None else (),
            temperature=float(temperature),
            packed=packed,
            inputs=self._inputs(tensors, entries, [name for name in unseen if name not in tensors]),
        )
        logp_BR.register_hook(captured.saw)  # type: ignore[no-untyped-call]
        if entropy is not None and entropy.requires_grad:
            captured.entropy_BR = _optional("entropy", entropy, tuple(logp_BR.shape))
            entropy.register_hook(captured.saw_entropy)  # type: ignore[no-untyped-call]
        self._captured.append(captured)

    def _inputs(
        self, tensors: Mapping[str, torch.Tensor], entries: Mapping[str, Sequence[int]] | None, unseen: Sequence[str]
    ) -> ModelInputs | None:
        inputs = model_inputs(tensors, entries, self._placeholders)
        if unseen:
            return inputs.without_tensors(
                f"the model was called with {unseen[0]}, which probe.tokens() was not given; hand it over in "
                "model_inputs={...}"
            )
        if not tensors:
            return None
        before = sum(one.inputs.num_bytes for one in self._captured if one.inputs is not None)
        if before + inputs.num_bytes > self._inputs_bytes_max:
            return inputs.without_tensors(
                f"{before + inputs.num_bytes:,} bytes of {', '.join(sorted(tensors))} in this step, more than the "
                f"{self._inputs_bytes_max:,} that are kept; raise watch(model_inputs_bytes_max=)"
            )
        return inputs

    @property
    def newest(self) -> "_Captured | None":
        return self._captured[-1] if self._captured else None

    def take(self) -> tuple[MicroBatch, ...]:
        """The step's micro-batches; the capture is empty afterwards. A logp that no loss used has c = 0."""
        taken, self._captured = self._captured, []
        return tuple(
            MicroBatch(
                ids_BT=one.ids_BT,
                mask_BR=one.mask_BR,
                logp_BR=one.logp_BR,
                coefficient_BR=torch.zeros_like(one.logp_BR) if one.coefficient_BR is None else one.coefficient_BR,
                attention_mask_BT=one.attention_mask_BT,
                position_ids_BT=one.position_ids_BT,
                rollout_logp_BR=one.rollout_logp_BR,
                old_logp_BR=one.old_logp_BR,
                advantage_BR=one.advantage_BR,
                ref_logp_BR=one.ref_logp_BR,
                rollout_ids_BR=one.rollout_ids_BR,
                entropy_BR=None if one.entropy_coefficient_BR is None else one.entropy_BR,
                entropy_coefficient_BR=one.entropy_coefficient_BR,
                uids=one.uids,
                temperature=one.temperature,
                packed=one.packed,
                inputs=one.inputs,
            )
            for one in taken
        )


def summarize(micro_batches: Sequence[MicroBatch], grad_factor: float) -> torch.Tensor:
    """SUMMARY_FIELDS of one rank: float64 [9] on the host; NaN where there is nothing to tell.

    Energy is sum c²·2(1 - p)², an upper estimate of the squared gradient at the logits that needs no
    vocabulary: c²(1 - 2p + sum p²) lies between half of it and it.
    """
    if not micro_batches:
        return torch.tensor([0.0, *[math.nan] * 7, 0.0], dtype=torch.float64)
    rows = torch.stack([_summarize_one(index, one, grad_factor) for index, one in enumerate(micro_batches)]).cpu()
    worst = int(torch.argmax(rows[:, 1]))  # argmax takes a NaN for the largest, as we want it
    return torch.stack(
        [
            rows[:, 0].sum(),
            *rows[worst, 1:5],
            _extreme(rows[:, 5], 1),
            _extreme(rows[:, 6], -1),
            _extreme(rows[:, 7], 1),
            rows[:, 8].sum(),
        ]
    )


def _summarize_one(index: int, one: MicroBatch, grad_factor: float) -> torch.Tensor:
    coefficient_BR = one.coefficient_BR.double() * grad_factor
    mask_BR = one.mask_BR
    size_BR = coefficient_BR.abs()
    at = torch.argmax(size_BR) if size_BR.numel() else torch.zeros((), dtype=torch.int64, device=size_BR.device)
    width = max(one.logp_BR.shape[1], 1)
    probability_BR = one.logp_BR.double().exp()
    unused_BR = ~mask_BR
    energy = (coefficient_BR.square() * 2 * (1 - probability_BR).square()).masked_fill(unused_BR, 0.0).sum()
    nan = torch.full((), math.nan, dtype=torch.float64, device=size_BR.device)
    ratio_max, ratio_min, row_max = nan, nan, nan
    if one.rollout_logp_BR is not None and mask_BR.numel():
        # Without asking the device whether any token is used, which would wait for it.
        known = mask_BR.any()
        log_ratio_BR = one.logp_BR.double() - one.rollout_logp_BR.double()
        ratio_max = torch.where(known, log_ratio_BR.masked_fill(unused_BR, -math.inf).max(), nan)
        ratio_min = torch.where(known, log_ratio_BR.masked_fill(unused_BR, math.inf).min(), nan)
        row_max = torch.where(known, log_ratio_BR.masked_fill(unused_BR, 0.0).sum(dim=1).max(), nan)
    return torch.stack(
        [
            mask_BR.sum().double(),
            size_BR.max() if size_BR.numel() else nan,
            torch.full_like(nan, float(index)),
            torch.div(at, width, rounding_mode="floor").double(),
            (at % width + one.first_position).double(),
            ratio_max,
            ratio_min,
            row_max,
            energy,
        ]
    )


def _extreme(values: torch.Tensor, sign: int) -> torch.Tensor:
    known = values[~torch.isnan(values)]
    if not len(known):
        return torch.full((), math.nan, dtype=torch.float64)
    return known.max() if sign > 0 else known.min()


def _check(name: str, tensor: torch.Tensor, expected: tuple[int | None, ...]) -> None:
    fits = tensor.dim() == len(expected) and all(
        want is None or have == want for have, want in zip(tensor.shape, expected, strict=True)
    )
    if not fits:
        wanted = ["any" if want is None else want for want in expected]
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; expected {wanted}")


def _optional(name: str, tensor: torch.Tensor | None, expected: tuple[int, ...]) -> torch.Tensor | None:
    if tensor is None:
        return None
    _check(name, tensor, expected)
    return tensor.detach()


def _per_token(advantage: torch.Tensor | None, logp_BR: torch.Tensor) -> torch.Tensor | None:
    """Advantages a row [B] or [B, 1] are spread over the row's tokens."""
    if advantage is None:
        return None
    advantage = advantage.detach()
    if advantage.dim() == 1:
        advantage = advantage[:, None]
    if advantage.shape not in (logp_BR.shape, (logp_BR.shape[0], 1)):
        raise ValueError(f"advantage has shape {tuple(advantage.shape)}; expected [B] or {tuple(logp_BR.shape)}")
    return advantage.expand(logp_BR.shape)
