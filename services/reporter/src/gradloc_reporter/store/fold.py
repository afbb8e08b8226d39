"""Messages of one batch into one session: each kind to the function that knows its rows.

Knows which stream may carry which message, because rights are given by stream: whoever may write a
run's steps must not be able to write its findings.
"""

import time
from collections.abc import Callable, Sequence

from sqlalchemy.orm import Session

from gradloc_proto import messages as m
from gradloc_proto.streams import StreamName
from gradloc_reporter.store import incident_facts, run_facts, snapshot_records, summaries

ALLOWED: dict[StreamName, tuple[type[m.Message], ...]] = {
    "steps": (m.RunStarted, m.StepObserved, m.SnapshotCommitted, m.SnapshotFailed, m.RunEnded),
    # A localization that the detector has given up is its own fact, told beside the incident.
    "incidents": (m.IncidentMessage, m.IncidentResolved, m.StreamGapNoticed, m.LocalizationFailed),
    "limits": (m.LimitsChanged,),
    "findings": (m.LocalizationMessage,),
    "control": (m.SnapshotRequested, m.RelocalizeRequested, m.OverrideSet, m.Tick, m.JobReported),
}


class Fold:
    """Applies messages; `finish` writes what was gathered for one insert."""

    def __init__(self, session: Session, *, clock: Callable[[], float] = time.time) -> None:
        self._session = session
        self._clock = clock
        session.info.pop("runs", None)  # locked by a transaction inside ours that may have been rolled back
        self._steps: list[m.StepObserved] = []
        self._incidents: set[str] = set()
        self._snapshots: set[tuple[str, int, int]] = set()  # run, attempt and step: their incidents change, too

    def apply_all(self, messages: Sequence[m.Message]) -> None:
        run_facts.runs_locked(self._session, {message.run_id for message in messages})
        for message in messages:
            self.apply(message)

    def apply(self, message: m.Message) -> None:
        incident_id = getattr(message, "incident_id", None)
        if incident_id is not None:
            self._incidents.add(incident_id)
        match message:
            case m.StepObserved():
                self._steps.append(message)
            case m.RunStarted():
                run_facts.run_started(self._session, message)
            case m.RunEnded():
                run_facts.run_ended(self._session, message)
            case m.SnapshotCommitted() | m.SnapshotFailed():
                step = run_facts.snapshot_told(self._session, message)
                self._snapshots.add((message.run_id, message.attempt, step))
            case m.LimitsChanged():
                run_facts.limits_changed(self._session, message)
            case m.StreamGapNoticed():
                run_facts.gap_noticed(self._session, message)
            case m.IncidentOpened() | m.IncidentJoined() | m.IncidentWorsened():
                incident_facts.spike_told(self._session, message)
            case m.IncidentResolved():
                incident_facts.incident_resolved(self._session, message)
            case (
                m.LocalizationStarted() | m.LocalizationProgressed() | m.LocalizationFinished() | m.LocalizationFailed()
            ):
                incident_facts.localization_told(self._session, message)
            case m.JobReported():
                incident_facts.job_reported(self._session, message)
            case m.RelocalizeRequested():
                incident_facts.relocalize_requested(self._session, message)
            case m.OverrideSet():
                run_facts.override_set(self._session, message)
            case m.SnapshotRequested() | m.Tick():
                pass  # wishes to others and their clock: nothing of ours
            case _:
                raise AssertionError(type(message).__name__)

    def finish(self) -> None:
        run_facts.steps_observed(self._session, self._steps)
        self._steps = []
        self._session.flush()
        for run_id, attempt, step in sorted(self._snapshots):
            self._incidents.update(snapshot_records.incidents_of(self._session, run_id, attempt, step))
        summaries.refresh(self._session, self._incidents, now=self._clock())
        self._incidents, self._snapshots = set(), set()
