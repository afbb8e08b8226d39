"""Every message that crosses a process boundary: frozen, versioned, strict about types.

Facts flow trainer -> detector -> localizer -> reporter; wishes and clock ticks come back as
messages on the run's control stream (docs/protocol.md has the table of owners). Knows nothing of
Redis. Unknown fields are ignored, so that a reader accepts every message of its major version.
NaN and infinities survive: they travel as the JSON strings "NaN", "Infinity", "-Infinity".
"""

import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from gradloc_proto.identities import RUN_ID_PATTERN, message_key

SCHEMA_VERSION = "1.0"

RunId = Annotated[str, Field(pattern=RUN_ID_PATTERN)]
Count = Annotated[int, Field(ge=0, le=2**53 - 1)]  # exact in JSON readers, fits a database's integer
Seconds = Annotated[float, Field(ge=0, le=253_402_300_799, allow_inf_nan=False)]  # up to the year 9999
ShortText = Annotated[str, Field(max_length=512)]
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def _number_again(value: object) -> object:
    # On the wire a number that is not finite is a string; where text is allowed too, it must come back as a number.
    return _NON_FINITE.get(value, value) if isinstance(value, str) else value


Evidence = Annotated[float | str | None, BeforeValidator(_number_again)]
Decision = Literal["go", "snapshot", "skip"]
Verdict = Literal[
    "token",
    "sequence",
    "layer",
    "batch-wide",
    "accounting",
    "mask",
    "norm-overflow",
    "not-reproduced",
    "non-finite",
    "inconclusive",
]
VERDICTS: tuple[str, ...] = Verdict.__args__  # type: ignore[attr-defined]


class Part(BaseModel):
    """A piece of a message, without an identity of its own."""

    model_config = ConfigDict(frozen=True, extra="ignore", ser_json_inf_nan="strings")


class Message(Part):
    """What all messages carry: schema version, run, attempt and `ts` (seconds since the epoch)."""

    schema_version: str = SCHEMA_VERSION
    run_id: RunId
    attempt: Count = 0
    ts: Seconds

    def key(self) -> str:
        """Derived identity: two copies of one fact have one key."""
        raise NotImplementedError


class TokenRef(Part):
    """A place in a step. `token` counts positions of the whole row (prompt included) from 0."""

    rank: Count
    micro_batch: Count
    sequence: Count
    token: Count


class Limits(Part):
    """Limits of a run at one version; None means "not known yet: do not judge"."""

    version: Count = 0
    norm: float | None = None
    healthy_norm: float | None = None
    layers: dict[str, float] = {}
    healthy_layers: dict[str, float] = {}
    energy: float | None = None
    healthy_energy: float | None = None
    gain: float | None = None
    healthy_gain: float | None = None


class Flag(Part):
    """One rule's objection to one step. `score` is value over baseline (inf when not finite)."""

    rule: ShortText
    series: ShortText
    value: float
    score: float
    baseline: float | None = None
    limit: float | None = None


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
    labels: dict[str, ShortText] = {}

    def key(self) -> str:
        return message_key("run-started", self.run_id, self.attempt)


class StepObserved(Message):
    """What one optimizer step looked like, before clipping, over all ranks."""

    type: Literal["step_observed"] = "step_observed"
    step: Count
    grad_norm: float
    layer_norms: dict[str, float] = {}
    num_tokens: Count = 0
    energy: float | None = None
    coefficient_abs_max: float | None = None
    coefficient_abs_max_at: TokenRef | None = None
    ratio_max: float | None = None
    ratio_min: float | None = None
    sequence_ratio_max: float | None = None
    loss: float | None = None
    loss_parts: dict[str, float] = {}
    reward_mean: float | None = None
    reward_std: float | None = None
    accuracy: float | None = None
    num_zero_variance_groups: Count | None = None
    kl: float | None = None
    entropy: float | None = None
    clip_fraction: float | None = None
    lr: float | None = None
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


