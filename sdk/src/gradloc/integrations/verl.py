"""gradloc in verl 0.9: an engine under a vendor name of its own, chosen by environment variables.

    VERL_USE_EXTERNAL_MODULES=gradloc.integrations.verl VERL_ENGINE_VENDOR=gradloc
    GRADLOC_RUN=my-run GRADLOC_STORE=file:///data/gradloc GRADLOC_REDIS_URL=redis://...
    GRADLOC_REMEDIES=TokenClip,LayerClip    (none unless named; docs/remedies.md)

It is verl's own FSDP engine; the log-probabilities that it hands to the loss are watched on the way, and the norms are
measured before it clips. Padded and packed batches, FSDP2. What goes wrong in here is one log line.
Shapes: B rows, T positions, R = T - 1 positions with a logp, C of a response, N tokens of all rows one after the other.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from verl.utils import tensordict_utils
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from gradloc.clipping import LayerClip, SeqClip, TokenClip
from gradloc.clipping.applied import Remedy
from gradloc.integrations.from_logits import through
from gradloc.integrations.harmless import Harmless
from gradloc.probe import Probe, watch

VENDOR = "gradloc"
DEVICES = ["cuda", "npu", "cpu"]
REMEDIES: dict[str, Callable[[], Remedy]] = {"TokenClip": TokenClip, "SeqClip": SeqClip, "LayerClip": LayerClip}


class WatchedFSDPEngine(FSDPEngineWithLMHead):  # type: ignore[misc]
    """verl's FSDP engine for language models, watched where it trains."""

    probe: Probe | None = None

    def initialize(self) -> None:
        super().initialize()
        self._unharmed = Harmless()
        self._losses: list[float] = []
        if self.engine_config.forward_only:
            return
        refuse(self)
        self.probe = watch(
            self.module,
            run=_required("GRADLOC_RUN"),
            redis=os.environ.get("GRADLOC_REDIS_URL"),
            store=os.environ.get("GRADLOC_STORE"),
            attempt=int(os.environ.get("GRADLOC_ATTEMPT", "0")),
            localize="inline" if os.environ.get("GRADLOC_LOCALIZE") == "inline" else None,
            tokenizer=self.model_config.tokenizer,
            remedies=remedies_of(os.environ.get("GRADLOC_REMEDIES", "")),
        )
        self.probe.head = "scaled"

    def prepare_model_outputs(
        self, output: Any, output_args: Any, micro_batch: Any, logits_processor_func: Any
    ) -> dict[str, Any]:
        found: dict[str, Any] = super().prepare_model_outputs(output, output_args, micro_batch, logits_processor_func)
        if self.probe is not None and torch.is_grad_enabled() and self.mode == "train":
            with self._unharmed("forward"):
                self._watch_outputs(found, micro_batch)
        return found

    def forward_step(self, micro_batch: Any, loss_function: Any, forward_only: bool) -> Any:
        loss, output = super().forward_step(micro_batch, loss_function, forward_only)
        if not forward_only and self.probe is not None:
            self._losses.append(float(output["loss"]))
        return loss, output

    def optimizer_step(self) -> Any:
        if self.probe is not None:
            losses, self._losses = self._losses, []
            with self._unharmed("observe"):
                # verl multiplies a loss by the number of ranks and adds micro-batches up.
                loss = sum(losses) / self.probe.world_size if losses else 0.0
                self.probe.observe(step=None, loss=loss, lr=float(self.optimizer.param_groups[0]["lr"]))
        return super().optimizer_step()

    def _watch_outputs(self, found: dict[str, Any], micro_batch: Any) -> None:
        """Puts a tensor that a hook stays on where the loss will look."""
        assert self.probe is not None
        if "log_probs" not in found or not found["log_probs"].is_nested:
            raise ValueError("an engine output without jagged log_probs (distillation only?); expected log_probs")
        layout = Layout.of(micro_batch["input_ids"])
        logp_BR = _standing_in(found, "log_probs", layout)
        entropy_BR = _standing_in(found, "entropy", layout) if found.get("entropy") is not None else None
        mask_BR, facts = row_facts(micro_batch, layout, logp_BR)
        temperature = micro_batch["temperature"]
        self.probe.tokens(
            logp_BR,
            layout.rows(micro_batch["input_ids"].values()),
            mask_BR,
            attention_mask=layout.present_BT,
            position_ids=layout.rows(micro_batch["position_ids"].values()),
            temperature=float(temperature.flatten()[0] if isinstance(temperature, Tensor) else temperature),
            entropy=entropy_BR,
            packed=bool(tensordict_utils.get_non_tensor_data(micro_batch, "use_remove_padding", default=True)),
            **facts,
        )


