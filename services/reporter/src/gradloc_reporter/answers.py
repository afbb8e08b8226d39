"""Answers of the REST interface: frozen pydantic models over the protocol's own parts.

Numbers that are not finite are the strings "NaN", "Infinity", "-Infinity", as in messages, so that
every strict JSON parser accepts every answer. Knows nothing of HTTP or tables.
"""

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, JsonValue, Strict, StrictBool, StringConstraints

from gradloc_proto.messages import Finding, Part, Spike
from gradloc_proto.whatif import WhatIfOptions

Status = Literal["open", "localizing", "located", "failed", "resolved"]
# What the detector takes; gradloc_detector.policy has the last word.
SENSITIVITY_MIN, SENSITIVITY_MAX = 0.1, 1000.0


class RunAnswer(Part):
    run_id: str
    attempt: int
    status: Literal["running", "ended"]
    framework: str | None
    world_size: int | None
    model: str | None
    num_parameters: int | None
    labels: dict[str, str]
    started_at: float | None
    ended_at: float | None
    end_reason: str | None
    last_step: int | None
    last_step_at: float | None
    grad_norm: float | None
    healthy_norm: float | None
    limit: float | None
    num_events_dropped: int
    num_incidents: int
    num_incidents_open: int


class RunsAnswer(Part):
    runs: tuple[RunAnswer, ...]
    next_cursor: str | None


class StepPoint(Part):
    """One step as observed: downsampling leaves steps out, it never invents one."""

    step: int
    attempt: int
    ts: float
    grad_norm: float
    limit: float | None
    loss: float | None
    reward_mean: float | None
    ratio_max: float | None
    ratio_min: float | None
    decision: str
    rules_hit: tuple[str, ...]


class StepsAnswer(Part):
    run_id: str
    num_steps: int
    downsampled: bool
    points: tuple[StepPoint, ...]


class SeriesRow(Part):
    step: int
    time_ms: float
    value: float | None


class SeriesAnswer(Part):
    run_id: str
    name: str
    rows: tuple[SeriesRow, ...]


class IncidentAnswer(Part):
    """An incident in a list. `text` is what people are told, `headline` its first line."""

    incident_id: str
    run_id: str
    attempt: int
    status: Status
    status_text: str
    verdict: str | None
    cause: str | None
    culprit: str
    headline: str
    opened_at: float | None
    updated_at: float
    resolved_at: float | None
    first_step: int | None
    last_step: int | None
    step: int | None
    num_spikes: int
    grad_norm: float | None
    healthy_norm: float | None
    limit: float | None
    localization_attempt: int
    acknowledged_by: str | None
    pinned_by: str | None = None  # its snapshots stay, whatever their age
    url: str | None


class IncidentsAnswer(Part):
    incidents: tuple[IncidentAnswer, ...]
    next_cursor: str | None


class FingerprintAnswer(Part):
    """By what an incident is known again, and how often it was seen, this incident included."""

    kind: Literal["token", "source", "layer", "cause"]
    value: str
    num_incidents: int
    num_runs: int
    first_seen: float | None


class SimilarIncident(Part):
    shared: str
    incident: IncidentAnswer


class SimilarAnswer(Part):
    """`came_back_after` names an incident of the same token, source or layer that was over before: a regression."""

    incident_id: str
    came_back_after: str | None
    fingerprints: tuple[FingerprintAnswer, ...]
    incidents: tuple[SimilarIncident, ...]


class SpikeAnswer(Part):
    ts: float
    attempt: int
    spike: Spike


class FindingAnswer(Part):
    """One localization attempt; `finding` once it has finished."""

    localization_attempt: int
    state: Literal["queued", "running", "failed", "finished"]
    started_at: float | None
    ended_at: float | None
    stage: str | None
    fraction: float | None
    reason: str | None
    finding: Finding | None


class SnapshotAnswer(Part):
    step: int
    attempt: int
    ts: float
    path: str | None
    num_bytes: int | None
    weights: str | None
    failure: str | None
    removed_at: float | None = None  # by the reporter's retention


class EventAnswer(Part):
    ts: float
    kind: str
    text: str


class IncidentDetail(IncidentAnswer):
    """Everything known of one incident. Spikes and events are the newest where there are very many."""

    text: str
    finding: Finding | None
    findings: tuple[FindingAnswer, ...]
    spikes: tuple[SpikeAnswer, ...]
    snapshots: tuple[SnapshotAnswer, ...]
    events: tuple[EventAnswer, ...]


