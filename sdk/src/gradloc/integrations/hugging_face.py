"""gradloc in a Hugging Face `Trainer`, and in every trainer of TRL, which are such trainers.

    from gradloc.integrations.hugging_face import attach
    attach(trainer, run="my-run", store="file:///data/gradloc")
    trainer.train()

Nothing is subclassed. A forward hook on the model sees the log-probabilities that the loss will use (TRL's
fused head gives them), or the logits, of which they are computed; `trainer.compute_loss` is wrapped on the
instance to know the batch, `trainer.accelerator.clip_grad_norm_` to measure before clipping (a callback comes
after it). What goes wrong in here is one log line, never an exception in the training loop.
Shapes: B rows, T positions, R = T - 1 positions with a logp, C of a completion, V vocabulary.
"""

import inspect
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from gradloc.integrations.from_logits import CoefficientsFromLogits, standing_in
from gradloc.integrations.harmless import Harmless
from gradloc.integrations.tracking import Tracking
from gradloc.model_inputs import RESERVED
from gradloc.model_record import tokenizer_json_of, unwrapped
from gradloc.probe import Probe, watch
from gradloc_proto.identities import check_run_id
from gradloc_proto.messages import Finding

IGNORED_LABEL = -100  # of torch's cross-entropy and of all of Hugging Face
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
_HASH_FACTOR = 6_364_136_223_846_793_005  # Knuth's, of MMIX


def attach(trainer: Any, *, run: str, **watch_arguments: Any) -> "Attachment":
    """Watch `trainer`; call it before `trainer.train()`, on every rank.

    run and watch_arguments are those of `gradloc.watch` (redis, store, localize, skip_above, ...). The tokenizer is
    the trainer's own unless given; attempt is counted by torchrun's restarts unless given.
    Raises ValueError for what cannot be meant or does not work, before training starts.
    """
    return Attachment(trainer, run, watch_arguments)


