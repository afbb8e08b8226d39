"""The checks inside a training loop: every N steps, before the update; a debug bundle before the crash.

    watcher = Watcher(model, optimizer, folder=Path("bundles"), every=10)
    ... per step, after the last backward and before clipping:
        findings = watcher.before_update(step, batch=batch, rewards=rewards, loss_parts={"policy": ...})
    ... after optimizer.step() and zero_grad():
        findings = watcher.after_step()

Never raises into the loop (GRADLOC_STRICT=1 makes it). Asks nothing of other ranks: each process watches its own.
"""

import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradloc.checks import batch as batches
from gradloc.checks import gradients, losses, optimizer_state, ratios, rewards
from gradloc.checks.bundle import BUNDLES_MAX, BYTES_MAX, num_bundles, write_bundle
from gradloc.checks.finding import CheckFinding
from gradloc.checks.memory import MemoryWatch
from gradloc.norms import LayerNorms

_log = logging.getLogger("gradloc.checks")


class Watcher:
    """Watches one process. `num_failed`: checks that failed themselves and were logged."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        folder: Path | None = None,
        every: int = 10,
        batch_settings: batches.BatchSettings | None = None,
        healthy_layer_norms: Mapping[str, float] | None = None,
        on_findings: Callable[[int, tuple[CheckFinding, ...]], None] | None = None,
        bundle_bytes_max: int = BYTES_MAX,
    ) -> None:
        if every < 1:
            raise ValueError(f"every is {every}; expected a number of steps, 1 or more")
        self._model = model
        self._optimizer = optimizer
        self._folder = folder
        self._every = every
        self._batch_settings = batch_settings
        self._healthy = healthy_layer_norms
        self._on_findings = on_findings
        self._bytes_max = bundle_bytes_max
        self._memory = MemoryWatch()
        self._step = 0
        self.num_failed = 0
        self.bundles: list[Path] = []

    def before_update(
        self,
        step: int,
        *,
        batch: Mapping[str, Any] | None = None,
        rewards_of_batch: Sequence[object] | Tensor | None = None,
        groups: Sequence[object] | Tensor | None = None,
        loss_parts: Mapping[str, float | Tensor] | None = None,
        tokens: ratios.TokenBatch | None = None,
    ) -> tuple[CheckFinding, ...]:
        """Check the step. What is cheap is checked at every step, the rest at every `every`th."""
        self._step = step
        return self._guarded(
            lambda: self._before_update(
                step, batch, _listed(rewards_of_batch), _listed(groups), _plain(loss_parts), tokens
            )
        )

    def after_step(self) -> tuple[CheckFinding, ...]:
        """Check optimizer and memory, at every `every`th step; call it when the step's tensors are gone."""
        if self._step % self._every:
            return ()
        return self._guarded(self._after_step)

    def _guarded(self, check: Callable[[], tuple[CheckFinding, ...]]) -> tuple[CheckFinding, ...]:
        found: tuple[CheckFinding, ...] = ()
        try:
            with torch.no_grad():
                found = check()
            if found and self._on_findings is not None:
                self._on_findings(self._step, found)
        except Exception as error:
            if os.environ.get("GRADLOC_STRICT") == "1":
                raise
            self.num_failed += 1
            if self.num_failed == 1:
                _log.warning("gradloc checks failed, training goes on: %s: %s", type(error).__name__, str(error)[:200])
        return found

    def _before_update(
        self,
        step: int,
        batch: Mapping[str, Any] | None,
        rewards_of_batch: Sequence[object] | None,
        groups: Sequence[object] | None,
        loss_parts: Mapping[str, float] | None,
        tokens: ratios.TokenBatch | None,
    ) -> tuple[CheckFinding, ...]:
        found: list[CheckFinding] = []
        norms = self._layer_norms()
        whole = math.sqrt(sum(norm**2 for norm in norms.values()))
        if loss_parts:
            found += losses.check_loss_parts(loss_parts)
        if rewards_of_batch is not None:
            found += rewards.check_rewards(rewards_of_batch, groups=groups).findings
        due = step % self._every == 0 or not math.isfinite(whole) or bool(found)
        if due:
            if batch is not None:
                found += batches.check_batch(batch, self._batch_settings)
            if tokens is not None:
                found += ratios.check_tokens(tokens, grad_norm=whole)
            found += gradients.check_gradients(
                self._model.named_parameters(), healthy_layer_norms=self._healthy
            ).findings
        if any(one.severity == "error" for one in found):
            self._save(step, found, norms, whole, batch, loss_parts, rewards_of_batch, tokens)
        return tuple(found)

    def _after_step(self) -> tuple[CheckFinding, ...]:
        named = list(self._model.named_parameters())
        found = [*optimizer_state.check_optimizer(self._optimizer, named)]
        found += optimizer_state.check_left_out(self._optimizer, named)
        del named
        found += self._memory.after_step()
        return tuple(found)

    def _layer_norms(self) -> dict[str, float]:
        """By layer, with one transfer from the device and no collective: of sharded layers this rank's part."""
        present = ((name, p) for name, p in self._model.named_parameters() if p.grad is not None)
        measured = LayerNorms(present, world_size=1)
        squares = measured.local_squares().tolist()
        return {key: math.sqrt(square) for key, square in zip(measured.names, squares, strict=True)}

    def _save(
        self,
        step: int,
        found: Sequence[CheckFinding],
        norms: Mapping[str, float],
        whole: float,
        batch: Mapping[str, Any] | None,
        loss_parts: Mapping[str, float] | None,
        rewards_of_batch: Sequence[object] | None,
        tokens: ratios.TokenBatch | None,
    ) -> None:
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1 else None
        if self._folder is None or num_bundles(self._folder, rank) >= BUNDLES_MAX:
            return
        document: dict[str, Any] = {"grad_norm": whole, "layer_norms": dict(norms)}
        document["learning_rate"] = float(self._optimizer.param_groups[0]["lr"])
        if self._healthy:
            document["layer_norms_healthy"] = dict(self._healthy)
        if loss_parts:
            document["loss_parts"] = dict(loss_parts)
        if rewards_of_batch is not None:
            document["rewards"] = [
                one if isinstance(one, int | float) or one is None else None for one in rewards_of_batch
            ]
        tensors = {f"batch.{name}": value for name, value in (batch or {}).items() if isinstance(value, Tensor)}
        if tokens is not None:
            named = {
                "logp": tokens.logp_BR,
                "label_mask": tokens.mask_BR,
                "rollout_logp": tokens.rollout_logp_BR,
                "old_logp": tokens.old_logp_BR,
            }
            tensors |= {name: tensor for name, tensor in named.items() if tensor is not None}
        home = write_bundle(self._folder, step, found, document, tensors, bytes_max=self._bytes_max, rank=rank)
        self.bundles.append(home)


def _listed(values: Sequence[object] | Tensor | None) -> Sequence[object] | None:
    """A tensor's or array's numbers as a list."""
    tolist = getattr(values, "tolist", None)
    listed: Sequence[object] | None = tolist() if callable(tolist) else values  # type: ignore[assignment]
    return listed


def _plain(parts: Mapping[str, float | Tensor] | None) -> dict[str, float] | None:
    return None if parts is None else {name: float(value) for name, value in parts.items()}
