"""fold(state, message) -> (state, effects): everything the detector ever decides, as one pure function.

No I/O, no clock: time comes as Tick messages and as the messages' own `ts`. Folding a message twice
changes nothing that anybody sees; folding from a checkpoint equals folding in one go.
"""

from dataclasses import replace

import numpy as np

from gradloc_detector import incidents, localizations, sequence, steps
from gradloc_detector.policy import DEFAULT_POLICY, LABELS_MAX, REQUESTS_KEPT_MAX, SENSITIVITY_RANGE, Policy
from gradloc_detector.state import Book, DetectorState, Effects, Emit, Place, Rejection
from gradloc_proto import rules
from gradloc_proto.messages import (
    JobReported,
    LocalizationFailed,
    LocalizationFinished,
    LocalizationProgressed,
    LocalizationStarted,
    Message,
    OverrideSet,
    RelocalizeRequested,
    RunEnded,
    RunStarted,
    SnapshotCommitted,
    SnapshotFailed,
    SnapshotRequested,
    StepObserved,
    StreamGapNoticed,
    Tick,
)
from gradloc_proto.streams import StreamName

# Owners: nobody's facts are believed from another's stream.
ACCEPTED: dict[StreamName, tuple[type[Message], ...]] = {
    "steps": (RunStarted, StepObserved, SnapshotCommitted, SnapshotFailed, RunEnded),
    "control": (SnapshotRequested, RelocalizeRequested, OverrideSet, Tick, JobReported),
    "findings": (LocalizationStarted, LocalizationProgressed, LocalizationFinished, LocalizationFailed),
}


def fold(state: DetectorState, message: Message, policy: Policy = DEFAULT_POLICY) -> tuple[DetectorState, Effects]:
    """The state after `message`, and what is to be appended (Emit) or set aside (Rejection)."""
    book = state.book
    if message.run_id != book.run_id:
        return _rejected(state, f"message of run {message.run_id[:80]!r} in a stream of {book.run_id!r}")
    with np.errstate(all="ignore"):  # absurd numbers become inf or NaN, which the rules know
        state, effects = _fold(state, message, policy)
    num_rejected = sum(isinstance(effect, Rejection) for effect in effects)
    if num_rejected:
        book = state.book
        state = replace(state, book=book.model_copy(update={"num_rejected": book.num_rejected + num_rejected}))
    return state, effects


def _fold(state: DetectorState, message: Message, policy: Policy) -> tuple[DetectorState, Effects]:
    book = state.book
    match message:
        case StepObserved():
            return _step(state, message, policy)
        case RunStarted():
            return _run_started(state, message, policy)
        case RunEnded():
            return _run_ended(state, message, policy)
        case OverrideSet():
            return _overridden(state, message, policy)
        case Tick():
            book, effects = _ticked(book, message, policy)
        case SnapshotCommitted():
            book, effects = localizations.snapshot_committed(book, message)
        case SnapshotFailed():
            book, effects = localizations.snapshot_failed(book, message)
        case LocalizationStarted() | LocalizationProgressed():
            book, effects = localizations.started(book, message)
        case LocalizationFinished():
            book, effects = localizations.finished(book, message)
        case LocalizationFailed():
            book, effects = localizations.failed(book, message, policy)
        case JobReported():
            book, effects = localizations.job_reported(book, message, policy)
        case RelocalizeRequested():
            book, effects = localizations.wished(book, message)
        case _:
            return state, ()
    return replace(state, book=book), effects


def loss_noticed(state: DetectorState, what: str, place: Place | None = None) -> tuple[DetectorState, Effects]:
    """Redis lost data (a restart, a failover without the last writes); `what` says which.

    `place` is the last one known, where the state itself was lost.
    """
    book = state.book
    attempt, step = (book.attempt, book.last_step or 0) if place is None else (place.attempt, place.step)
    if place is not None and book.last_step is None:
        state = replace(state, book=book.model_copy(update={"lost_at": place}))
    message = StreamGapNoticed(
        run_id=book.run_id,
        attempt=attempt,
        ts=book.last_ts,
        first_step=step,
        last_step=step,
        reason=f"Redis lost {what}",
    )
    return state, (Emit("incidents", message),)


