"""`gradloc.watch`: the trainer's side of gradloc, for any PyTorch loop.

    probe = gradloc.watch(model, optimizer, run="my-run", redis="redis://...", store="file:///...")
    ... per micro-batch:  probe.tokens(logp, ids, mask, rollout_logp=..., advantage=..., uid=...)
                          loss.backward()
    ... per step:         probe.observe(loss=...)     # after the last backward, before clipping
                          clip_grad_norm_(...); optimizer.step()

The laws (docs/design.md, "The trainer's side"): nothing here raises into the loop, blocks it, or
grows in it; one collective a step, joined by every rank whatever went wrong before.
"""

import atexit
import functools
import logging
import math
import os
import statistics
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, cast

import torch
import torch.distributed as dist

from gradloc import __version__
from gradloc.agreement import METRICS, CommonView, Layout, LocalView, from_vector, to_vector
from gradloc.capture import SUMMARY_FIELDS, Capture, summarize
from gradloc.clipping.applied import AppliedRemedies, Remedy
from gradloc.clipping.stream import boundaries_of
from gradloc.head import Head
from gradloc.healthy_reference import FIRST_AFTER_STEPS, ReferencePlan
from gradloc.inline import InlineLocalizer
from gradloc.inline_work import SpikedStep
from gradloc.manifest import Manifest
from gradloc.model_inputs import BYTES_MAX, placeholders_of
from gradloc.model_record import AutocastSeen, ModelRecord, texts_of, tokenizer_json_of, unwrapped
from gradloc.norms import LayerNorms
from gradloc.publisher import Publisher
from gradloc.snapshot import MicroBatch
from gradloc.snapshot_writer import Order, SnapshotWriter, host_batch, host_copy, is_sharded
from gradloc.step_message import step_message
from gradloc.store import Store
from gradloc.unsupported import refuse
from gradloc.weights_elsewhere import WEIGHTS_BYTES_MAX, fingerprint_of
from gradloc_proto import rules
from gradloc_proto.bus import Bus
from gradloc_proto.identities import check_run_id
from gradloc_proto.messages import (
    Decision,
    Finding,
    Limits,
    Message,
    RunEnded,
    RunStarted,
)
from gradloc_proto.redis_bus import RedisBus

FINDINGS_LENGTH = 16  # findings of inline mode that are kept
RING_LENGTH = 4  # steps whose batch is kept for a late request
SNAPSHOTS_MAX = 50  # a run's quota; a storm of spikes must not fill the store
HELD_SPACING_STEPS = 8  # between the first two kept steps in which something was held back; then twice as many
METRICS_USUAL_STEPS = 32  # whose median metrics are the usual ones
LIMITS_AGE_MAX_STEPS = 64  # older limits from the detector give way to the local rules
_log = logging.getLogger("gradloc")
_GO: Decision = "go"
_P = ParamSpec("_P")
_T = TypeVar("_T")


def _strict() -> bool:
    return os.environ.get("GRADLOC_STRICT") == "1"


def _harmless(
    default: _T,
) -> Callable[[Callable[Concatenate["Probe", _P], _T]], Callable[Concatenate["Probe", _P], _T]]:
    """A method whose failure is one log line, unless GRADLOC_STRICT=1; its time counts as stall."""

    def wrap(method: Callable[Concatenate["Probe", _P], _T]) -> Callable[Concatenate["Probe", _P], _T]:
        @functools.wraps(method)
        def call(self: "Probe", *args: _P.args, **kwargs: _P.kwargs) -> _T:
            started = time.perf_counter()
            try:
                return method(self, *args, **kwargs)
            except Exception as error:
                if _strict():
                    raise
                self._complain(method.__name__, error)
                return default
            finally:
                self.stall_s += time.perf_counter() - started

        return cast("Callable[Concatenate[Probe, _P], _T]", call)

    return wrap


@dataclass(frozen=True)
class _KeptStep:
    step: int
    view: CommonView
    micro_batches: tuple[MicroBatch, ...]