class Attachment:
    """One trainer being watched. probe: made when training starts, kept when it has ended."""

    def __init__(self, trainer: Any, run: str, watch_arguments: Mapping[str, Any]) -> None:
        check_run_id(run)
        refuse(trainer)
        self.probe: Probe | None = None
        self._trainer = trainer
        self._run = run
        self._arguments = dict(watch_arguments)
        self._tracking = Tracking(trainer)
        self._inputs: Mapping[str, Any] | None = None  # of the loss that is being computed
        self._losses: list[Tensor] = []
        self._observed = False
        self._unharmed = Harmless()
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._head_logits: Tensor | None = None  # of the forward pass in progress
        trainer.add_callback(_Callback(self))
        self._wrap()

    @property
    def finding(self) -> Finding | None:
        """What inline mode found at the last spike that it explained."""
        return None if self.probe is None else self.probe.finding

    def close(self, reason: str = "finished") -> None:
        """Finish what is being written; idempotent. Training that ends by itself does so too."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self.probe is not None:
            self.probe.close(reason)

    # --- what the trainer calls ----------------------------------------------------------------

    def _wrap(self) -> None:
        trainer, accelerator = self._trainer, self._trainer.accelerator
        compute_loss, training_step, log = trainer.compute_loss, trainer.training_step, trainer.log
        clip = accelerator.clip_grad_norm_
        unscale = accelerator.unscale_gradients

        def watched_compute_loss(model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            # A copy: the trainer takes labels out of its own.
            self._inputs = dict(inputs) if isinstance(inputs, Mapping) else {}
            try:
                return compute_loss(model, inputs, *args, **kwargs)
            finally:
                self._inputs = self._head_logits = None

        def watched_training_step(*args: Any, **kwargs: Any) -> Any:
            loss = training_step(*args, **kwargs)
            if isinstance(loss, Tensor):
                self._losses.append(loss.detach())
            return loss

        def watched_unscale(*args: Any, **kwargs: Any) -> Any:
            result = unscale(*args, **kwargs)
            if getattr(accelerator, "scaler", None) is not None:
                self.observe()
            return result

        def watched_clip(*args: Any, **kwargs: Any) -> Any:
            if getattr(accelerator, "scaler", None) is None:  # fp16's gradients are unscaled in there
                self.observe()
            return clip(*args, **kwargs)

        def watched_log(logs: dict[str, float], *args: Any, **kwargs: Any) -> Any:
            with self._unharmed("log"):
                if self.probe is not None and "loss" in logs:
                    logs.update(self._tracking.scalars())
            return log(logs, *args, **kwargs)

        trainer.compute_loss, trainer.training_step, trainer.log = (
            watched_compute_loss,
            watched_training_step,
            watched_log,
        )
        accelerator.clip_grad_norm_, accelerator.unscale_gradients = watched_clip, watched_unscale

    def start(self) -> None:
        """Training starts: model and process group are as they stay. Raises ValueError of `watch`."""
        refuse(self._trainer)
        trainer, arguments = self._trainer, dict(self._arguments)
        arguments.setdefault("tokenizer", _fast_tokenizer(trainer))
        arguments.setdefault("attempt", int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")))
        arguments.setdefault("scaler", getattr(trainer.accelerator, "scaler", None))
        arguments.setdefault("first_step", trainer.state.global_step)
        page = self._tracking.page()
        if page is not None:
            arguments["labels"] = {"page": page} | dict(arguments.get("labels") or {})
        self.probe = watch(trainer.model, run=self._run, **arguments)
        # The model's own forward enters autocast, out of a hook's sight.
        self.probe.autocast_dtype = _AUTOCAST.get(trainer.accelerator.mixed_precision)
        if not self._hooks:
            module = unwrapped(trainer.model)
            self._hooks.append(module.register_forward_hook(self._saw_forward, with_kwargs=True))
            head = getattr(module, "get_output_embeddings", lambda: None)()
            if isinstance(head, nn.Module) and self.probe.autocast_dtype is not None:
                self._hooks.append(head.register_forward_hook(self._saw_head))

    def observe(self) -> None:
        """Measure the step, once: gradients are whole, unscaled and not clipped."""
        if self._observed or self.probe is None:
            return
        self._observed = True
        metrics: dict[str, float] = {}
        with self._unharmed("metrics"):
            metrics = self.metrics()
        self._losses.clear()
        num_findings = len(self.probe.findings)
        decision = self.probe.observe(step=None, **metrics)
        with self._unharmed("tracking"):
            self._tracking.saw(self.probe, decision)
            if len(self.probe.findings) > num_findings and self.probe.rank == 0:
                self._tracking.found(self.probe.findings[-1])

    def step_ended(self) -> None:
        self._observed = False

    # --- what is known of a step ----------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        """Of the step that ends, in the words of `Probe.observe`."""
        found = {"lr": float(self._trainer.optimizer.param_groups[0]["lr"])}
        if self._losses:
            found["loss"] = float(torch.stack(self._losses).sum())
        return found

    def temperature(self) -> float:
        """What logits are divided by in the loss."""
        return 1.0

    def row_facts(self, inputs: Mapping[str, Any], logp_BR: Tensor, mask_BR: Tensor) -> dict[str, Any]:
        """Further arguments of `Probe.tokens`, and `mask` where it is narrower than the labels say."""
        return {}

    # --- the model's forward pass ---------------------------------------------------------------

    def _saw_head(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        # Under mixed precision the model returns a wider copy of its logits, which its loss never saw.
        if self._inputs is not None and isinstance(output, Tensor) and output.requires_grad:
            self._head_logits = output

    def _saw_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self._inputs is None or self.probe is None or not module.training or not torch.is_grad_enabled():
            return
        with self._unharmed("forward"):
            ids_BT = kwargs.get("input_ids", args[0] if args else None)
            labels_BT = kwargs.get("labels", self._inputs.get("labels"))
            if not isinstance(ids_BT, Tensor) or not isinstance(labels_BT, Tensor):
                raise ValueError("a forward pass without input_ids or labels; expected a causal language model's")
            if kwargs.get("shift_labels") is not None:
                raise ValueError("context or sequence parallelism, which is not supported; expected whole rows")
            mask_BR = labels_BT[:, 1:] != IGNORED_LABEL
            known: dict[str, Any] = {name: kwargs.get(name) for name in ("attention_mask", "position_ids")}
            known["model_inputs"] = _further(module, kwargs)
            if getattr(output, "log_probs", None) is not None:
                logp_BR, entropy_BR = output.log_probs, getattr(output, "entropy", None)
                if logp_BR.shape != mask_BR.shape:
                    raise ValueError(
                        f"log-probabilities have shape {tuple(logp_BR.shape)}, labels {tuple(mask_BR.shape)}; "
                        "virtual tokens of prompt learning are not supported"
                    )
                facts = self.row_facts(self._inputs, logp_BR, mask_BR)
                if isinstance(entropy_BR, Tensor) and entropy_BR.requires_grad:
                    facts["entropy"] = standing_in(entropy_BR, mask_BR)
                logp_BR = standing_in(logp_BR, mask_BR)
                self.probe.head = "wide"
                self._tokens(logp_BR, ids_BT, facts.pop("mask", mask_BR), **known, **facts)
            elif getattr(output, "logits", None) is not None:
                changes = bool(self._arguments.get("remedies"))
                head, self._head_logits = self._head_logits, None
                fits = head is not None and head.shape == output.logits.shape
                logits = head if fits and head is not None else output.logits
                capture = CoefficientsFromLogits(logits, labels_BT, mask_BR, changes=changes)
                facts = self.row_facts(self._inputs, capture.logp_BR, mask_BR)
                self._tokens(capture.logp_BR, ids_BT, facts.pop("mask", mask_BR), **known, **facts)
            else:
                raise ValueError(f"{type(module).__name__} returns neither log_probs nor logits (a fused loss?)")

    def _tokens(self, logp_BR: Tensor, ids_BT: Tensor, mask_BR: Tensor, **facts: Any) -> None:
        assert self.probe is not None
        self.probe.tokens(logp_BR, ids_BT, mask_BR, temperature=self.temperature(), **facts)


class _Callback(TrainerCallback):
    """Tells an attachment where training stands."""

    def __init__(self, attachment: Attachment) -> None:
        self._attachment = attachment

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._attachment.start()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._attachment.observe()  # where nothing was clipped

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._attachment.step_ended()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._attachment.close()


def _further(module: nn.Module, kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
    """What the model was called with beside ids and masks, and has a name for: pictures and what tells of them."""
    named = inspect.signature(module.forward).parameters
    return {
        name: value
        for name, value in kwargs.items()
        if name in named and name not in RESERVED | {"position_ids"} and isinstance(value, Tensor) and value.dim()
    }


def refuse(trainer: Any) -> None:
    """Raises ValueError that names what does not work."""
    accelerator = getattr(trainer, "accelerator", None)
    if accelerator is None or not hasattr(trainer, "compute_loss"):
        raise ValueError(f"trainer is a {type(trainer).__name__}; expected a transformers.Trainer or one of TRL's")
    kind = str(getattr(accelerator, "distributed_type", "")).rsplit(".", 1)[-1]
    if getattr(trainer, "is_deepspeed_enabled", False) or kind == "DEEPSPEED":
        raise ValueError(
            "DeepSpeed keeps gradients in partitions of its own and clips inside engine.step(), so they cannot be "
            "measured before clipping; expected DDP or FSDP2 (docs/trainers.md, DeepSpeed)"
        )
    if kind == "MEGATRON_LM":
        raise ValueError("Megatron-LM's distributed optimizer is not supported; expected DDP or FSDP2")
    if getattr(trainer, "is_fsdp_enabled", False) and not getattr(accelerator, "is_fsdp2", False):
        raise ValueError("FSDP1's flat parameters have no layers to measure; expected fsdp_version: 2")
    if getattr(trainer.args, "n_gpu", 1) > 1:
        raise ValueError("nn.DataParallel replicates the model at every step; start one process a GPU by torchrun")
    if getattr(trainer.args, "use_liger_kernel", False) and not hasattr(trainer, "_metrics"):
        raise ValueError("Liger's fused linear cross-entropy leaves no logits; expected use_liger_kernel=False")


def prompt_names(prompt_ids_BT: Tensor, prompt_mask_BT: Tensor) -> list[str]:
    """One name a row, alike for rows with the same prompt: no dataset row is known to a trainer's batch."""
    width = prompt_ids_BT.shape[1]
    power = torch.full((width,), _HASH_FACTOR, dtype=torch.int64, device=prompt_ids_BT.device).cumprod(0).flip(0)
    hashed = ((prompt_ids_BT.long() + 1) * prompt_mask_BT.long() * power).sum(dim=1)  # wraps around, as it should
    return [f"prompt-{value & 0xFFFFFFFF:08x}" for value in hashed.tolist()]


def left_padded(values_BC: Tensor, width: int, fill: float) -> Tensor:
    """Values of a completion [B, C] as of the row's last `width` positions [B, R]."""
    return torch.nn.functional.pad(values_BC, (width - values_BC.shape[1], 0), value=fill)


def _fast_tokenizer(trainer: Any) -> object | None:
    processing = getattr(trainer, "processing_class", None)
    tokenizer = getattr(processing, "tokenizer", processing)
    try:
        tokenizer_json_of(tokenizer)
    except ValueError:
        return None  # a slow one, or a processor of pictures: findings then name ids only
    return tokenizer


__all__: Sequence[str] = ["Attachment", "attach"]
