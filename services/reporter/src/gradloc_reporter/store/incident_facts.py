"""What messages say of incidents, as rows: incidents, spikes, findings, and the log of both.

Every function gives the same rows whatever the order and however often the messages arrive: the
worst spike is a maximum, an attempt's state only climbs, the highest finished attempt wins, and a
message that comes before its incident was opened makes the row that the opening then completes.
"""

import math
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from gradloc_proto.messages import (
    Finding,
    IncidentJoined,
    IncidentOpened,
    IncidentResolved,
    IncidentWorsened,
    JobReported,
    LocalizationFailed,
    LocalizationFinished,
    LocalizationProgressed,
    LocalizationStarted,
    RelocalizeRequested,
    Spike,
)
from gradloc_reporter.store.rows import get_or_insert, insert_if_new, insert_new
from gradloc_reporter.store.run_facts import add_event, run_row
from gradloc_reporter.store.tables import FindingRow, IncidentRow, SpikeRow

# A state never goes back to one before it: the messages of an attempt may come in any order.
STATES = ("queued", "running", "failed", "finished")
_STATE_OF_JOB = {
    "submitted": "queued",
    "running": "queued",
    "failed": "failed",
    "stopped": "failed",
    "lost": "failed",
    "refused": "failed",
}


_OfLocalization = LocalizationStarted | LocalizationProgressed | LocalizationFailed | LocalizationFinished
_OfIncident = (
    IncidentOpened
    | IncidentJoined
    | IncidentWorsened
    | IncidentResolved
    | JobReported
    | RelocalizeRequested
    | _OfLocalization
)


class IncidentOfOtherRun(ValueError):
    """A message names an incident that belongs to another run."""


def incident_of(session: Session, message: _OfIncident) -> IncidentRow:
    """The incident a message speaks of, made where it is new. Raises IncidentOfOtherRun."""
    query = select(IncidentRow).where(IncidentRow.incident_id == message.incident_id).with_for_update()
    row = session.scalars(query).one_or_none()
    if row is None:
        run_row(session, message.run_id)
        values = {
            "incident_id": message.incident_id,
            "run_id": message.run_id,
            "attempt": message.attempt,
            "updated_at": message.ts,
        }
        insert_new(session, IncidentRow, [values])
        row = session.scalars(query).one()
    if row.run_id != message.run_id:
        raise IncidentOfOtherRun("the incident belongs to another run; expected the run whose stream this is")
    return row


def _changed(row: IncidentRow, ts: float) -> None:
    row.opened_at = _least(row.opened_at, ts)
    row.updated_at = max(row.updated_at, ts)
    row.revision += 1


def _log(session: Session, message: _OfIncident, detail: dict[str, Any]) -> bool:
    return add_event(session, message.key(), message.run_id, message.incident_id, message.ts, message.type, detail)


def spike_told(session: Session, message: IncidentOpened | IncidentJoined | IncidentWorsened) -> None:
    incident = incident_of(session, message)
    spike = message.spike
    values = {
        "spike_id": spike.spike_id,
        "incident_id": message.incident_id,
        "run_id": message.run_id,
        "attempt": message.attempt,
        "step": spike.step,
        "ts": message.ts,
        "spike_json": spike.model_dump_json(),
    }
    new = insert_if_new(session, SpikeRow, values)
    detail = {"step": spike.step} | spike.model_dump(mode="json", include={"grad_norm", "healthy_norm"})
    logged = _log(session, message, detail)
    if new or logged:
        _changed(incident, message.ts)
    if not new:
        return
    incident.last_spike_at = max(incident.last_spike_at or message.ts, message.ts)
    incident.num_spikes += 1
    incident.first_step = spike.step if incident.first_step is None else min(incident.first_step, spike.step)
    incident.last_step = spike.step if incident.last_step is None else max(incident.last_step, spike.step)
    known = incident.worst_spike_json
    if known is None or badness(spike) > badness(Spike.model_validate_json(known)):
        incident.worst_spike_json = spike.model_dump_json()
    if incident.closed_at is not None:
        refresh_status(session, incident)


def badness(spike: Spike) -> tuple[float, float, int, str]:
    """Order of spikes: not finite is worst, then the largest factor, then the earliest step."""
    scores = [math.inf if math.isnan(flag.score) else flag.score for flag in spike.flags]
    norm = spike.grad_norm if math.isfinite(spike.grad_norm) else math.inf
    return (math.inf if math.isinf(norm) else max(scores, default=0.0), norm, -spike.step, spike.spike_id)


def incident_resolved(session: Session, message: IncidentResolved) -> None:
    incident = incident_of(session, message)
    if not _log(session, message, {"step": message.step, "reason": message.reason}):
        return
    _changed(incident, message.ts)
    incident.resolved_at = message.ts
    incident.resolved_step = message.step
    incident.resolved_reason = message.reason
    refresh_status(session, incident)