@dataclass(frozen=True)
class Layout:
    """Where each of N tokens stands in right-padded rows."""

    present_BT: Tensor  # bool
    lengths_B: Tensor

    @classmethod
    def of(cls, jagged: Any) -> "Layout":
        lengths_B = jagged.offsets().diff()
        positions_T = torch.arange(int(lengths_B.max()), device=lengths_B.device)
        return cls(positions_T < lengths_B.unsqueeze(1), lengths_B)

    def rows(self, values_N: Tensor, fill: float = 0) -> Tensor:
        """[B, T] of the values of all tokens."""
        rows_BT = torch.full(self.present_BT.shape, fill, dtype=values_N.dtype, device=values_N.device)
        rows_BT[self.present_BT] = values_N
        return rows_BT

    def responses(self, values_BC: Tensor, lengths_B: Tensor, fill: float) -> Tensor:
        """[B, R] of the values of responses, whose first `lengths_B` columns count; a response ends its row."""
        num_rows, width = self.present_BT.shape[0], self.present_BT.shape[1] - 1
        rows_BR = torch.full((num_rows, width), fill, dtype=values_BC.dtype, device=values_BC.device)
        columns_C = torch.arange(values_BC.shape[1], device=values_BC.device)
        valid_BC = columns_C < lengths_B.unsqueeze(1)
        at_BC = (self.lengths_B - lengths_B - 1).unsqueeze(1) + columns_C
        row_BC = torch.arange(num_rows, device=values_BC.device).unsqueeze(1).expand_as(at_BC)
        rows_BR[row_BC[valid_BC], at_BC[valid_BC]] = values_BC[valid_BC]
        return rows_BR


def row_facts(micro_batch: Any, layout: Layout, logp_BR: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """The mask [B, R], and further arguments of `Probe.tokens`."""
    keys = set(micro_batch.keys())
    if "response_mask" not in keys:  # supervised: a mask of whole rows
        return layout.rows(micro_batch["loss_mask"].values().bool())[:, 1:], {}
    lengths_B = _response_lengths(micro_batch)
    whole = {
        name: _padded(micro_batch[name]) for name in ("response_mask", "advantages", "old_log_probs") if name in keys
    }
    mask_BR = layout.responses(whole["response_mask"].bool(), lengths_B, 0)
    facts: dict[str, Any] = {}
    if "advantages" in whole:
        facts["advantage"] = layout.responses(whole["advantages"], lengths_B, 0.0)
    if "old_log_probs" in whole:
        facts["old_logp"] = layout.responses(whole["old_log_probs"], lengths_B, float("nan"))
        facts["rollout_logp"] = facts["old_logp"]
    if "rollout_log_probs" in keys:
        told_BC = _padded(micro_batch["rollout_log_probs"])
        facts["rollout_logp"] = layout.responses(told_BC, lengths_B, float("nan"))
    if "uid" in keys:
        facts["uid"] = [str(one) for one in tensordict_utils.get(micro_batch, "uid")]
    return mask_BR, facts


def remedies_of(names: str) -> list[Remedy]:
    """Remedies with their defaults by their names, parted by commas. Raises ValueError for another name."""
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in REMEDIES]
    if unknown:
        raise ValueError(f"GRADLOC_REMEDIES names {', '.join(unknown)}; expected some of {', '.join(REMEDIES)}")
    return [REMEDIES[name]() for name in wanted]


def refuse(engine: Any) -> None:
    """Raises ValueError that names what does not work."""
    if engine.engine_config.strategy != "fsdp2":
        raise ValueError(
            f"strategy={engine.engine_config.strategy}: FSDP1's flat parameters have no layers to measure; "
            "expected strategy=fsdp2"
        )
    if engine.ulysses_sequence_parallel_size > 1:
        raise ValueError("Ulysses sequence parallelism is not supported; expected ulysses_sequence_parallel_size=1")
    if getattr(engine, "scaler", None) is not None:
        raise ValueError(
            "fp16 is unscaled inside optimizer_step, too late to measure; expected param_dtype bf16 or fp32"
        )


def _standing_in(found: dict[str, Any], name: str, layout: Layout) -> Tensor:
    """A leaf [B, R] for found[name], a jagged tensor: see `from_logits.standing_in`."""
    jagged = found[name]
    values_N = jagged.values()
    found[name] = torch.nested.nested_tensor_from_jagged(values_N, jagged.offsets())
    leaf_BR = layout.rows(values_N.detach())[:, :-1].contiguous().requires_grad_()

    def saw(grad_N: Tensor) -> Tensor:
        grad_BT = layout.rows(grad_N)
        grad_BT[:, :-1] = through(leaf_BR, grad_BT[:, :-1])
        return grad_BT[layout.present_BT]

    if values_N.requires_grad:
        values_N.register_hook(saw)
    return leaf_BR


def _response_lengths(micro_batch: Any) -> Tensor:
    """As `no_padding_2_padding` of verl counts them."""
    responses = micro_batch["responses"]
    if responses.is_nested:
        nested: Tensor = responses.offsets().diff()
        return nested
    padded: Tensor = micro_batch["attention_mask"][:, micro_batch["prompts"].shape[1] :].sum(dim=1)
    return padded


def _padded(tensor: Tensor) -> Tensor:
    return torch.nested.to_padded_tensor(tensor, padding=0.0) if tensor.is_nested else tensor


def _required(name: str) -> str:
    value = os.environ.get(name)
    if not value:
        raise ValueError(f"{name} is not set; expected the run's name, where VERL_ENGINE_VENDOR={VENDOR} is")
    return value


EngineRegistry.register(model_type="language_model", backend="fsdp2", device=DEVICES, vendor=VENDOR)(WatchedFSDPEngine)
__all__ = ["WatchedFSDPEngine"]
