"""Every message that crosses a process boundary: frozen, versioned, strict about types.

Facts flow trainer -> detector -> localizer -> reporter; wishes and clock ticks come back as
messages on the run's control stream (docs/protocol.md has the table of owners). Knows nothing of
Redis. Unknown fields are ignored, so that a reader accepts every message of its major version.
NaN and infinities survive: they travel as the JSON strings "NaN", "Infinity", "-Infinity".
"""

from typing import Annotated, Any, Literal, get_args

from pydantic import Field

from gradloc_proto.finding import (
    Cause,
    Certificate,
    Cost,
    Culprit,
    Fidelity,
    Finding,
    Fix,
    Profile,
    SequenceView,
)
from gradloc_proto.identities import message_key
from gradloc_proto.parts import (
    VERDICTS,
    Count,
    Decision,
    Flag,
    Limits,
    Part,
    RunId,
    Seconds,
    ShortText,
    Spike,
    TokenRef,
    Verdict,
)

__all__ = [
    "MESSAGE_TYPES",
    "SCHEMA_VERSION",
    "VERDICTS",
    "AnyMessage",
    "Cause",
    "Certificate",
    "Cost",
    "Count",
    "Culprit",
    "Decision",
    "Fidelity",
    "Finding",
    "Fix",
    "Flag",
    "IncidentJoined",
    "IncidentMessage",
    "IncidentOpened",
    "IncidentResolved",
    "IncidentWorsened",
    "JobReported",
    "Limits",
    "LimitsChanged",
    "LocalizationFailed",
    "LocalizationFinished",
    "LocalizationMessage",
    "LocalizationProgressed",
    "LocalizationStarted",
    "Message",
    "OverrideSet",
    "Part",
    "Profile",
    "RelocalizeRequested",
    "RunEnded",
    "RunId",
    "RunStarted",
    "SequenceView",
    "ShortText",
    "SnapshotCommitted",
    "SnapshotFailed",
    "SnapshotRequested",
    "Spike",
    "StepObserved",
    "StreamGapNoticed",
    "Tick",
    "TokenRef",
    "Verdict",
    "type_name",
]

SCHEMA_VERSION = "1.0"


class Message(Part):
    """What all messages carry: schema version, run, attempt and `ts` (seconds since the epoch)."""

    schema_version: str = SCHEMA_VERSION
    run_id: RunId
    attempt: Count = 0
    ts: Seconds

    def key(self) -> str:
        """Derived identity: two copies of one fact have one key."""
        raise NotImplementedError


# --- the trainer's facts -----------------------------------------------------------------------


class RunStarted(Message):
    type: Literal["run_started"] = "run_started"
    framework: ShortText = "pytorch"
    world_size: Annotated[int, Field(ge=1)] = 1
    layer_names: tuple[str, ...] = ()
    num_parameters: Count = 0
    model: ShortText | None = None
    tokenizer: ShortText | None = None
    config_digest: ShortText | None = None
    labels: dict[str, ShortText] = Field(default_factory=dict)
    first_step: Count | None = None  # that was published; in announcements after the first, when it is known

    def key(self) -> str:
        return message_key("run-started", self.run_id, self.attempt)


class StepObserved(Message):
    """What one optimizer step looked like, before clipping, over all ranks."""

    type: Literal["step_observed"] = "step_observed"
    step: Count
    grad_norm: float
    layer_norms: dict[str, float] = Field(default_factory=dict)
    num_tokens: Count = 0
    energy: float | None = None
    coefficient_abs_max: float | None = None
    coefficient_abs_max_at: TokenRef | None = None
    ratio_max: float | None = None
    ratio_min: float | None = None
    sequence_ratio_max: float | None = None
    loss: float | None = None
    loss_parts: dict[str, float] = Field(default_factory=dict)
    reward_mean: float | None = None
    reward_std: float | None = None
    accuracy: float | None = None
    num_zero_variance_groups: Count | None = None
    kl: float | None = None
    entropy: float | None = None
    clip_fraction: float | None = None
    lr: float | None = None
    tokens_remedied: float | None = None  # fraction that TokenClip acted on; None: not switched on
    sequences_remedied: float | None = None
    rewards_remedied: float | None = None
    layers_remedied: float | None = None
    step_s: float | None = None
    stall_s: float = 0.0
    decision: Decision = "go"
    rules_hit: tuple[str, ...] = ()
    limit: float | None = None
    limits_version: Count = 0
    snapshot: ShortText | None = None
    num_events_dropped: Count = 0

    def key(self) -> str:
        return message_key("step", self.run_id, self.attempt, self.step)


class SnapshotCommitted(Message):
    type: Literal["snapshot_committed"] = "snapshot_committed"
    step: Count
    path: ShortText
    num_bytes: Count
    manifest_sha256: ShortText
    weights: Literal["before-update", "after-update", "reference", "none"] = "before-update"
    asked_step: Count | None = None  # the wish it answers, where that step's batch was gone: `step` is a later one

    def key(self) -> str:
        return message_key("snapshot", self.run_id, self.attempt, self.step, self.path)


class SnapshotFailed(Message):
    type: Literal["snapshot_failed"] = "snapshot_failed"
    step: Count
    reason: ShortText

    def key(self) -> str:
        return message_key("snapshot-failed", self.run_id, self.attempt, self.step)


class RunEnded(Message):
    type: Literal["run_ended"] = "run_ended"
    step: Count
    reason: ShortText = "finished"
    num_events_dropped: Count = 0

    def key(self) -> str:
        return message_key("run-ended", self.run_id, self.attempt)


# --- the detector's facts ----------------------------------------------------------------------


class IncidentMessage(Message):
    incident_id: ShortText
    spike: Spike


