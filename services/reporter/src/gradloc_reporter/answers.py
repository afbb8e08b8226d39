"""Answers of the REST interface: frozen pydantic models over the protocol's own parts.

Numbers that are not finite are the strings "NaN", "Infinity", "-Infinity", as in messages, so that
every strict JSON parser accepts every answer. Knows nothing of HTTP or tables.
"""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from gradloc_proto.messages import Finding, Part, ShortText, Spike

Status = Literal["open", "localizing", "located", "failed", "resolved"]
By = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=60)]


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
    decision: str
    rules_hit: tuple[str, ...]


class StepsAnswer(Part):
    run_id: str
    num_steps: int
    downsampled: bool
    points: tuple[StepPoint, ...]


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
    url: str | None


class IncidentsAnswer(Part):
    incidents: tuple[IncidentAnswer, ...]
    next_cursor: str | None


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


class RelocalizeWish(Part):
    by: By
    request_id: Annotated[str, Field(min_length=1, max_length=128)] | None = None


class RelocalizeAnswer(Part):
    incident_id: str
    request_id: str


class Acknowledgement(Part):
    by: By


class Comment(Part):
    by: By
    text: Annotated[ShortText, StringConstraints(strip_whitespace=True, min_length=1)]


class CommentAnswer(Part):
    incident_id: str
    events: tuple[EventAnswer, ...]
