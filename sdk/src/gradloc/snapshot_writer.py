"""Writes snapshots behind the training loop's back: one at a time, one thread, never in the way.

The only cost to the loop is the copy of weights and batch to the host (`host_copy`, `host_batch`).
Rank 0 waits in its thread for the other ranks' parts and writes the manifest last.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch.distributed.tensor import DTensor

from gradloc import snapshot
from gradloc.manifest import FileRecord, Manifest
from gradloc.snapshot import TENSOR_FIELDS, MicroBatch
from gradloc.store import Store
from gradloc_proto.messages import Message, SnapshotCommitted, SnapshotFailed

CLOSE_TIMEOUT_S = 30.0
HEAD_START_S = 0.02  # the loop leaves `observe` before the writing starts: both would wait for the interpreter's lock
_log = logging.getLogger("gradloc")


@dataclass(frozen=True)
class Order:
    """One snapshot to write. `manifest` and `weights` are rank 0's; other ranks write only their part.

    is_reference: a healthy step, outside the quota; a spike need not wait for it (and holds a second copy meanwhile).
    asked_step: the step that was wished for, where this is another.
    """

    step: int
    micro_batches: tuple[MicroBatch, ...]
    grad_factor: float
    manifest: Manifest | None = None
    weights: dict[str, torch.Tensor] | None = None
    tokenizer_json: str | None = None
    is_reference: bool = False
    asked_step: int | None = None


class SnapshotWriter:
    """One order in flight, and one more behind a reference; `ready` says whether another would be taken."""

    def __init__(
        self,
        store: Store,
        run_id: str,
        attempt: int,
        rank: int,
        publish: Callable[[Message], None],
        *,
        snapshots_max: int,
    ) -> None:
        self._store = store
        self._run_id = run_id
        self._attempt = attempt
        self._rank = rank
        self._publish = publish
        self._snapshots_left = snapshots_max
        self._thread: threading.Thread | None = None
        self._newest_is_reference = False

    @property
    def idle(self) -> bool:
        """Nothing is being written."""
        return self._thread is None or not self._thread.is_alive()

    @property
    def ready(self) -> bool:
        """False while a spike is being written, and when the run's quota is used up."""
        return self._snapshots_left > 0 and (self.idle or self._newest_is_reference)

    def url(self, step: int) -> str:
        return self._store.child(self._run_id, self._attempt, step).url

    def write(self, order: Order) -> None:
        """Write in the background. The caller has checked `ready` (for a reference `idle`) on all ranks."""
        self._snapshots_left -= not order.is_reference
        self._newest_is_reference = order.is_reference
        arguments = (order, self._thread)
        self._thread = threading.Thread(target=self._write, args=arguments, name="gradloc-snapshot", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Wait for the snapshot in flight."""
        if self._thread is not None:
            self._thread.join(timeout=timeout_s)

    def _write(self, order: Order, before: threading.Thread | None) -> None:
        time.sleep(HEAD_START_S)
        if before is not None:
            before.join()
        try:
            self._write_files(order)
        except Exception as error:  # noqa: BLE001 - a full disk must not end a training run
            reason = f"{type(error).__name__}: {str(error)[:300]}"
            _log.warning("gradloc: snapshot of step %d failed: %s", order.step, reason)
            if self._rank == 0:
                self._publish(
                    SnapshotFailed(
                        run_id=self._run_id, attempt=self._attempt, ts=time.time(), step=order.step, reason=reason
                    )
                )

    def _write_files(self, order: Order) -> None:
        store = self._store.child(self._run_id, self._attempt, order.step)
        snapshot.write_part(store, self._rank, order.micro_batches, order.grad_factor)
        if order.manifest is None:
            return
        files: dict[str, FileRecord] = {}
        if order.weights is not None:
            files |= snapshot.write_weights(store, order.weights)
        if order.tokenizer_json is not None:
            files |= snapshot.write_tokenizer(store, order.tokenizer_json)
        parts = snapshot.collect_parts(store, order.manifest.world_size)
        manifest = order.manifest.model_copy(update={"parts": parts, "files": files})
        written = snapshot.write_manifest(store, manifest)
        self._publish(
            SnapshotCommitted(
                run_id=self._run_id,
                attempt=self._attempt,
                ts=time.time(),
                step=order.step,
                path=store.url,
                num_bytes=manifest.num_bytes,
                manifest_sha256=written.sha256,
                weights=manifest.weights,
                asked_step=order.asked_step,
            )
        )


def is_sharded(module: torch.nn.Module) -> bool:
    return any(isinstance(tensor, DTensor) for tensor in module.state_dict().values())


def host_copy(module: torch.nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The module's state on the host, and which names are tied to which: {name: stored name}.

    Sharded weights (DTensor) are gathered, a collective: then every rank must call this, in step.
    """
    weights: dict[str, torch.Tensor] = {}
    tied: dict[str, str] = {}
    seen: dict[tuple[int, tuple[int, ...]], str] = {}
    for name, tensor in module.state_dict().items():
        if not isinstance(tensor, torch.Tensor):
            continue
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        identity = (local.data_ptr(), tuple(tensor.shape))
        if identity in seen and local.numel():
            tied[name] = seen[identity]
            continue
        seen[identity] = name
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        weights[name] = whole.detach().to("cpu", copy=not isinstance(tensor, DTensor))
    return weights, tied


def host_batch(micro_batches: tuple[MicroBatch, ...]) -> tuple[MicroBatch, ...]:
    """The batch copied to the host: the trainer may reuse its buffers."""

    def copied(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.detach().to("cpu", copy=True)

    return tuple(
        replace(
            one,
            inputs=None if one.inputs is None else one.inputs.moved("cpu", copy=True),
            **{name: copied(getattr(one, name)) for name in TENSOR_FIELDS},  # type: ignore[arg-type]
        )
        for one in micro_batches
    )
