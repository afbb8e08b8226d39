"""Rollback: after a spike, back to the last healthy checkpoint, and what to leave out on the way again.

    rollback = Rollback(on_rollback=restart, audit_path="rollbacks.jsonl")
    ... rollback.checkpoint_saved(step, path) ... rollback.step_observed(step, decision) ...
    rollback.propose(spike_step, reason=..., skip_uids=...)

Off unless a trainer builds one; it restarts nothing itself but calls back with a plan. The model is
PaLM's (Chowdhery et al. 2022, section 5.1): restart about a hundred steps earlier and leave out a few
hundred batches around the spike. They saw that the same batches do not spike from other weights; a plan
says whether that is so here, when the trainer can measure it. Knows no tensor.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from gradloc import audit

CHECKPOINTS_MAX = 64  # older ones are of no use to anybody
BAD_STEPS_MAX = 4_096


@dataclass(frozen=True)
class Checkpoint:
    step: int  # of the next update to be made from it
    path: str


@dataclass(frozen=True)
class RollbackPlan:
    """What to do. Batches of steps skip_first..skip_last are left out when training comes by again."""

    checkpoint: Checkpoint
    spike_step: int
    skip_first: int
    skip_last: int
    skip_uids: tuple[str, ...]
    reason: str
    limit: float | None = None
    norm_from_checkpoint: float | None = None  # of the culprit's batch, with the checkpoint's weights

    @property
    def spikes_from_checkpoint(self) -> bool | None:
        """Whether the culprit's batch spikes from the earlier weights too; None: not measured."""
        if self.norm_from_checkpoint is None or self.limit is None:
            return None
        return not self.norm_from_checkpoint <= self.limit  # a NaN is a spike

    @property
    def summary(self) -> str:
        """One sentence for people and for the audit."""
        text = (
            f"back from step {self.spike_step} to the checkpoint of step {self.checkpoint.step}, "
            f"leaving out the batches of steps {self.skip_first} to {self.skip_last}"
        )
        if self.skip_uids:
            text += f" and {len(self.skip_uids)} samples"
        if self.spikes_from_checkpoint is None:
            return text + "; whether the culprit spikes from the earlier weights was not measured"
        compared = f"norm {self.norm_from_checkpoint:.3g}, limit {self.limit:.3g}"
        if self.spikes_from_checkpoint:
            return text + f"; the culprit spikes from the earlier weights too ({compared}): the data is at fault"
        return text + (
            f"; the culprit does not spike from the earlier weights ({compared}): "
            "data and weights did it together, and leaving the sample out for good is not called for"
        )


class Rollback:
    """Plans rollbacks of one run and calls `on_rollback`, at most `rollbacks_max` times.

    num_healthy_steps: a checkpoint is healthy when so many steps before it were. skip_before, skip_after:
    batches around the spike to leave out, in steps; those before the checkpoint are not seen again anyway.
    """

    def __init__(
        self,
        on_rollback: Callable[[RollbackPlan], None],
        *,
        audit_path: str | Path,
        num_healthy_steps: int = 20,
        skip_before: int = 10,
        skip_after: int = 10,
        rollbacks_max: int = 3,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if min(num_healthy_steps, skip_before, skip_after) < 0 or rollbacks_max < 1:
            raise ValueError("Rollback: steps must not be negative and rollbacks_max must be at least 1")
        self._on_rollback = on_rollback
        self._audit_path = Path(audit_path)
        self._num_healthy_steps = num_healthy_steps
        self._skip_before, self._skip_after = skip_before, skip_after
        self._rollbacks_max = rollbacks_max
        self._clock = clock
        self._checkpoints: list[Checkpoint] = []
        self._bad_steps: list[int] = []
        self.num_rollbacks = 0

    def checkpoint_saved(self, step: int, path: str) -> None:
        self._checkpoints = [one for one in self._checkpoints if one.step != step][-(CHECKPOINTS_MAX - 1) :]
        self._checkpoints.append(Checkpoint(step, path))

    def step_observed(self, step: int, decision: str) -> None:
        """Tell what `probe.observe` decided; anything but "go" makes the step a bad one."""
        if decision != "go":
            self._bad_steps = [*self._bad_steps[-(BAD_STEPS_MAX - 1) :], step]

    def last_healthy(self, before: int) -> Checkpoint | None:
        """The newest checkpoint up to step `before` with healthy steps behind it."""
        return last_healthy(self._checkpoints, self._bad_steps, before, self._num_healthy_steps)

    def propose(
        self,
        spike_step: int,
        *,
        reason: str,
        skip_uids: Sequence[object] = (),
        limit: float | None = None,
        norm_from: Callable[[Checkpoint], float] | None = None,
    ) -> RollbackPlan | None:
        """Plan, record, call back; the plan, or None (recorded too) without a healthy checkpoint or beyond the limit.

        norm_from measures the norm of the spike's batch with a checkpoint's weights and the trainer's own
        loss; where it fails the plan says "not measured". What `on_rollback` raises is the caller's.
        """
        if self.num_rollbacks >= self._rollbacks_max:
            self._record("refused", spike_step, f"{self._rollbacks_max} rollbacks were made already; a human must look")
            return None
        checkpoint = self.last_healthy(spike_step)
        if checkpoint is None:
            self._record("refused", spike_step, "no healthy checkpoint is known from before the spike")
            return None
        plan = RollbackPlan(
            checkpoint=checkpoint,
            spike_step=spike_step,
            skip_first=max(checkpoint.step, spike_step - self._skip_before),
            skip_last=spike_step + self._skip_after,
            skip_uids=tuple(str(uid) for uid in skip_uids),
            reason=reason,
            limit=limit,
            norm_from_checkpoint=_measured(norm_from, checkpoint),
        )
        self.num_rollbacks += 1
        self._record("proposed", spike_step, plan.summary, plan)
        # What happened after the checkpoint is undone: it must not count against later checkpoints.
        self._checkpoints = [one for one in self._checkpoints if one.step <= checkpoint.step]
        self._bad_steps = [step for step in self._bad_steps if step < checkpoint.step]
        self._on_rollback(plan)
        return plan

    def _record(self, action: str, spike_step: int, text: str, plan: RollbackPlan | None = None) -> None:
        record: dict[str, object] = {"action": action, "ts": self._clock(), "spike_step": spike_step, "text": text}
        if plan is not None:
            norm = plan.norm_from_checkpoint
            details = asdict(plan) | {
                "skip_uids": list(plan.skip_uids)[:100],
                "norm_from_checkpoint": repr(norm) if norm is not None and not math.isfinite(norm) else norm,
                "spikes_from_checkpoint": plan.spikes_from_checkpoint,
            }
            record["plan"] = details
        audit.append(self._audit_path, record)


def last_healthy(
    checkpoints: Sequence[Checkpoint], bad_steps: Sequence[int], before: int, num_healthy_steps: int
) -> Checkpoint | None:
    """The newest checkpoint of step <= `before` whose last `num_healthy_steps` updates were all healthy. Pure."""
    candidates = [
        one
        for one in checkpoints
        if one.step <= before and not any(one.step - num_healthy_steps <= bad < one.step for bad in bad_steps)
    ]
    return max(candidates, key=lambda one: one.step, default=None)


def _measured(norm_from: Callable[[Checkpoint], float] | None, checkpoint: Checkpoint) -> float | None:
    if norm_from is None:
        return None
    try:
        return float(norm_from(checkpoint))
    except Exception:  # noqa: BLE001 - a measurement that fails must not stop the rescue
        return None
