"""What messages say of runs, as rows: runs, steps, snapshots, limits, gaps.

Every function gives the same rows whatever the order and however often the messages arrive.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson
from sqlalchemy import and_, delete, or_, select, update
from sqlalchemy.orm import Session

from gradloc_proto.messages import (
    LimitsChanged,
    OverrideSet,
    RunEnded,
    RunStarted,
    SnapshotCommitted,
    SnapshotFailed,
    StepObserved,
    StreamGapNoticed,
)
from gradloc_reporter.store.rows import chunks, insert_if_new, insert_known_new, insert_new
from gradloc_reporter.store.tables import EventRow, LayerWindowRow, RunRow, SnapshotRow, StepRow


def run_row(session: Session, run_id: str) -> RunRow:
    """The run's row, locked for this transaction."""
    return runs_locked(session, [run_id])[run_id]


def runs_locked(session: Session, run_ids: Iterable[str]) -> dict[str, RunRow]:
    """Rows of many runs in one read, made where they are new; they stay locked until the transaction ends."""
    known: dict[str, RunRow] = session.info.setdefault("runs", {})
    wanted = sorted(set(run_ids) - known.keys())
    for names in chunks(wanted):
        query = select(RunRow).where(RunRow.run_id.in_(names)).order_by(RunRow.run_id).with_for_update()
        found = {row.run_id: row for row in session.scalars(query)}
        if len(found) < len(names):
            insert_new(session, RunRow, [{"run_id": name} for name in names if name not in found])
            found = {row.run_id: row for row in session.scalars(query)}
        known |= found
    return known


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
    runs_locked(session, {message.run_id for message in messages})
    insert_new(session, StepRow, [_step_values(message) for message in messages])
    layers_observed(session, messages)
    newest: dict[str, StepObserved] = {}
    num_dropped: dict[str, int] = {}
    for message in messages:
        num_dropped[message.run_id] = max(num_dropped.get(message.run_id, 0), message.num_events_dropped)
        known = newest.get(message.run_id)
        if known is None or (message.attempt, message.step) > (known.attempt, known.step):
            newest[message.run_id] = message
    for run_id, message in newest.items():
        run = run_row(session, run_id)
        run.num_events_dropped = max(run.num_events_dropped, num_dropped[run_id])
        if run.last_step is None or (message.attempt, message.step) > (run.last_attempt, run.last_step):
            run.last_attempt = message.attempt
            run.last_step = message.step
            run.last_step_at = message.ts
            run.last_norm = message.grad_norm
            run.last_limit = message.limit


def layers_observed(session: Session, messages: list[StepObserved]) -> None:
    """The greatest norm of each layer in windows of steps; windows double when there are too many.

    Many runs in a few statements; whoever calls holds their rows' locks.
    """
    by_run: dict[str, list[StepObserved]] = {}
    for message in messages:
        if message.layer_norms:
            by_run.setdefault(message.run_id, []).append(message)
    if not by_run:
        return
    runs = runs_locked(session, by_run)
    windows: dict[str, _Windows] = {}
    for run_id, observed in sorted(by_run.items()):
        run, needed = runs[run_id], layer_window_width(max(each.step for each in observed))
        windows[run_id] = _Windows(max(needed, run.layer_width))
        if run.layer_width < needed:
            _take_out(session, run_id, windows[run_id])
            run.layer_width = needed
        for each in observed:
            windows[run_id].merge(each.step, each.layer_norms)
    _write_windows(session, windows)


LAYER_WINDOWS_MAX = 256  # columns of the run's heat map


def layer_window_width(last_step: int) -> int:
    """The power of two that shows steps 0 to `last_step` in at most LAYER_WINDOWS_MAX windows."""
    width = 1
    while last_step // width >= LAYER_WINDOWS_MAX:
        width *= 2
    return width


@dataclass(slots=True)
class _Windows:
    """One run's windows by first step, each `width` steps wide."""

    width: int
    norms: dict[int, dict[str, float]] = field(default_factory=dict)

    def merge(self, step: int, norms: Mapping[str, float]) -> None:
        _merge(self.norms.setdefault(step // self.width * self.width, {}), norms)


def _take_out(session: Session, run_id: str, windows: _Windows) -> None:
    """The run's narrower windows, out of the table and into `windows`."""
    mine = LayerWindowRow.run_id == run_id
    for first_step, norms_json in session.execute(
        select(LayerWindowRow.first_step, LayerWindowRow.norms_json).where(mine)
    ):
        windows.merge(first_step, _of_wire(norms_json))
    session.execute(delete(LayerWindowRow).where(mine).execution_options(synchronize_session=False))


def _write_windows(session: Session, windows: dict[str, _Windows]) -> None:
    known: dict[tuple[str, int], str] = {}
    for names in chunks(sorted(windows), 100):  # two bounds each
        query = select(LayerWindowRow.run_id, LayerWindowRow.first_step, LayerWindowRow.norms_json).where(
            or_(
                *(
                    and_(LayerWindowRow.run_id == name, LayerWindowRow.first_step >= min(windows[name].norms))
                    for name in names
                )
            )
        )
        known |= {(run_id, first_step): norms_json for run_id, first_step, norms_json in session.execute(query)}
    new: list[dict[str, Any]] = []
    changed: list[dict[str, Any]] = []
    for run_id, mine in sorted(windows.items()):
        for first_step, norms in sorted(mine.norms.items()):
            before = known.get((run_id, first_step))
            if before is not None:
                _merge(norms, _of_wire(before))
            row = {"run_id": run_id, "first_step": first_step, "width": mine.width, "norms_json": _to_wire(norms)}
            (new if before is None else changed).append(row)
    insert_known_new(session, LayerWindowRow, new)
    if changed:
        session.execute(update(LayerWindowRow), changed)


def _merge(into: dict[str, float], norms: Mapping[str, float]) -> None:
    """The greater of both; what is not finite is greater than everything, NaN greatest of all."""
    if not into:
        into.update(norms)
        return
    for name, value in norms.items():
        known = into.get(name)
        if known is None or value > known or (value != value and known == known):
            into[name] = value


def _to_wire(norms: dict[str, float]) -> str:
    if not math.isfinite(sum(norms.values())):  # rare: JSON has no word for them, so they become strings
        return json.dumps({key: v if math.isfinite(v) else str(v) for key, v in sorted(norms.items())})
    return orjson.dumps(norms, option=orjson.OPT_SORT_KEYS).decode()


def _of_wire(text: str) -> dict[str, float]:
    return {name: float(value) for name, value in orjson.loads(text).items()}


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


def snapshot_told(session: Session, message: SnapshotCommitted | SnapshotFailed) -> int:
    """Gives the step whose snapshot it is."""
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
    return int(values["step"])


def gap_noticed(session: Session, message: StreamGapNoticed) -> None:
    detail = {"first_step": message.first_step, "last_step": message.last_step, "reason": message.reason}
    add_event(session, message.key(), message.run_id, None, message.ts, message.type, detail)


def override_set(session: Session, message: OverrideSet) -> None:
    value = None if message.value is None else float(f"{message.value:.4g}")
    detail = {"by": message.by, "name": message.name, "value": None if value is None else repr(value)}
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
