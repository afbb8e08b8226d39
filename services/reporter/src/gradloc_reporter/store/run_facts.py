"""What messages say of runs, as rows: runs, steps, snapshots, limits, gaps.

Every function gives the same rows whatever the order and however often the messages arrive.
"""

import json
from typing import Any

from sqlalchemy.orm import Session

from gradloc_proto.messages import (
    LimitsChanged,
    RunEnded,
    RunStarted,
    SnapshotCommitted,
    SnapshotFailed,
    StepObserved,
    StreamGapNoticed,
)
from gradloc_reporter.store.rows import get_or_insert, insert_if_new, insert_new
from gradloc_reporter.store.tables import EventRow, RunRow, SnapshotRow, StepRow


def run_row(session: Session, run_id: str) -> RunRow:
    return get_or_insert(session, RunRow, run_id, {"run_id": run_id})


def run_started(session: Session, message: RunStarted) -> None:
    run = run_row(session, message.run_id)
    if run.started_at is not None and message.attempt < run.attempt:
        return
    run.attempt = message.attempt
    run.framework = message.framework
    run.world_size = message.world_size
    run.model = message.model
    run.num_parameters = message.num_parameters
    run.labels_json = json.dumps(message.labels, sort_keys=True)
    run.team = message.labels.get("team")
    run.started_at = message.ts


def run_ended(session: Session, message: RunEnded) -> None:
    run = run_row(session, message.run_id)
    run.num_events_dropped = max(run.num_events_dropped, message.num_events_dropped)
    if run.ended_attempt is not None and message.attempt < run.ended_attempt:
        return
    run.ended_attempt = message.attempt
    run.ended_at = message.ts
    run.end_reason = message.reason


def limits_changed(session: Session, message: LimitsChanged) -> None:
    run = run_row(session, message.run_id)
    limits = message.limits
    if (message.attempt, limits.version) < (run.limits_attempt, run.limits_version):
        return
    run.limits_attempt = message.attempt
    run.limits_version = limits.version
    run.healthy_norm = limits.healthy_norm
    run.norm_limit = limits.norm


def steps_observed(session: Session, messages: list[StepObserved]) -> None:
    """Many steps at once: one insert, and one update of each run's last step."""
    insert_new(session, StepRow, [_step_values(message) for message in messages])
    newest: dict[str, StepObserved] = {}
    for message in messages:
        known = newest.get(message.run_id)
        if known is None or (message.attempt, message.step) > (known.attempt, known.step):
            newest[message.run_id] = message
    for run_id, message in newest.items():
        run = run_row(session, run_id)
        dropped = max(each.num_events_dropped for each in messages if each.run_id == run_id)
        run.num_events_dropped = max(run.num_events_dropped, dropped)
        if run.last_step is None or (message.attempt, message.step) > (run.last_attempt, run.last_step):
            run.last_attempt = message.attempt
            run.last_step = message.step
            run.last_step_at = message.ts
            run.last_norm = message.grad_norm
            run.last_limit = message.limit


def _step_values(message: StepObserved) -> dict[str, Any]:
    return {
        "run_id": message.run_id,
        "attempt": message.attempt,
        "step": message.step,
        "ts": message.ts,
        "grad_norm": message.grad_norm,
        "limit": message.limit,
        "loss": message.loss,
        "reward_mean": message.reward_mean,
        "ratio_max": message.ratio_max,
        "ratio_min": message.ratio_min,
        "kl": message.kl,
        "entropy": message.entropy,
        "lr": message.lr,
        "step_s": message.step_s,
        "stall_s": message.stall_s,
        "num_tokens": message.num_tokens,
        "decision": message.decision,
        "rules_hit": ",".join(message.rules_hit),
    }


def snapshot_told(session: Session, message: SnapshotCommitted | SnapshotFailed) -> None:
    values: dict[str, Any] = {
        "message_key": message.key(),
        "run_id": message.run_id,
        "attempt": message.attempt,
        "step": message.step,
        "ts": message.ts,
        "path": None,
        "num_bytes": None,
        "weights": None,
        "failure": None,
    }
    if isinstance(message, SnapshotCommitted):
        values |= {"path": message.path, "num_bytes": message.num_bytes, "weights": message.weights}
        if message.asked_step is not None:  # it is that spike's, though of a later step
            values["step"] = message.asked_step
    else:
        values |= {"failure": message.reason}
    insert_new(session, SnapshotRow, [values])


def gap_noticed(session: Session, message: StreamGapNoticed) -> None:
    detail = {"first_step": message.first_step, "last_step": message.last_step, "reason": message.reason}
    add_event(session, message.key(), message.run_id, None, message.ts, message.type, detail)


def add_event(
    session: Session, key: str, run_id: str, incident_id: str | None, ts: float, kind: str, detail: dict[str, Any]
) -> bool:
    """Log what happened, once a key. Says whether it was new."""
    values = {
        "message_key": key,
        "run_id": run_id,
        "incident_id": incident_id,
        "ts": ts,
        "kind": kind,
        "detail_json": json.dumps(detail, sort_keys=True),
    }
    return insert_if_new(session, EventRow, values)
