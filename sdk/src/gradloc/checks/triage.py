"""Triage of a training log: which branch of the decision tree, where to look next, which check to run.

The guide sends every device-side assert to the reward layer and every OOM to the gradient layer; both
are corrected: the assert's own text says whether an id or a probability was bad, and an OOM is a leak only
where memory grew. A cause found on one rank goes before its consequences on others (time-outs, dead ranks).
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from gradloc.checks.gradients import check_norms
from gradloc.checks.kinds import Layer
from gradloc.checks.log_series import SERIES, LogSeries
from gradloc.checks.log_shapes import Shape, collapse, plateau, saw_tooth
from gradloc_proto.codec import plain_number

Branch = Literal[
    "device-assert",
    "nan",
    "oom",
    "host-oom",
    "device-error",
    "nccl-timeout",
    "nccl-error",
    "hang",
    "rank-died",
    "device-mismatch",
    "shape-mismatch",
    "dtype-mismatch",
    "data-error",
    "disk-full",
    "collapse",
    "saw-tooth",
    "plateau",
    "spike",
    "stopped",
    "healthy",
    "unknown",
]
STEPS_MIN = 10  # fewer say nothing about a shape
MEMORY_GROWTH = 1.2
SILENCE = 10.0  # times the usual time between steps
SILENCE_MIN_S = 120.0


@dataclass(frozen=True)
class Triage:
    """branch: what happened; layer: where to look; why: what in the log says so; todo: next look; checks: commands."""

    branch: Branch
    layer: Layer | None
    why: str
    todo: str
    checks: tuple[str, ...]
    line: int | None = None
    step: int | None = None
    numbers: dict[str, float] = field(default_factory=dict)
    also: tuple[Branch, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "branch": self.branch,
            "layer": self.layer,
            "why": self.why,
            "todo": self.todo,
            "checks": list(self.checks),
            "line": self.line,
            "step": self.step,
            "numbers": {name: plain_number(value) for name, value in self.numbers.items()},
            "also": list(self.also),
        }


_DATA, _REWARD = "gradloc check data FILE --tokenizer T", "gradloc check reward FILE"
_POLICY, _GRADIENT = "gradloc check policy SNAPSHOT", "gradloc check gradient SNAPSHOT"
_OPTIMIZER, _LOCALIZE = "gradloc check optimizer BUNDLE", "gradloc localize SNAPSHOT"


def triage(log: LogSeries) -> Triage:
    """Decide. Never fails: a log that says nothing known is "unknown", with the reason."""
    found = [one for branch in _TREE if (one := branch(log)) is not None]
    if not found:
        return _unknown_or_healthy(log)
    first = found[0]
    others = tuple(dict.fromkeys(one.branch for one in found[1:] if one.branch != first.branch))
    return Triage(**{**first.__dict__, "also": others})


def _nan(log: LogSeries) -> Triage | None:
    """The first step with a number that is none; which numbers are none there says where it arose."""
    bad: dict[int, set[str]] = {}
    for meaning in SERIES:
        for step, value in log.values.get(meaning, ()):
            if not math.isfinite(value):
                bad.setdefault(step, set()).add(meaning)
                break
    signal = log.signals.get("anomaly") or log.signals.get("nan-error")
    if not bad:
        if signal is None:
            return None
        what = f"operation {signal.detail} gave NaN" if signal.detail else "an error names a NaN or infinity"
        layer: Layer = "gradient" if signal.detail else "policy"
        return Triage("nan", layer, what, "find the operation's input", (_GRADIENT, _POLICY), line=signal.line)
    step = min(bad)
    names = bad[step]
    shown = ", ".join(sorted(names))
    if names & {"reward", "reward_std"}:
        rest: tuple[Layer, str, tuple[str, ...]] = ("reward", "the reward itself", (_REWARD, _DATA))
    elif names & {"loss", "kl", "entropy", "value_loss"}:
        rest = ("policy", "logits, log() and exp() in the loss, KL before its exponential", (_POLICY, _DATA))
    elif "grad_norm" in names:
        rest = (
            "gradient",
            "the loss is finite: a NaN behind a mask, or an overflow in backward",
            (_GRADIENT, _LOCALIZE),
        )
    else:
        rest = ("optimizer", "the schedule", (_OPTIMIZER,))
    return Triage("nan", rest[0], f"{shown} not finite at step {step} first", f"look at {rest[1]}", rest[2], step=step)


def _assert(log: LogSeries) -> Triage | None:
    index = log.signals.get("assert-index")
    if index is not None:
        why, todo = "an index outside its table", "compare ids with the vocabulary and positions with the maximum"
        return Triage("device-assert", "data", why, todo, (_DATA,), line=index.line)
    probability = log.signals.get("assert-probability")
    if probability is not None:
        why = "sampling met a probability that is NaN, infinite or negative"
        todo = "logits of the rollout are not finite: look at the last update's norm, then at the weights"
        return Triage("device-assert", "policy", why, todo, (_POLICY, _GRADIENT), line=probability.line)
    plain = log.signals.get("assert")
    if plain is None:
        return None
    why = "a device-side assert whose text the log does not hold"
    todo = "run the step again with CUDA_LAUNCH_BLOCKING=1; ids outside the vocabulary are the usual cause"
    return Triage("device-assert", "data", why, todo, (_DATA, _REWARD), line=plain.line)


def _oom(log: LogSeries) -> Triage | None:
    generation, plain = log.signals.get("oom-generation"), log.signals.get("oom")
    if generation is not None:
        todo = "lower gpu_memory_utilization or the longest response; the trainer's share is taken first"
        return Triage("oom", "policy", "the rollout engine has no memory left", todo, (), line=generation.line)
    if plain is None:
        return None
    memory = [value for value in log.numbers("memory") if math.isfinite(value)]
    grown = len(memory) >= STEPS_MIN and memory[-1] > MEMORY_GROWTH * memory[0]
    if grown:
        why = f"device memory grew from {memory[0]:.4g} to {memory[-1]:.4g} over {len(memory)} steps, then ran out"
        todo = "something keeps graphs or tensors: name the holders"
        numbers = {"first": memory[0], "last": memory[-1]}
        return Triage("oom", "optimizer", why, todo, (_OPTIMIZER,), line=plain.line, numbers=numbers)
    if log.num_steps <= 1:
        todo = "it never fitted: smaller micro-batch, checkpointing, shorter responses"
        return Triage("oom", "data", "device memory ran out at the first step", todo, (_DATA,), line=plain.line)
    why = f"device memory ran out after {log.num_steps} steps without growth on record"
    todo = "the longest batch: true token lengths, then memory growth"
    return Triage("oom", "data", why, todo, (_DATA, _OPTIMIZER), line=plain.line)


def _host_oom(log: LogSeries) -> Triage | None:
    signal = log.signals.get("oom-host")
    if signal is None:
        return None
    todo = "host memory: loaders' workers, pinned buffers, offloaded optimizer; watch growth of live tensors"
    return Triage(
        "host-oom", "optimizer", "a process was killed for host memory", todo, (_OPTIMIZER,), line=signal.line
    )


def _collective(log: LogSeries) -> Triage | None:
    timeout, stuck = log.signals.get("collective-timeout"), log.signals.get("collective-stuck")
    signal = timeout or stuck
    if signal is None:
        return None
    todo = "the rank that is missing: who did not enter this collective? py-spy dump on each rank; look for a branch "
    todo += "that ranks take differently (empty batch, exception, save)"
    if timeout is not None:
        return Triage("nccl-timeout", "optimizer", "a collective timed out", todo, (_DATA,), line=signal.line)
    return Triage("hang", "optimizer", "the watchdog of collectives is stuck", todo, (_DATA,), line=signal.line)


def _plain_signals(log: LogSeries) -> Triage | None:
    device = log.signals.get("device-mismatch")
    if device is not None:
        todo = "print .device of every tensor of the batch and the loss; rewards made on the host are the usual one"
        why = "tensors of one operation lie on several devices"
        return Triage("device-mismatch", "data", why, todo, (_DATA,), line=device.line)
    shape = log.signals.get("shape-mismatch")
    if shape is not None:
        todo = "shapes of ids, masks and logp where the batch is made"
        return Triage("shape-mismatch", "data", "shapes do not fit", todo, (_DATA,), line=shape.line)
    dtype = log.signals.get("dtype-mismatch")
    if dtype is not None:
        todo = "formats of adapters, base and autocast; fill values of masks"
        return Triage("dtype-mismatch", "policy", "number formats do not fit", todo, (_POLICY,), line=dtype.line)
    data = log.signals.get("data-error")
    if data is not None:
        todo = "the named row or field"
        return Triage("data-error", "data", "the data could not be read", todo, (_DATA,), line=data.line)
    disk = log.signals.get("disk-full")
    if disk is not None:
        todo = "free the disk; then check that the last checkpoint is whole"
        return Triage("disk-full", None, "the disk is full", todo, (), line=disk.line)
    return None


def _collective_error(log: LogSeries) -> Triage | None:
    signal = log.signals.get("collective-error")
    if signal is None:
        return None
    todo = "NCCL_DEBUG=INFO names the call: network interface (NCCL_SOCKET_IFNAME), /dev/shm, versions on all nodes"
    return Triage("nccl-error", "optimizer", "a collective failed, not timed out", todo, (), line=signal.line)


def _device_error(log: LogSeries) -> Triage | None:
    signal = log.signals.get("device-error")
    if signal is None:
        return None
    todo = "run again with CUDA_LAUNCH_BLOCKING=1: the traceback names a later call. The same kernel each time is its "
    todo += "bug or an index; other places each time, or an Xid in the kernel's log, is the card"
    why = "a kernel failed on the device; the log does not say why"
    return Triage("device-error", None, why, todo, (_DATA,), line=signal.line)


def _rank_died(log: LogSeries) -> Triage | None:
    signal = log.signals.get("rank-died")
    if signal is None:
        return None
    todo = "this log shows only the consequence: read the log of the rank that died first (torchrun --log-dir, Ray's "
    todo += "worker logs), and triage that"
    return Triage("rank-died", None, "a process died; the log does not say why", todo, (), line=signal.line)


def _silence(log: LogSeries) -> Triage | None:
    """Other lines went on long after the last step."""
    times = log.step_seconds
    if len(times) < 3 or log.last_second is None or log.num_exceptions:
        return None
    gaps = sorted(b - a for a, b in itertools.pairwise(times))
    usual, silent = gaps[len(gaps) // 2], log.last_second - times[-1]
    if silent < SILENCE_MIN_S or silent < SILENCE * max(usual, 1.0):
        return None
    why = f"no step for {silent:,.0f} s; one took {usual:,.0f} s before"
    numbers = {"silent_s": silent, "usual_s": usual}
    todo = "py-spy dump of each rank; collectives that one rank did not enter; a rollout without end"
    return Triage("hang", "optimizer", why, todo, (_DATA,), line=log.step_lines[-1], numbers=numbers)


def _shape(
    log: LogSeries, meaning: str, look: Callable[[list[float]], Shape | None], branch: Branch, layer: Layer, todo: str
) -> Triage | None:
    points = [(step, value) for step, value in log.values.get(meaning, ()) if math.isfinite(value)]
    if len(points) < STEPS_MIN:
        return None
    shape = look([value for _, value in points])
    if shape is None:
        return None
    numbers = ", ".join(f"{name} {value:.4g}" for name, value in shape.numbers.items())
    step = points[min(shape.since, len(points) - 1)][0]
    checks = {"reward": (_REWARD, _DATA), "policy": (_POLICY, _GRADIENT), "gradient": (_GRADIENT, _LOCALIZE)}
    return Triage(branch, layer, f"{meaning}: {numbers}", todo, checks.get(layer, ()), step=step, numbers=shape.numbers)


def _no_gradient(log: LogSeries) -> Triage | None:
    """The gradient is zero while rewards differ: they do not reach it."""
    points = log.values.get("grad_norm", [])
    since = len(points)
    while since and points[since - 1][1] == 0.0:
        since -= 1
    num = len(points) - since
    spread, means = log.numbers("reward_std")[-num:], log.numbers("reward")[-num:]
    # Rewards that stand still as well are a plateau of theirs.
    if num < STEPS_MIN or len(set(means)) < 2 or (spread and not any(value > 0 for value in spread)):
        return None
    why = f"gradient norm 0 at {num} steps while rewards differ"
    todo = (
        "what lies between reward and gradient: advantages, loss mask, detach(), a learning rate of 0, frozen weights"
    )
    return Triage("plateau", "gradient", why, todo, (_POLICY, _GRADIENT), step=points[since][0])


def _stopped(log: LogSeries) -> Triage | None:
    signal = log.signals.get("stopped")
    if signal is None:
        return None
    why = "stopped from outside: a time limit, a preemption or a person; nothing else is wrong in it"
    return Triage("stopped", None, why, "start it again from its last checkpoint", (), line=signal.line)


def _collapse(log: LogSeries) -> Triage | None:
    todo = "the step where it fell: norm and ratios there, then samples by hand"
    return _shape(log, "reward", collapse, "collapse", "policy", todo)


def _saw_tooth(log: LogSeries) -> Triage | None:
    todo = "parts of the loss are not balanced: loss parts, KL coefficient, learning rate"
    return _shape(log, "loss", saw_tooth, "saw-tooth", "policy", todo)


def _plateau(log: LogSeries) -> Triage | None:
    todo = "a reward that does not move: parser, reward model, groups without variance"
    found = _shape(log, "reward", plateau, "plateau", "reward", todo)
    # GRPO's loss is 0 by construction where the ratio is 1; only with the gradient does that mean anything.
    moving = any(value != 0 for value in log.numbers("grad_norm")[-STEPS_MIN:])
    return found or (None if moving else _shape(log, "loss", plateau, "plateau", "reward", todo))


def _spike(log: LogSeries) -> Triage | None:
    points = [(step, value) for step, value in log.values.get("grad_norm", ()) if math.isfinite(value)]
    for one in check_norms([value for _, value in points]):
        if one.code == "gradient.spike":
            step = points[int(one.where["step"])][0]
            todo = "localize that step from its snapshot"
            why = f"gradient norm {one.numbers['norm']:.4g} at step {step}"
            return Triage("spike", "gradient", why, todo, (_LOCALIZE, _GRADIENT), step=step, numbers=dict(one.numbers))
    return None


def _unknown_or_healthy(log: LogSeries) -> Triage:
    if log.last_exception is not None:
        why = f"ends in {log.last_exception.detail}, which no branch knows"
        todo = "read the traceback's last own frame"
        return Triage("unknown", None, why, todo, ("gradloc doctor RUN_FOLDER",), line=log.last_exception.line)
    if log.num_steps == 0:
        why = f"none of its {log.num_lines:,} lines is a step or an error in a known format"
        todo = "give the trainer's console log, trainer_state.json, or a CSV with step,loss,grad_norm,reward"
        return Triage("unknown", None, why, todo, ())
    if log.num_steps < STEPS_MIN:
        why = f"{log.num_steps} steps without an error: too few to see a shape"
        return Triage("unknown", None, why, "give a longer log", ())
    known = ", ".join(meaning for meaning in SERIES if meaning in log.values)
    why = f"{log.num_steps:,} steps of {known}: finite, no error, no spike, plateau, saw-tooth or collapse"
    return Triage("healthy", None, why, "nothing", ())


def _nan_before_crash(log: LogSeries) -> Triage | None:
    """Numbers that were none while steps went on came before whatever ended the log."""
    found = _nan(log)
    return found if found is not None and found.line is None else None


# In this order: causes before their consequences, certain ones before shapes of curves.
_TREE: tuple[Callable[[LogSeries], Triage | None], ...] = (
    _nan_before_crash,
    _assert,
    _oom,
    _host_oom,
    _nan,
    _plain_signals,
    _device_error,
    _collective,
    _collective_error,
    _rank_died,
    _silence,
    _collapse,
    _saw_tooth,
    _no_gradient,
    _plateau,
    _spike,
    _stopped,
)