class Spike(Part):
    """One abnormal step: derived id, its worst flag first."""

    spike_id: ShortText
    step: Count
    grad_norm: float
    healthy_norm: float | None = None
    limit: float | None = None
    flags: tuple[Flag, ...]
    snapshot: ShortText | None = None


class IncidentMessage(Message):
    incident_id: ShortText
    spike: Spike


class IncidentOpened(IncidentMessage):
    type: Literal["incident_opened"] = "incident_opened"
    labels: dict[str, ShortText] = {}

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


class Culprit(TokenRef):
    """A token (or, where `token` is that of the largest share, a sequence) that made the spike."""

    token_id: Count | None = None
    token_text: ShortText | None = None
    uid: ShortText | None = None
    share: float
    norm: float | None = None
    share_is_exact: bool = False
    layer: ShortText | None = None
    coefficient: float | None = None
    logp: float | None = None
    ratio: float | None = None
    advantage: float | None = None


class Certificate(Part):
    """The measured norm of the step without the culprits, next to the limit: the proof."""

    grad_norm: float
    norm_without: float
    limit: float
    holds: bool
    num_culprits: Count
    num_tokens_lower_bound: Count | None = None
    minimal: bool = False


class Fidelity(Part):
    """How well the replay reproduced the step."""

    reported_norm: float
    replayed_norm: float
    rel_error: float
    layer_rel_error_max: float | None = None
    tolerance: float
    reproduced: bool


class Cause(Part):
    """Why, with the numbers it rests on. `confidence` is one of low, medium, high."""

    name: ShortText
    confidence: Literal["low", "medium", "high"]
    summary: ShortText
    evidence: dict[str, Evidence] = {}


class Fix(Part):
    """A remedy and the measured norm of the step under it."""

    name: ShortText
    norm_after: float
    holds: bool


class Cost(Part):
    """Work of a localization; one step = forward + backward of the whole batch."""

    steps: float
    num_forwards: Count = 0
    num_backwards: Count = 0
    seconds: float = 0.0


class Profile(Part):
    """Share of the culprit sequence's squared gradient by layer (rows) and position (columns)."""

    layers: tuple[str, ...]
    first_position: Count
    values: tuple[tuple[float, ...], ...]
    residual_rms: tuple[float, ...] = ()
    residual_rms_median: tuple[float, ...] = ()


class SequenceView(Part):
    """The culprit's sequence for reading: ids, texts and shares by position, cut to a window."""

    rank: Count
    micro_batch: Count
    sequence: Count
    first_position: Count
    token_ids: tuple[int, ...]
    token_texts: tuple[str, ...] = ()
    shares: tuple[float, ...]


class Finding(Part):
    verdict: Verdict
    strategy: Literal["attribution", "bisect"]
    step: Count
    summary: ShortText
    culprits: tuple[Culprit, ...] = ()
    share: float | None = None
    checksum: float | None = None
    rest_share: float | None = None
    certificate: Certificate | None = None
    fidelity: Fidelity
    causes: tuple[Cause, ...] = ()
    fix: Fix | None = None
    healthy_norm: float | None = None
    layer_growth: dict[str, float] = {}
    layers_exploding: tuple[str, ...] = ()
    module_kinds_exploding: tuple[str, ...] = ()
    profile: Profile | None = None
    sequence_view: SequenceView | None = None
    shares_by_sequence: tuple[tuple[int, int, int, float], ...] = ()
    cost: Cost


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

MESSAGE_TYPES: tuple[type[Message], ...] = (
    RunStarted,
    StepObserved,
    SnapshotCommitted,
    SnapshotFailed,
    RunEnded,
    IncidentOpened,
    IncidentJoined,
    IncidentWorsened,
    IncidentResolved,
    LimitsChanged,
    StreamGapNoticed,
    LocalizationStarted,
    LocalizationProgressed,
    LocalizationFinished,
    LocalizationFailed,
    SnapshotRequested,
    RelocalizeRequested,
    OverrideSet,
    Tick,
    JobReported,
)


def type_name(message_type: type[Message]) -> str:
    """Wire name of a message type, e.g. "step_observed"."""
    default: Any = message_type.model_fields["type"].default
    return str(default)