class Probe:
    """Watches one training process (one rank). Made by `watch`.

    stall_s: seconds the training loop waited because of us. num_events_dropped: messages lost. finding: what
    inline mode found at the last spike that it explained, the same on every rank; findings: the last of them.
    last_step: what was measured and judged last, a spike or not. autocast_dtype: what forward passes compute in,
    where the model or `tokens` was called inside an autocast region; whoever knows better may set it. head: how the
    trainer makes log-probabilities of hidden states (`gradloc.head`), for whoever knows.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        *,
        run: str,
        attempt: int,
        bus: Bus | None,
        store: Store | None,
        tokenizer_json: str | None,
        labels: dict[str, str],
        reduction: Literal["mean", "sum"],
        skip_above: float | None,
        model_factory: str | None,
        first_step: int,
        remedies: Sequence[Remedy] = (),
        localize: Literal["inline"] | None = None,
        scaler: object | None = None,
        texts: Callable[[int], str] | None = None,
        reference_after: int | None = None,
        weights_bytes_max: int | None = None,
        checkpoint: Callable[[], str | None] | str | None = None,
        model_inputs_bytes_max: int = BYTES_MAX,
    ) -> None:
        distributed = dist.is_available() and dist.is_initialized()
        self._complained: set[str] = set()
        self.rank = dist.get_rank() if distributed else 0
        self.world_size = dist.get_world_size() if distributed else 1
        self.run_id = run
        self.attempt = attempt
        self.stall_s = 0.0
        self.step = first_step
        self.last_step: SpikedStep | None = None
        self.autocast_dtype: torch.dtype | None = None
        self._autocast_seen = AutocastSeen(next((p.device.type for p in model.parameters()), "cpu"))
        model.register_forward_pre_hook(self._autocast_seen, with_kwargs=True)
        self.head: Head = "plain"
        self._module = unwrapped(model)
        self._optimizer = optimizer
        self._record = ModelRecord.of(self._module, model_factory)
        self._tokenizer_json = tokenizer_json
        self._skip_above = skip_above
        self._rank_factor = 1.0 / self.world_size if reduction == "mean" else 1.0
        self._scaler = scaler
        self._grad_factor = self._rank_factor  # of the step in progress, the loss scale taken out
        self._norms = LayerNorms(self._module.named_parameters(), self.world_size)
        self._layout = Layout(self._norms.names, boundaries_of(self._module), self.world_size)
        self._sharded = is_sharded(self._module)
        self._inputs_bytes_max = model_inputs_bytes_max
        self._capture = Capture(
            inputs_bytes_max=model_inputs_bytes_max, placeholders=placeholders_of(self._record.config)
        )
        self._remedies = AppliedRemedies(
            remedies,
            model,
            self._module,
            lambda: self._rank_factor / _loss_scale(self._scaler),
            lambda error: self._complain("backward", error),
            is_loss_scaled=scaler is not None,
        )
        self.findings: deque[Finding] = deque(maxlen=FINDINGS_LENGTH)
        self._inline = None if localize is None else self._inline_localizer(model, texts)
        self._ring: deque[_KeptStep] = deque(maxlen=RING_LENGTH)
        size = sum(tensor.numel() * tensor.element_size() for tensor in self._module.state_dict().values())
        self._weights_apart = weights_bytes_max is not None and size > weights_bytes_max
        self._checkpoint = checkpoint
        no_references = reference_after is None or store is None or self._weights_apart
        self._references = None if no_references else ReferencePlan(reference_after or FIRST_AFTER_STEPS)
        self._metrics_before: deque[dict[str, float]] = deque(maxlen=METRICS_USUAL_STEPS)
        self._rules = rules.RunState()
        self._wish: tuple[int, bool] | None = None  # rank 0's at the last step, for all: step, or the newest
        self._last_step_at = time.monotonic()
        self._observed = False
        self._closed = False
        self._next_held_step, self._held_spacing = 0, HELD_SPACING_STEPS
        self._inputs_checked = False
        self._publisher = Publisher(bus, run) if bus is not None and self.rank == 0 else None
        self._writer = (
            SnapshotWriter(store, run, attempt, self.rank, self._publish, snapshots_max=SNAPSHOTS_MAX)
            if store is not None
            else None
        )
        if optimizer is not None:
            optimizer.register_step_pre_hook(self._before_update)
            optimizer.register_step_post_hook(self._after_update)
        self._remedies.start()
        self._close_at_exit = functools.partial(_close_forgotten, weakref.ref(self))
        atexit.register(self._close_at_exit)
        self._publish(
            RunStarted(
                run_id=run,
                attempt=attempt,
                ts=time.time(),
                world_size=self.world_size,
                layer_names=self._norms.names,
                num_parameters=sum(p.numel() for p in self._module.parameters()),
                model=self._record.architecture,
                labels=labels,
            )
        )

    @property
    def finding(self) -> Finding | None:
        return self.findings[-1] if self.findings else None

    @property
    def num_events_dropped(self) -> int:
        return self._publisher.num_dropped if self._publisher is not None else 0

    @_harmless(None)
    def tokens(
        self,
        logp: torch.Tensor,
        ids: torch.Tensor,
        mask: torch.Tensor,
        *,
        rollout_logp: torch.Tensor | None = None,
        old_logp: torch.Tensor | None = None,
        advantage: torch.Tensor | None = None,
        uid: Sequence[object] | None = None,
        rollout_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        temperature: float = 1.0,
        entropy: torch.Tensor | None = None,
        ref_logp: torch.Tensor | None = None,
        packed: bool = False,
        model_inputs: Mapping[str, torch.Tensor] | None = None,
        entries: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        """Register one micro-batch, before its backward.

        logp [B, R] requires grad and is what the loss uses; it belongs to the last R positions of ids
        [B, T]. mask [B, R] (or [B, T]) is 1 where a token is in the loss. rollout_logp and old_logp
        [B, R]; advantage [B] or [B, R]; uid: one name a row (dataset row and prompt), which a finding
        repeats; rollout_ids [B, R]: ids that rollout_logp belongs to, where ids were made from text again;
        attention_mask and position_ids [B, T] as the model got them; temperature: what logits were divided by;
        entropy [B, R]: of the whole vocabulary, as the loss uses it, where it has an entropy term; ref_logp [B, R]:
        of the reference policy, where it has a KL term; packed: the model ran the rows as one, one after the other,
        each without what attention_mask leaves out (a replay in bf16 or fp16 does the same, to round alike);
        model_inputs: what else the model was called with, by name, such as pixel_values and image_grid_thw
        (position_ids may be [axes, B, T], too); entries: for any of them how many of its entries each row has, where
        gradloc cannot tell (docs/trainers.md, "Pictures").
        """
        if torch.is_autocast_enabled(logp.device.type):
            self.autocast_dtype = torch.get_autocast_dtype(logp.device.type)
        elif self.autocast_dtype is None:
            self.autocast_dtype = self._autocast_seen.dtype
        try:
            # First, so that the capture sees the coefficients that the step really uses.
            self._remedies.before_backward(logp, mask, rollout_logp)
        finally:
            self._capture.tokens(
                logp,
                ids,
                mask,
                rollout_logp=rollout_logp,
                old_logp=old_logp,
                advantage=advantage,
                uid=uid,
                rollout_ids=rollout_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                temperature=temperature,
                entropy=entropy,
                ref_logp=ref_logp,
                packed=packed,
                tensors=model_inputs,
                entries=entries,
                unseen=self._autocast_seen.pictures,
            )
            self._check_inputs_once()

    @_harmless(_GO)
    def observe(self, /, *, step: int | None = None, **metrics: float) -> Decision:
        """Measure the step, decide with all ranks, publish. After the last backward, before clipping.

        Gradients must be reduced over ranks and unscaled (fp16). metrics: any of loss, reward_mean,
        reward_std, accuracy, num_zero_variance_groups, kl, entropy, clip_fraction, lr; averaged over
        ranks. Returns "go", "snapshot" or, where `skip_above` asked for it, "skip": then every
        gradient is None and the optimizer changes nothing.
        """
        if step is not None:
            self.step = step
        local, micro_batches = self._local_view(metrics)
        view = self._agree(local)
        if view is None:
            return "go"
        return self._act(view, micro_batches)

    @_harmless(None)
    def close(self, reason: str = "finished") -> None:
        """Finish the snapshot in flight and empty the queue, within bounds; idempotent."""
        if self._closed:
            return
        self._closed = True
        self._remedies.close()
        atexit.unregister(self._close_at_exit)
        if self._writer is not None:
            self._writer.close()
        last = max(self.step - 1, 0)
        self._publish(
            RunEnded(run_id=self.run_id, attempt=self.attempt, ts=time.time(), step=last, reason=reason[:500])
        )
        if self._publisher is not None:
            self._publisher.close()

    # --- one step ------------------------------------------------------------------------------

    def _local_view(self, metrics: dict[str, float]) -> tuple[LocalView, tuple[MicroBatch, ...]]:
        """This rank's part, also when measuring it failed: a rank that stays away would hang the others."""
        limits, wish = (self._limits(), self._take_wish()) if self.rank == 0 else (None, None)
        kept = self._kept_for_wish()
        try:
            entering = self._remedies.entering()  # first: what fails later must not leave it to the next step
            self._grad_factor = self._rank_factor / _loss_scale(self._scaler)
            micro_batches = self._capture.take()
            return (
                LocalView(
                    layer_squares_L=self._norms.local_squares(),
                    summary=summarize(micro_batches, self._grad_factor),
                    metrics=_known_metrics(metrics) | self._remedies.fractions(),
                    failed=False,
                    ready=self._writer is not None and self._writer.ready,
                    idle=self._writer is not None and self._writer.idle,
                    limits=limits,
                    kept_step=None if kept is None else kept.step,
                    wish=wish,
                    entering=entering,
                ),
                micro_batches,
            )
        except Exception as error:
            if _strict():
                raise
            self._complain("observe", error)
            zeros = torch.zeros(len(self._norms.names), dtype=torch.float64)
            blank = torch.zeros(len(SUMMARY_FIELDS), dtype=torch.float64)
            return LocalView(zeros, blank, {}, failed=True, ready=False, limits=limits, wish=wish), ()

    def _agree(self, local: LocalView) -> CommonView | None:
        vector = to_vector(local, self._layout, self.rank)
        if self.world_size > 1:
            device = _collective_device()
            vector = vector.to(device)
            dist.all_reduce(vector)
            vector = vector.cpu()
        view = from_vector(vector, self._layout)
        return None if view.failed else view

    def _act(self, view: CommonView, micro_batches: tuple[MicroBatch, ...]) -> Decision:
        broken = rules.breaches(view.limits, view.norm, view.layer_norms)
        # What LayerClip held back is no norm any more, and all the same somebody should explain it.
        hit = (*broken, rules.HELD) if view.num_positions_held else broken
        decision: Decision = "snapshot" if (broken or self._held_is_due(view)) and view.ready else "go"
        snapshot_url = None
        if decision == "snapshot" and self._writer is not None:
            snapshot_url = self._writer.url(self.step)
            self._take_snapshot(self.step, view, micro_batches, "before-update")
        elif view.kept_step is not None and view.ready:
            self._keep_late(view.kept_step)
        elif self._references is not None and self._references.is_due(view.norm, view.limits, hit) and view.idle:
            self._references.taken()
            self._take_snapshot(self.step, view, micro_batches, "reference")
        # Held back, it is not in the gradients that inline mode looks at.
        if broken and not view.num_positions_held and self._inline is not None and self._inline.wants(self.step):
            self._explain(self._inline, view, micro_batches, hit)
        if hit and self._skip_above is not None and self._beyond_skip(view):
            decision = "skip"
            for parameter in self._module.parameters():
                parameter.grad = None
        remedied: dict[str, float] = {}
        if decision != "skip":
            remedied = self._remedies.after_agreement(view.layer_norms, view.entering_norms, view.num_held)
        if self.rank == 0:
            now = time.monotonic()
            step_s, self._last_step_at = now - self._last_step_at, now
            self._publish(
                step_message(
                    view,
                    run_id=self.run_id,
                    attempt=self.attempt,
                    step=self.step,
                    ts=time.time(),
                    step_s=step_s,
                    stall_s=self.stall_s,
                    decision=decision,
                    rules_hit=hit,
                    snapshot=snapshot_url,
                    num_events_dropped=self.num_events_dropped,
                    **remedied,
                )
            )
            self._learn(view)
        self.last_step = SpikedStep(self.step, view.norm, view.layer_norms, view.limits, hit)
        self._wish = view.wish
        self._ring.append(_KeptStep(self.step, view, micro_batches))
        self._thin_ring()
        self._metrics_before.append(view.metrics)
        self.step += 1
        self._observed = True
        return decision

    def _explain(
        self, inline: InlineLocalizer, view: CommonView, micro_batches: tuple[MicroBatch, ...], hit: tuple[str, ...]
    ) -> None:
        spike = SpikedStep(self.step, view.norm, view.layer_norms, view.limits, hit)
        try:
            with self._remedies.suspended():
                finding = inline.explain(spike, micro_batches, self._grad_factor)
        except Exception as error:
            if _strict():
                raise
            self._complain("localize", error)  # and the step is published all the same
            return
        if finding is not None:
            self.findings.append(finding)
            if self.rank == 0:
                _log.warning("gradloc: step %d: %s", self.step, finding.summary)
        if inline.failure is not None:
            if _strict():
                raise inline.failure
            self._complain("localize", inline.failure)

    def _inline_localizer(self, model: torch.nn.Module, texts: Callable[[int], str] | None) -> InlineLocalizer:
        device = next((parameter.device for parameter in self._module.parameters()), torch.device("cpu"))
        inline = InlineLocalizer(
            model,
            self._module,
            rank=self.rank,
            world_size=self.world_size,
            device=device,
            texts=texts,
        )
        if inline.reason_off is not None:
            raise ValueError(f'localize="inline" cannot work here: {inline.reason_off}')
        return inline

    def _held_is_due(self, view: CommonView) -> bool:
        """Ever fewer of the steps in which something is held back are kept: they must not use up the run's quota."""
        if not view.num_positions_held or self.step < self._next_held_step:
            return False
        if view.ready:
            self._next_held_step = self.step + self._held_spacing
            self._held_spacing *= 2
        return True

    def _beyond_skip(self, view: CommonView) -> bool:
        if not math.isfinite(view.norm):
            return True
        return view.limits.norm is not None and view.norm > (self._skip_above or 1.0) * view.limits.norm

    def _take_snapshot(
        self,
        step: int,
        view: CommonView,
        micro_batches: tuple[MicroBatch, ...],
        weights: Literal["before-update", "after-update", "reference"],
        asked_step: int | None = None,
    ) -> None:
        assert self._writer is not None
        part = Order(
            step,
            host_batch(micro_batches),
            self._grad_factor,
            is_reference=weights == "reference",
            asked_step=asked_step,
        )
        if self.rank != 0 and not self._sharded:
            self._writer.write(part)
            return
        state: dict[str, torch.Tensor] | None = None
        tied: dict[str, str] = {}
        apart: dict[str, Any] = {}
        if self._weights_apart:
            apart = self._reference_to_weights() if self.rank == 0 else {}
        else:
            state, tied = host_copy(self._module)  # of sharded weights every rank gathers, rank 0 keeps
        if self.rank != 0:
            self._writer.write(part)
            return
        manifest = Manifest(
            run_id=self.run_id,
            attempt=self.attempt,
            step=step,
            created_at=time.time(),
            world_size=self.world_size,
            grad_norm=view.norm,
            layer_norms=view.layer_norms,
            limit=view.limits.norm,
            healthy_norm=view.limits.healthy_norm,
            healthy_layer_norms=view.limits.healthy_layers,
            rank_norms=() if self._sharded or view.num_positions_held else view.rank_norms,
            held_at=view.held_at,
            metrics=view.metrics,
            metrics_usual=_medians(self._metrics_before),
            weights="none" if self._weights_apart else weights,
            **apart,
            model_config_hf=self._record.config,
            architecture=self._record.architecture,
            model_factory=self._record.factory,
            tied_weights=tied,
            parameter_dtype=self._record.parameter_dtype,
            attention=self._record.attention,
            compute_dtype=self._record.compute_dtype,
            head=self.head,
            autocast_dtype=None if self.autocast_dtype is None else str(self.autocast_dtype).removeprefix("torch."),
            training_mode=self._module.training,
            versions={"gradloc": __version__, "torch": torch.__version__},
            parts=(),
        )
        self._writer.write(replace(part, manifest=manifest, weights=state, tokenizer_json=self._tokenizer_json))

    def _reference_to_weights(self) -> dict[str, Any]:
        """Where weights like these lie, and what tells whether they are these; of shards nothing tells."""
        place = self._checkpoint() if callable(self._checkpoint) else self._checkpoint
        own = {} if self._sharded else fingerprint_of(dict(self._module.named_parameters()))
        return {"weights_at": None if place is None else str(place), "weights_fingerprint": own}

    def _limits(self) -> Limits:
        published = self._publisher.limits if self._publisher is not None else None
        if published is not None and published.version >= self.step - LIMITS_AGE_MAX_STEPS:
            return published
        return rules.limits_of(self._rules)

    def _learn(self, view: CommonView) -> None:
        """The same rules as the detector's, so that a run without one is watched as well."""
        observation = rules.Observation(
            step=self.step,
            norm=view.norm,
            energy=view.total("energy") if view.num_tokens else None,
            layer_names=tuple(view.layer_norms),
            layer_norms_L=torch.tensor(list(view.layer_norms.values()), dtype=torch.float64).numpy(),
        )
        self._rules = rules.learn(self._rules, observation, rules.judge(self._rules, observation))

    def _take_wish(self) -> tuple[int, bool] | None:
        if self._publisher is None:
            return None
        wish, self._publisher.wish = self._publisher.wish, None
        return None if wish is None else (wish.step, wish.or_newest)

    def _kept_for_wish(self) -> _KeptStep | None:
        """The step of the ring that answers the wish: itself, or where it is gone and any will do the newest."""
        if self._wish is None or not self._ring:
            return None
        step, or_newest = self._wish
        if or_newest and step < self._ring[0].step:
            return self._ring[-1]
        return next((one for one in self._ring if one.step == step), None)

    def _thin_ring(self) -> None:
        """Pictures of the newest steps alone are kept, within what a step may keep."""
        left = self._inputs_bytes_max
        for index in reversed(range(len(self._ring))):
            kept = self._ring[index]
            left -= sum(one.inputs.num_bytes for one in kept.micro_batches if one.inputs is not None)
            if left < 0:
                reason = "its pictures were no longer kept when it was asked for; raise watch(model_inputs_bytes_max=)"
                thinned = tuple(
                    one if one.inputs is None or not one.inputs.tensors
                    else replace(one, inputs=one.inputs.without_tensors(reason))
                    for one in kept.micro_batches
                )  # fmt: skip
                self._ring[index] = replace(kept, micro_batches=thinned)

    def _keep_late(self, step: int) -> None:
        assert self._wish is not None
        kept = next(one for one in self._ring if one.step == step)
        asked = None if self._wish[0] == step else self._wish[0]
        self._take_snapshot(step, kept.view, kept.micro_batches, "after-update", asked)

    def _check_inputs_once(self) -> None:
        """Whether pictures can be told apart, said at the first of them: a spike would be too late. It waits for the
        device, so once."""
        newest = self._capture.newest
        if self._inputs_checked or newest is None or newest.inputs is None:
            return
        self._inputs_checked = True
        if newest.inputs.unusable is not None:
            raise ValueError(newest.inputs.unusable)
        newest.inputs.attributed(newest.ids_BT)

    # --- fallbacks ------------------------------------------------------------------------------

    def _before_update(self, *_: Any) -> None:
        if self._observed or self._closed:
            return
        if "late-observe" not in self._complained:
            self._complained.add("late-observe")
            _log.warning(
                "gradloc: probe.observe() was not called before optimizer.step(); "
                "norms are measured after any clipping. Call it after the last backward"
            )
        self.observe()

    def _after_update(self, *_: Any) -> None:
        self._observed = False

    def _publish(self, message: Message) -> None:
        if self._publisher is not None:
            self._publisher.put(message)

    def _complain(self, where: str, error: Exception) -> None:
        """One line a kind of failure, never a storm of them."""
        kind = f"{where}:{type(error).__name__}"
        if kind not in self._complained:
            self._complained.add(kind)
            _log.warning("gradloc: %s failed, training goes on: %s: %s", where, type(error).__name__, str(error)[:300])


