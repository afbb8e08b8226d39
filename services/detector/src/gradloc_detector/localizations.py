"""Which localization should be in flight: the state machine that makes the incident stream an outbox.

    snapshot -> ready -> submitted -> running -> finished | failed      (no-snapshot: nothing to replay)

Pure; time is the last Tick. Knows nothing of Ray or HTTP: plan.py says what should exist, the
dispatcher makes it so and answers with JobReported. A localization attempt's number is never used
twice, because Ray never frees the id of a job.
"""

import math

from gradloc_detector.incidents import with_incident
from gradloc_detector.policy import REQUESTS_KEPT_MAX, SNAPSHOTS_KEPT_MAX, STOPS_KEPT_MAX, Policy
from gradloc_detector.state import (
    IN_FLIGHT,
    Book,
    EarlySnapshot,
    Effects,
    Emit,
    Incident,
    KeptSpike,
    Localization,
    Rejection,
    Stop,
)
from gradloc_proto.messages import (
    JobReported,
    LocalizationFailed,
    LocalizationFinished,
    LocalizationProgressed,
    LocalizationStarted,
    RelocalizeRequested,
    SnapshotCommitted,
    SnapshotFailed,
)

Step = tuple[Book, Effects]


# --- messages ------------------------------------------------------------------------------------


def snapshot_committed(book: Book, message: SnapshotCommitted) -> Step:
    fault = _path_fault(message.path, book.run_id)
    if fault is not None:
        return book, (Rejection(f"snapshot of step {message.step}: {fault}"),)
    if message.weights == "reference":
        return _with_reference(book, message), ()
    step = message.step if message.asked_step is None else message.asked_step
    for incident in book.incidents:
        for spike in incident.spikes:
            if (incident.attempt, spike.step) == (message.attempt, step):
                if spike.path is not None:
                    return book, ()
                return _advanced(_with_spike(book, incident, spike.model_copy(update={"path": message.path})))
    early = EarlySnapshot(attempt=message.attempt, step=step, path=message.path)
    if early in book.early_snapshots:
        return book, ()
    kept = (*book.early_snapshots, early)[-SNAPSHOTS_KEPT_MAX:]
    return book.model_copy(update={"early_snapshots": kept}), ()


def snapshot_failed(book: Book, message: SnapshotFailed) -> Step:
    for incident in book.incidents:
        for spike in incident.spikes:
            if (incident.attempt, spike.step) == (message.attempt, message.step) and spike.path is None:
                return _advanced(_with_spike(book, incident, spike.model_copy(update={"failure": message.reason})))
    return book, ()


def struck(book: Book) -> Step:
    """After a spike: its snapshot may have been committed before it was read."""
    return _advanced(book)


def started(book: Book, message: LocalizationStarted | LocalizationProgressed) -> Step:
    incident = _awaited(book, message.incident_id, message.localization_attempt)
    if incident is None or incident.localization.phase == "running":
        return book, ()
    return _moved(book, incident, phase="running", since=None), ()


def finished(book: Book, message: LocalizationFinished) -> Step:
    incident = _incident(book, message.incident_id)
    if incident is None:
        return book, ()
    localization = incident.localization
    is_current = message.localization_attempt == localization.attempt and localization.phase != "finished"
    # Held for lost and about to be tried again, or given up: the finding is welcome all the same.
    is_late = 1 <= message.localization_attempt < localization.attempt and (
        localization.phase == "failed" or (localization.phase == "ready" and localization.num_failures > 0)
    )
    if not (is_current or is_late):
        return book, ()
    if localization.wish_waiting:
        return _readied(book, incident, num_failures=0), ()
    return _moved(book, incident, phase="finished", ended=None), ()


def failed(book: Book, message: LocalizationFailed, policy: Policy) -> Step:
    incident = _awaited(book, message.incident_id, message.localization_attempt)
    if incident is None:
        return book, ()
    return _failed(book, incident, message.reason, policy, now=message.ts, is_retryable=message.retryable, is_told=True)