class Problem(Part):
    """RFC 9457: what went wrong and what to do about it."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    what_to_do: str


# --- wishes ------------------------------------------------------------------------------------

RequestId = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{1,128}$")]
Remark = Annotated[str, StringConstraints(max_length=512, pattern=r"^[^\x00]*$")]
# Something that prints is in it; what surrounds it is left as it is.
By = Annotated[str, StringConstraints(max_length=60, pattern=r"^[^\x00]*[!-~\u00a1-\uffff][^\x00]*$")]


def _example(**values: JsonValue) -> ConfigDict:
    return ConfigDict(json_schema_extra={"examples": [values]})


class Wish(Part):
    """What every wish says: who."""

    by: By


class RelocalizeWish(Wish):
    model_config = _example(by="ada", request_id="after-restart-1")
    request_id: RequestId | None = None


class RelocalizeAnswer(Part):
    incident_id: str
    request_id: str


class Acknowledgement(Wish):
    model_config = _example(by="ada")


class Reasoned(Wish):
    """A wish with a reason, which the log keeps."""

    model_config = _example(by="ada", reason="bad batch, row removed from the data set")
    reason: Remark = ""


class Pin(Wish):
    model_config = _example(by="ada", pinned=True)
    pinned: StrictBool = True


class Comment(Wish):
    model_config = _example(by="ada", text="the same prompt as on Monday")
    text: Annotated[str, StringConstraints(max_length=512, pattern=r"^[^\x00]*[!-~\u00a1-\uffff][^\x00]*$")]


class CommentAnswer(Part):
    incident_id: str
    events: tuple[EventAnswer, ...]


class Override(Wish):
    """`value` null takes the override back."""

    model_config = _example(by="ada", name="sensitivity", value=2.0)
    name: Literal["sensitivity"]
    value: Annotated[float, Strict(), Field(ge=SENSITIVITY_MIN, le=SENSITIVITY_MAX, allow_inf_nan=False)] | None
    request_id: RequestId | None = None


class WishAnswer(Part):
    """The wish went out; it comes back as a fact of the run."""

    run_id: str
    request_id: str


class WhatIfWish(Wish, WhatIfOptions):
    model_config = _example(by="ada", token_clip="0.5:5", drop=["3:0:2:358"])


# --- silences ----------------------------------------------------------------------------------


class Matcher(Part):
    """`name` is run, severity, verdict, cause or a label of the run; in `value` a * stands for anything."""

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_.-]{0,63}$")]
    op: Literal["=", "!="] = "="
    value: Annotated[str, StringConstraints(max_length=200, pattern=r"^[^\x00]*$")]


class SilenceWish(Wish):
    model_config = _example(
        by="ada", matchers=[{"name": "run", "op": "=", "value": "qwen3-4b-grpo"}], hours=8, reason="known"
    )
    matchers: Annotated[tuple[Matcher, ...], Field(min_length=1, max_length=16)]
    hours: Annotated[float, Strict(), Field(gt=0, le=24 * 31, allow_inf_nan=False)]
    reason: Remark = ""


class SilenceAnswer(Part):
    silence_id: str
    matchers: tuple[Matcher, ...]
    starts_at: float
    ends_at: float
    created_by: str
    reason: str
    active: bool


class SilencesAnswer(Part):
    silences: tuple[SilenceAnswer, ...]


# --- attribution -------------------------------------------------------------------------------

Axis = Literal["rank", "micro-batch", "sequence", "token", "layer"]


class ShareAnswer(Part):
    """One place on the axis. `rank` and so on are null where the axis adds over them."""

    rank: int | None = None
    micro_batch: int | None = None
    sequence: int | None = None
    token: int | None = None
    layer: str | None = None
    share: float


class AttributionAnswer(Part):
    """Shares of the squared norm, the largest first; tokens and layers are those of the culprit's sequence."""

    incident_id: str
    axis: Axis
    shares: tuple[ShareAnswer, ...]
    num_places: int


# --- audit -------------------------------------------------------------------------------------


class AuditEntry(Part):
    """One thing that somebody did."""

    ts: float
    kind: str
    run_id: str | None
    incident_id: str | None
    text: str


class AuditAnswer(Part):
    entries: tuple[AuditEntry, ...]
    next_cursor: str | None