def localization_told(session: Session, message: _OfLocalization) -> None:
    """Started, progressed, finished or failed: one row an attempt, whose state only climbs."""
    incident = incident_of(session, message)
    attempt = message.localization_attempt
    row = _finding_row(session, message.incident_id, attempt)
    before = _fingerprint(row)
    match message:
        case LocalizationStarted():
            _climb(row, "running")
            row.started_at = _least(row.started_at, message.ts)
            _log(session, message, {"localization_attempt": attempt, "step": message.step})
        case LocalizationProgressed():
            _climb(row, "running")
            if (message.fraction, message.stage) > (row.fraction or 0.0, row.stage or ""):
                row.fraction, row.stage = message.fraction, message.stage
        case LocalizationFailed():
            _fail(row, message.ts)
            row.reason, row.retryable = message.reason, message.retryable
            detail = {"localization_attempt": attempt, "reason": message.reason, "retryable": message.retryable}
            _log(session, message, detail)
        case LocalizationFinished():
            _climb(row, "finished")
            if row.finding_json is None:
                row.ended_at = message.ts
                row.verdict = message.finding.verdict
                row.finding_json = message.finding.model_dump_json()
            _log(session, message, {"localization_attempt": attempt, "verdict": message.finding.verdict})
    if _fingerprint(row) == before:
        return
    _changed(incident, message.ts)
    incident.localization_attempt = max(incident.localization_attempt, attempt)
    if row.finding_json is not None and attempt > incident.finding_attempt:
        finding = Finding.model_validate_json(row.finding_json)
        incident.finding_attempt = attempt
        incident.finding_json = row.finding_json
        incident.verdict = finding.verdict
        incident.cause = finding.causes[0].name if finding.causes else None
    refresh_status(session, incident)


def job_reported(session: Session, message: JobReported) -> None:
    incident = incident_of(session, message)
    attempt = message.localization_attempt
    if not _log(
        session, message, {"localization_attempt": attempt, "status": message.status, "detail": message.detail}
    ):
        return
    _changed(incident, message.ts)
    state = _STATE_OF_JOB.get(message.status)
    if state is None:  # "succeeded" is Ray's word; the finding is the localizer's
        return
    row = _finding_row(session, message.incident_id, attempt)
    if state == "failed":
        _fail(row, message.ts)
        if row.reason is None:
            row.reason = f"Ray job {message.status}" + (f": {message.detail}" if message.detail else "")
    else:
        _climb(row, state)
    incident.localization_attempt = max(incident.localization_attempt, attempt)
    refresh_status(session, incident)


def relocalize_requested(session: Session, message: RelocalizeRequested) -> None:
    incident = incident_of(session, message)
    if _log(session, message, {"by": message.by}):
        _changed(incident, message.ts)


def refresh_status(session: Session, incident: IncidentRow) -> None:
    """Status from facts alone: open, localizing, located, failed or resolved."""
    session.flush()
    if is_over(incident):
        incident.status = "resolved"
        return
    newest = session.get(FindingRow, (incident.incident_id, incident.localization_attempt))
    if newest is not None and newest.state in ("queued", "running"):
        incident.status = "localizing"
    elif incident.finding_attempt > 0:
        incident.status = "located"
    else:
        incident.status = "open" if newest is None else "failed"


def is_over(incident: IncidentRow) -> bool:
    """Resolved by the detector, or closed by a person and calm since; unless a person opened it again."""
    reopened_at = -math.inf if incident.reopened_at is None else incident.reopened_at
    if incident.resolved_at is not None and incident.resolved_at > reopened_at:
        return True
    last_spike_at = -math.inf if incident.last_spike_at is None else incident.last_spike_at
    return incident.closed_at is not None and incident.closed_at > max(reopened_at, last_spike_at)


def _finding_row(session: Session, incident_id: str, attempt: int) -> FindingRow:
    values = {"incident_id": incident_id, "localization_attempt": attempt}
    return get_or_insert(session, FindingRow, (incident_id, attempt), values)


def _fingerprint(row: FindingRow) -> tuple[Any, ...]:
    return (row.state, row.started_at, row.ended_at, row.stage, row.fraction, row.reason, row.verdict)


def _climb(row: FindingRow, state: str) -> None:
    if STATES.index(state) > STATES.index(row.state):
        row.state = state


def _fail(row: FindingRow, ts: float) -> None:
    _climb(row, "failed")
    if row.state != "finished":
        row.ended_at = _least(row.ended_at, ts)


def _least(known: float | None, new: float) -> float:
    return new if known is None or new < known else known