def watch(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    run: str,
    attempt: int = 0,
    redis: str | None = None,
    bus: Bus | None = None,
    store: str | None = None,
    tokenizer: object | None = None,
    labels: dict[str, str] | None = None,
    reduction: Literal["mean", "sum"] = "mean",
    skip_above: float | None = None,
    model_factory: str | None = None,
    first_step: int = 0,
    remedies: Sequence[Remedy] = (),
    localize: Literal["inline"] | None = None,
    scaler: object | None = None,
    reference_after: int | None = FIRST_AFTER_STEPS,
    weights_bytes_max: int | None = WEIGHTS_BYTES_MAX,
    checkpoint: Callable[[], str | None] | str | None = None,
    model_inputs_bytes_max: int = BYTES_MAX,
) -> Probe:
    """Watch a training process; call it on every rank, after torch.distributed is initialised.

    run: name of the run ([A-Za-z0-9._-]); attempt: grows when training restarts from a checkpoint.
    redis: URL of the service's Redis, or `bus` for another bus; without either, only local rules judge.
    store: where snapshots go, any fsspec URL that trainer and localizer both reach. tokenizer: a
    `tokenizers.Tokenizer` or a fast Hugging Face tokenizer, so that findings name tokens. reduction:
    how gradients of ranks become the step's gradient ("mean" for DDP and FSDP). skip_above: skip the
    update when the norm exceeds this many times its limit, or is not finite (off by default).
    model_factory: "module:function" that rebuilds a model without a Hugging Face config. remedies: any of
    gradloc.clipping's TokenClip, SeqClip, LayerClip, RewardGuard (none by default; docs/remedies.md).
    localize: "inline" explains a spike in this process, on all ranks, for at most one step's time
    (probe.finding; docs/algorithm.md, "Inline mode"). scaler: fp16's torch.amp.GradScaler, whose scale
    is in dL/dlogp but no longer in the unscaled gradients. reference_after: with a store, an ordinary step
    is kept after so many healthy ones, and again whenever their number has doubled: what its replay
    deviates by is what a spike's replay may; None: never. weights_bytes_max: of a larger model snapshots hold no
    weights (None: always); checkpoint: then, where they lie or lay last, a folder in the Hugging Face layout as a URL,
    or a function that says so at the time (docs/protocol.md, "Snapshots"). model_inputs_bytes_max: of pictures and the
    like, what is kept of a rank's step, and as much again of the steps before it.

    Raises ValueError for arguments that cannot be meant (before training starts); never afterwards.
    """
    check_run_id(run)
    refuse(model, optimizer)
    if redis is not None and bus is not None:
        raise ValueError("both redis= and bus= are given; expected one of them")
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction is {reduction!r}; expected 'mean' (DDP, FSDP) or 'sum'")
    if skip_above is not None and not skip_above >= 1:
        raise ValueError(f"skip_above is {skip_above}; expected a factor of the limit, 1 or more")
    if localize not in (None, "inline"):
        raise ValueError(f"localize is {localize!r}; expected None or 'inline'")
    if scaler is not None and not callable(getattr(scaler, "get_scale", None)):
        raise ValueError(f"scaler is a {type(scaler).__name__}; expected a torch.amp.GradScaler")
    if weights_bytes_max is not None and not weights_bytes_max >= 0:
        raise ValueError(f"weights_bytes_max is {weights_bytes_max}; expected a number of bytes, or None")
    if not model_inputs_bytes_max >= 0:
        raise ValueError(f"model_inputs_bytes_max is {model_inputs_bytes_max}; expected a number of bytes, 0 or more")
    if reference_after is not None and not reference_after >= 1:
        raise ValueError(f"reference_after is {reference_after}; expected a number of steps, 1 or more, or None")
    return Probe(
        model,
        optimizer,
        run=run,
        attempt=attempt,
        bus=RedisBus(redis) if redis is not None else bus,
        store=Store(store) if store is not None else None,
        tokenizer_json=tokenizer_json_of(tokenizer),
        labels=dict(labels or {}),
        reduction=reduction,
        skip_above=skip_above,
        model_factory=model_factory,
        first_step=first_step,
        remedies=remedies,
        localize=localize,
        scaler=scaler,
        texts=texts_of(tokenizer),
        reference_after=reference_after,
        weights_bytes_max=weights_bytes_max,
        checkpoint=checkpoint,
        model_inputs_bytes_max=model_inputs_bytes_max,
    )


def _loss_scale(scaler: Any) -> float:
    return 1.0 if scaler is None else float(scaler.get_scale())


def _known_metrics(metrics: dict[str, float]) -> dict[str, float]:
    unknown = sorted(set(metrics) - set(METRICS))
    if unknown:
        raise ValueError(f"unknown metrics {unknown}; expected some of {list(METRICS)}")
    return {name: float(value) for name, value in metrics.items() if value is not None}


def _medians(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """Median of each metric over the rows that have it."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: statistics.median(row[name] for row in rows if name in row) for name in names}


def _collective_device() -> torch.device:
    backend = dist.get_backend()
    return torch.device("cuda", torch.cuda.current_device()) if "nccl" in backend else torch.device("cpu")


def _close_forgotten(reference: "weakref.ref[Probe]") -> None:
    """A loop that never called `close`: a thread still at work inside torch would abort the exiting interpreter."""
    probe = reference()
    if probe is not None:
        probe.close("process exit")


__all__ = ["Probe", "watch"]