class IncidentOpened(IncidentMessage):
    type: Literal["incident_opened"] = "incident_opened"
    labels: dict[str, ShortText] = Field(default_factory=dict)

    def key(self) -> str:
        return message_key("opened", self.run_id, self.attempt, self.incident_id)


class IncidentJoined(IncidentMessage):
    """A further spike of an open incident, no worse than the worst so far."""

    type: Literal["incident_joined"] = "incident_joined"

    def key(self) -> str:
        return message_key("joined", self.run_id, self.attempt, self.incident_id, self.spike.spike_id)


class IncidentWorsened(IncidentMessage):
    """A further spike, materially worse than the worst so far."""

    type: Literal["incident_worsened"] = "incident_worsened"

    def key(self) -> str:
        return message_key("worsened", self.run_id, self.attempt, self.incident_id, self.spike.spike_id)


class IncidentResolved(Message):
    type: Literal["incident_resolved"] = "incident_resolved"
    incident_id: ShortText
    step: Count
    reason: ShortText

    def key(self) -> str:
        return message_key("resolved", self.run_id, self.attempt, self.incident_id)


class LimitsChanged(Message):
    type: Literal["limits_changed"] = "limits_changed"
    step: Count
    limits: Limits

    def key(self) -> str:
        return message_key("limits", self.run_id, self.attempt, self.limits.version)


class StreamGapNoticed(Message):
    """Steps that never arrived: lost by Redis, by a full queue, or by the trainer's death."""

    type: Literal["stream_gap_noticed"] = "stream_gap_noticed"
    first_step: Count
    last_step: Count
    reason: ShortText

    def key(self) -> str:
        return message_key("gap", self.run_id, self.attempt, self.first_step, self.last_step)


# --- the localizer's facts ---------------------------------------------------------------------


class LocalizationMessage(Message):
    incident_id: ShortText
    localization_attempt: Annotated[int, Field(ge=1)]


class LocalizationStarted(LocalizationMessage):
    type: Literal["localization_started"] = "localization_started"
    step: Count
    snapshot: ShortText

    def key(self) -> str:
        return message_key(
            "localization-started", self.run_id, self.attempt, self.incident_id, self.localization_attempt
        )


class LocalizationProgressed(LocalizationMessage):
    type: Literal["localization_progressed"] = "localization_progressed"
    stage: ShortText
    fraction: Annotated[float, Field(ge=0, le=1)]

    def key(self) -> str:
        return message_key(
            "localization-progressed",
            self.run_id,
            self.attempt,
            self.incident_id,
            self.localization_attempt,
            self.stage,
        )


class LocalizationFinished(LocalizationMessage):
    type: Literal["localization_finished"] = "localization_finished"
    finding: Finding

    def key(self) -> str:
        return message_key(
            "localization-finished", self.run_id, self.attempt, self.incident_id, self.localization_attempt
        )


class LocalizationFailed(LocalizationMessage):
    type: Literal["localization_failed"] = "localization_failed"
    reason: ShortText
    retryable: bool = True

    def key(self) -> str:
        return message_key(
            "localization-failed", self.run_id, self.attempt, self.incident_id, self.localization_attempt
        )


# --- wishes and clocks, on the control stream ----------------------------------------------------


class SnapshotRequested(Message):
    type: Literal["snapshot_requested"] = "snapshot_requested"
    step: Count
    by: ShortText
    or_newest: bool = False  # what is asked about lasts: where the step is gone, the newest one shows it too

    def key(self) -> str:
        return message_key("snapshot-requested", self.run_id, self.attempt, self.step)


class RelocalizeRequested(Message):
    type: Literal["relocalize_requested"] = "relocalize_requested"
    incident_id: ShortText
    request_id: ShortText
    by: ShortText

    def key(self) -> str:
        return message_key("relocalize", self.run_id, self.attempt, self.incident_id, self.request_id)


class OverrideSet(Message):
    """A human's wish for one run, such as sensitivity=2.0; None takes it back."""

    type: Literal["override_set"] = "override_set"
    name: ShortText
    value: float | None = None
    request_id: ShortText
    by: ShortText

    def key(self) -> str:
        return message_key("override", self.run_id, self.attempt, self.request_id)


class Tick(Message):
    """The clock as a message, so that folding a stream again gives the same result."""

    type: Literal["tick"] = "tick"

    def key(self) -> str:
        return message_key("tick", self.run_id, self.attempt, repr(self.ts))


class JobReported(Message):
    """What the dispatcher learnt of a Ray job: submitted, lost, refused or ended."""

    type: Literal["job_reported"] = "job_reported"
    incident_id: ShortText
    localization_attempt: Annotated[int, Field(ge=1)]
    status: Literal["submitted", "running", "succeeded", "failed", "stopped", "lost", "refused"]
    detail: ShortText = ""

    def key(self) -> str:
        return message_key("job", self.run_id, self.attempt, self.incident_id, self.localization_attempt, self.status)


AnyMessage = Annotated[
    RunStarted
    | StepObserved
    | SnapshotCommitted
    | SnapshotFailed
    | RunEnded
    | IncidentOpened
    | IncidentJoined
    | IncidentWorsened
    | IncidentResolved
    | LimitsChanged
    | StreamGapNoticed
    | LocalizationStarted
    | LocalizationProgressed
    | LocalizationFinished
    | LocalizationFailed
    | SnapshotRequested
    | RelocalizeRequested
    | OverrideSet
    | Tick
    | JobReported,
    Field(discriminator="type"),
]

MESSAGE_TYPES: tuple[type[Message], ...] = get_args(get_args(AnyMessage)[0])


def type_name(message_type: type[Message]) -> str:
    """Wire name of a message type, e.g. "step_observed"."""
    default: Any = message_type.model_fields["type"].default
    return str(default)