def job_reported(book: Book, message: JobReported, policy: Policy) -> Step:
    if message.status not in ("submitted", "running"):
        told = (message.incident_id, message.localization_attempt)
        stops = tuple(stop for stop in book.stops if (stop.incident_id, stop.localization_attempt) != told)
        book = book.model_copy(update={"stops": stops})
    incident = _awaited(book, message.incident_id, message.localization_attempt)
    if incident is None:
        return book, ()
    localization = incident.localization
    match message.status:
        case "submitted":
            return (_moved(book, incident, phase="submitted") if localization.phase == "ready" else book), ()
        case "running":
            return (_moved(book, incident, phase="running") if localization.phase != "running" else book), ()
        case "succeeded" | "failed" | "stopped":
            if localization.ended is not None:
                return book, ()
            ended = f"{message.status}: {message.detail}" if message.detail else message.status
            return _moved(book, incident, phase="running", ended=ended[:256], since=None), ()
        case "lost" | "refused":
            reason = f"job {message.status} by Ray: {message.detail}"[:400]
            is_lost = message.status == "lost"
            return _failed(book, incident, reason, policy, now=message.ts, is_retryable=is_lost)


def wished(book: Book, message: RelocalizeRequested) -> Step:
    if message.request_id in book.requests:
        return book, ()
    incident = _incident(book, message.incident_id)
    if incident is None:
        return book, (Rejection(f"re-localize: no incident {message.incident_id[:40]!r} of this run is remembered"),)
    book = book.model_copy(update={"requests": (*book.requests, message.request_id)[-REQUESTS_KEPT_MAX:]})
    localization = incident.localization
    if localization.phase == "snapshot":
        return book, ()  # its first localization is still to come
    if localization.phase in IN_FLIGHT:
        return _moved(book, incident, wish_waiting=True), ()
    if localization.phase == "ready":
        return _moved(book, incident, not_before=-math.inf, num_failures=0), ()
    if _best(incident, any_kind=True) is None:
        return _given_up(book, incident, "no-snapshot", _why_no_snapshot(incident))
    return _readied(book, incident, num_failures=0), ()


def ticked(book: Book, policy: Policy) -> Step:
    """What has waited long enough: for a snapshot, for a job's finding, for a job's end."""
    effects: Effects = ()
    for incident in book.incidents:
        book, more = _waited(book, incident, policy)
        effects += more
    return book, effects


# --- transitions -----------------------------------------------------------------------------------


def _waited(book: Book, incident: Incident, policy: Policy) -> Step:
    localization, clock = incident.localization, book.clock
    if clock is None or localization.phase not in ("snapshot", "running"):
        return book, ()
    if localization.since is None or localization.since > clock:
        return _moved(book, incident, since=clock), ()
    waited_s = clock - localization.since
    if localization.phase == "snapshot":
        if waited_s < policy.snapshot_timeout_s:
            return book, ()
        return _given_up(book, incident, "no-snapshot", _why_no_snapshot(incident))
    if localization.ended is not None:
        if waited_s < policy.ended_grace_s:
            return book, ()
        return _failed(book, incident, f"job ended without a finding ({localization.ended})", policy, now=clock)
    if waited_s < policy.running_timeout_s:
        return book, ()
    stop = Stop(
        attempt=incident.attempt,
        incident_id=incident.incident_id,
        localization_attempt=localization.attempt,
        snapshot=localization.snapshot or "",
    )
    book = book.model_copy(update={"stops": (*book.stops, stop)[-STOPS_KEPT_MAX:]})
    return _failed(book, incident, f"no end after {policy.running_timeout_s:g} s of running", policy, now=clock)


def _advanced(book: Book) -> Step:
    """Take incidents that wait for a snapshot further, if one was committed or all have failed."""
    effects: Effects = ()
    for incident in book.incidents:
        phase = incident.localization.phase
        if phase not in ("snapshot", "no-snapshot"):
            continue
        if _best(incident) is not None:
            book = _readied(book, incident, num_failures=0)
        elif phase == "snapshot" and all(spike.failure is not None for spike in incident.spikes if spike.has_gradient):
            book, more = _given_up(book, incident, "no-snapshot", _why_no_snapshot(incident))
            effects += more
    return book, effects


def _readied(book: Book, incident: Incident, *, num_failures: int, not_before: float = -math.inf) -> Book:
    """A new attempt, about the worst spike that has a snapshot."""
    spike = _best(incident) or _best(incident, any_kind=True)
    assert spike is not None and spike.path is not None, "only an incident with a snapshot becomes ready"
    localization = Localization(
        phase="ready",
        attempt=incident.localization.attempt + 1,
        snapshot=spike.path,
        step=spike.step,
        num_failures=num_failures,
        not_before=not_before,
    )
    return with_incident(book, incident.model_copy(update={"localization": localization}))