def _step(state: DetectorState, message: StepObserved, policy: Policy) -> tuple[DetectorState, Effects]:
    book = state.book
    if message.attempt < book.attempt:
        return replace(state, book=book.model_copy(update={"num_old_attempt": book.num_old_attempt + 1})), ()
    effects: Effects = ()
    if message.attempt > book.attempt:
        state, effects = _restarted(state, message.attempt, policy)
        book = state.book
    fault = sequence.absurdity(book, message.step)
    if fault is not None:
        return state, (*effects, Rejection(fault))
    if not sequence.is_new(book, message.step):
        return replace(state, book=book.model_copy(update={"num_repeated": book.num_repeated + 1})), effects
    book, gaps = sequence.resumed(book.model_copy(update={"last_ts": message.ts}), message)
    effects += gaps
    state = replace(state, book=book)
    state, more = steps.observed(state, message, policy)
    book, yet_more = localizations.struck(state.book)
    return replace(state, book=book), effects + more + yet_more


def _run_started(state: DetectorState, message: RunStarted, policy: Policy) -> tuple[DetectorState, Effects]:
    if message.attempt < state.book.attempt:
        return state, ()
    effects: Effects = ()
    if message.attempt > state.book.attempt:
        state, effects = _restarted(state, message.attempt, policy)
    book = state.book
    labels = dict(list(message.labels.items())[:LABELS_MAX])
    changes: dict[str, object] = {
        "labels": {name[:64]: value for name, value in labels.items()},
        "last_ts": max(book.last_ts, message.ts),
    }
    return replace(state, book=sequence.begun(book.model_copy(update=changes), message.first_step)), effects


def _restarted(state: DetectorState, attempt: int, policy: Policy) -> tuple[DetectorState, Effects]:
    """Training began anew from a checkpoint: steps go back, and what was healthy is learnt anew."""
    book, gaps = sequence.told(state.book, policy, now=True)
    book, ends = incidents.resolved(book, f"run restarted as attempt {attempt}")
    fresh = Book(run_id=book.run_id)
    kept = (
        "incidents",
        "num_incidents",
        "early_snapshots",
        "reference",
        "requests",
        "stops",
        "clock",
        "labels",
        "last_ts",
        "lost_at",
    )
    counts = ("num_repeated", "num_old_attempt", "num_rejected")
    changes: dict[str, object] = {name: getattr(book, name) for name in (*kept, *counts)}
    if book.last_ts == 0.0 and book.lost_at is None:  # an attempt was there before, and nobody has told of it
        changes["lost_at"] = Place(attempt=attempt - 1, step=-1)
    book = fresh.model_copy(update=changes | {"attempt": attempt})
    return DetectorState(book, rules.RunState(sensitivity=state.baselines.sensitivity)), gaps + ends


def _run_ended(state: DetectorState, message: RunEnded, policy: Policy) -> tuple[DetectorState, Effects]:
    book = state.book
    if message.attempt != book.attempt or book.ended:
        return state, ()
    book = book.model_copy(update={"last_ts": message.ts})
    book, gaps = sequence.told(book, policy, now=True)
    book, ends = incidents.resolved(book, "run ended")
    return replace(state, book=book.model_copy(update={"ended": True})), gaps + ends


def _overridden(state: DetectorState, message: OverrideSet, policy: Policy) -> tuple[DetectorState, Effects]:
    book = state.book
    if message.request_id in book.requests:
        return state, ()
    low, high = SENSITIVITY_RANGE
    if message.name != "sensitivity":
        return state, (Rejection(f"override {message.name[:40]!r} is not known; known: sensitivity"),)
    value = policy.sensitivity if message.value is None else message.value
    if not low <= value <= high:
        return state, (Rejection(f"override sensitivity={value:g} is outside {low:g} to {high:g}"),)
    requests = (*book.requests, message.request_id)[-REQUESTS_KEPT_MAX:]
    book = book.model_copy(update={"requests": requests, "limits_dirty": True})
    baselines = replace(state.baselines, sensitivity=replace(state.baselines.sensitivity, scale=value))
    return DetectorState(book, baselines), ()


def _ticked(book: Book, message: Tick, policy: Policy) -> tuple[Book, Effects]:
    book = book.model_copy(update={"clock": message.ts})
    book, gaps = sequence.ticked(book, policy)
    book, waits = localizations.ticked(book, policy)
    return book, gaps + waits


def _rejected(state: DetectorState, reason: str) -> tuple[DetectorState, Effects]:
    book = state.book
    return replace(state, book=book.model_copy(update={"num_rejected": book.num_rejected + 1})), (Rejection(reason),)