def _failed(
    book: Book,
    incident: Incident,
    reason: str,
    policy: Policy,
    *,
    now: float,
    is_retryable: bool = True,
    is_told: bool = False,
) -> Step:
    """A job came to nothing: try again later, or give up. `is_told`: the localizer said so itself."""
    localization = incident.localization
    if localization.wish_waiting:
        return _readied(book, incident, num_failures=0), ()
    num_failures = localization.num_failures + 1
    if is_retryable and num_failures < policy.localization_attempts_max:
        backoff_s = min(policy.retry_backoff_s * 2.0 ** (num_failures - 1), policy.retry_backoff_max_s)
        now = book.clock if book.clock is not None else now
        return _readied(book, incident, num_failures=num_failures, not_before=now + backoff_s), ()
    if is_told and not is_retryable:
        return _moved(book, incident, phase="failed", ended=None), ()
    if is_retryable:
        reason = f"given up after {num_failures} attempts; the last: {reason}"
    return _given_up(book, incident, "failed", reason)


def _given_up(book: Book, incident: Incident, phase: str, reason: str) -> Step:
    """Say so under a number of its own, since the last attempt's may be taken by the localizer's words."""
    attempt = incident.localization.attempt + 1
    message = LocalizationFailed(
        run_id=book.run_id,
        attempt=incident.attempt,
        ts=book.clock if book.clock is not None else book.last_ts,
        incident_id=incident.incident_id,
        localization_attempt=attempt,
        reason=reason[:512],
        retryable=False,
    )
    book = _moved(book, incident, phase=phase, attempt=attempt, ended=None)
    return book, (Emit("incidents", message),)


def _moved(book: Book, incident: Incident, **changes: object) -> Book:
    localization = incident.localization.model_copy(update=changes)
    return with_incident(book, incident.model_copy(update={"localization": localization}))


def _with_reference(book: Book, message: SnapshotCommitted) -> Book:
    """`book` that remembers the newest healthy step; an older one that comes late changes nothing."""
    new = EarlySnapshot(attempt=message.attempt, step=message.step, path=message.path)
    known = book.reference
    if known is not None and (known.attempt, known.step) >= (new.attempt, new.step):
        return book
    return book.model_copy(update={"reference": new})


def _with_spike(book: Book, incident: Incident, spike: KeptSpike) -> Book:
    spikes = tuple(spike if item.step == spike.step else item for item in incident.spikes)
    return with_incident(book, incident.model_copy(update={"spikes": spikes}))


# --- questions -------------------------------------------------------------------------------------


def _incident(book: Book, incident_id: str) -> Incident | None:
    return next((item for item in book.incidents if item.incident_id == incident_id), None)


def _awaited(book: Book, incident_id: str, localization_attempt: int) -> Incident | None:
    """The incident whose current, unsettled attempt this is; word of any other comes too late."""
    incident = _incident(book, incident_id)
    if incident is None or incident.localization.phase not in ("ready", *IN_FLIGHT):
        return None
    return incident if incident.localization.attempt == localization_attempt else None


def _best(incident: Incident, *, any_kind: bool = False) -> KeptSpike | None:
    """The worst spike that can be replayed and, unless a person asked for it, is worth it."""
    with_path = [spike for spike in incident.spikes if spike.path is not None and (spike.has_gradient or any_kind)]
    return max(with_path, key=lambda spike: spike.score) if with_path else None


def _why_no_snapshot(incident: Incident) -> str:
    failures = [spike.failure for spike in incident.spikes if spike.failure is not None]
    if failures:
        return f"no snapshot of any spike: {failures[-1]}"[:512]
    return "no snapshot of any spike was committed in time; is a store configured and reachable from the trainer?"


def _path_fault(path: str, run_id: str) -> str | None:
    """Why a job must not be pointed at `path`, or None. A run may only harm itself."""
    if not path or path.startswith("-") or not path.isprintable() or " " in path:
        return "path has characters that no snapshot URL has"
    if f"/{run_id}/" not in path + "/" or "/../" in path + "/":
        return f"path does not lie under its run {run_id!r}"
    return None
