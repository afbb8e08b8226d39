"""Tables of the reporter, as SQLAlchemy's typed models.

Every table has a key derived from the facts themselves (run, attempt, step, incident id, message
key), so that a message which arrives twice changes nothing. Knows nothing of streams or answers.
The migrations are the truth for what a database looks like; a test compares the two.
"""

import math
from typing import Any

from sqlalchemy import BigInteger, Dialect, Double, Index, Integer, Text, TypeDecorator
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeEngine, UserDefinedType


class _SqliteDouble(UserDefinedType[float]):
    """SQLAlchemy's own Double forces float() on what it binds; this one lets the text 'NaN' through."""

    cache_ok = True

    def get_col_spec(self, **_: Any) -> str:
        return "DOUBLE"


class Real(TypeDecorator[float]):
    """A double in which NaN and infinities survive.

    SQLite turns a bound NaN into NULL; there it is kept as the text 'NaN', which sorts above all
    numbers, just as NaN does in PostgreSQL.
    """

    impl = Double
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        return dialect.type_descriptor(_SqliteDouble() if dialect.name == "sqlite" else Double())

    def process_bind_param(self, value: float | None, dialect: Dialect) -> Any:
        if value is not None and math.isnan(value) and dialect.name == "sqlite":
            return "NaN"
        return value

    def process_result_value(self, value: Any, dialect: Dialect) -> float | None:
        return None if value is None else float(value)


# SQLite numbers rows by itself only where the key is spelled INTEGER.
RowNumber = BigInteger().with_variant(Integer(), "sqlite")


class Base(DeclarativeBase):
    type_annotation_map = {float: Real(), int: BigInteger(), str: Text()}  # noqa: RUF012 (SQLAlchemy's own form)


class RunRow(Base):
    """One training job: what it said of itself last, and where it stands."""

    __tablename__ = "runs"

    run_id: Mapped[str] = mapped_column(primary_key=True)
    attempt: Mapped[int] = mapped_column(default=0)
    framework: Mapped[str | None]
    world_size: Mapped[int | None]
    model: Mapped[str | None]
    num_parameters: Mapped[int | None]
    labels_json: Mapped[str] = mapped_column(default="{}")
    team: Mapped[str | None] = mapped_column(index=True)
    started_at: Mapped[float | None]
    ended_attempt: Mapped[int | None]
    ended_at: Mapped[float | None]
    end_reason: Mapped[str | None]
    last_attempt: Mapped[int] = mapped_column(default=0)
    last_step: Mapped[int | None]
    last_step_at: Mapped[float | None]
    last_norm: Mapped[float | None]
    last_limit: Mapped[float | None]
    limits_attempt: Mapped[int] = mapped_column(default=0)
    limits_version: Mapped[int] = mapped_column(default=-1)
    healthy_norm: Mapped[float | None]
    norm_limit: Mapped[float | None]
    num_events_dropped: Mapped[int] = mapped_column(default=0)
    thinned_to: Mapped[int] = mapped_column(default=0)  # steps before this one are kept as extremes only
    layer_width: Mapped[int] = mapped_column(default=1)  # steps in each of its layer windows


class StepRow(Base):
    """One optimizer step. A restarted run writes its steps again under a higher attempt."""

    __tablename__ = "steps"

    run_id: Mapped[str] = mapped_column(primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True)
    ts: Mapped[float]
    grad_norm: Mapped[float]
    limit: Mapped[float | None]
    loss: Mapped[float | None]
    reward_mean: Mapped[float | None]
    ratio_max: Mapped[float | None]
    ratio_min: Mapped[float | None]
    kl: Mapped[float | None]
    entropy: Mapped[float | None]
    lr: Mapped[float | None]
    step_s: Mapped[float | None]
    stall_s: Mapped[float]
    num_tokens: Mapped[int]
    decision: Mapped[str]
    rules_hit: Mapped[str]


class SnapshotRow(Base):
    """One snapshot of a step, committed or failed."""

    __tablename__ = "snapshots"

    message_key: Mapped[str] = mapped_column(primary_key=True)
    run_id: Mapped[str]
    attempt: Mapped[int]
    step: Mapped[int]
    ts: Mapped[float]
    path: Mapped[str | None]
    num_bytes: Mapped[int | None]
    weights: Mapped[str | None]
    failure: Mapped[str | None]
    removed_at: Mapped[float | None]  # by our retention; the row stays

    __table_args__ = (Index("ix_snapshots_step", "run_id", "attempt", "step"),)


class IncidentRow(Base):
    """Spikes of one run that belong together. `number` is the order in which we heard of them."""

    __tablename__ = "incidents"

    number: Mapped[int] = mapped_column(RowNumber, primary_key=True, autoincrement=True)
    incident_id: Mapped[str] = mapped_column(unique=True)
    run_id: Mapped[str]
    attempt: Mapped[int]
    status: Mapped[str] = mapped_column(default="open")
    opened_at: Mapped[float | None]
    updated_at: Mapped[float]
    first_step: Mapped[int | None]
    last_step: Mapped[int | None]
    num_spikes: Mapped[int] = mapped_column(default=0)
    worst_spike_json: Mapped[str | None]
    resolved_at: Mapped[float | None]
    resolved_step: Mapped[int | None]
    resolved_reason: Mapped[str | None]
    localization_attempt: Mapped[int] = mapped_column(default=0)
    finding_attempt: Mapped[int] = mapped_column(default=0)
    finding_json: Mapped[str | None]
    verdict: Mapped[str | None]
    cause: Mapped[str | None]
    acknowledged_at: Mapped[float | None]
    acknowledged_by: Mapped[str | None]
    revision: Mapped[int] = mapped_column(default=0)
    last_spike_at: Mapped[float | None]
    closed_at: Mapped[float | None]  # by a person; a later spike opens it again
    closed_by: Mapped[str | None]
    reopened_at: Mapped[float | None]
    pinned_by: Mapped[str | None]  # its snapshots stay, whatever their age

    __table_args__ = (
        Index("ix_incidents_run", "run_id", "number"),
        Index("ix_incidents_status", "status", "number"),
        Index("ix_incidents_verdict", "verdict", "number"),
        Index("ix_incidents_cause", "cause", "number"),
        Index("ix_incidents_opened", "opened_at"),
    )


class SpikeRow(Base):
    """One abnormal step of an incident."""

    __tablename__ = "spikes"

    spike_id: Mapped[str] = mapped_column(primary_key=True)
    incident_id: Mapped[str] = mapped_column(index=True)
    run_id: Mapped[str]
    attempt: Mapped[int]
    step: Mapped[int]
    ts: Mapped[float]
    spike_json: Mapped[str]

    __table_args__ = (Index("ix_spikes_step", "run_id", "attempt", "step"),)


class FindingRow(Base):
    """One localization attempt of an incident and, once it has finished, what it found."""

    __tablename__ = "findings"

    incident_id: Mapped[str] = mapped_column(primary_key=True)
    localization_attempt: Mapped[int] = mapped_column(primary_key=True)
    state: Mapped[str] = mapped_column(default="queued")
    started_at: Mapped[float | None]
    ended_at: Mapped[float | None]
    stage: Mapped[str | None]
    fraction: Mapped[float | None]
    reason: Mapped[str | None]
    retryable: Mapped[bool | None]
    verdict: Mapped[str | None]
    finding_json: Mapped[str | None]


class EventRow(Base):
    """The log: what happened to an incident, or to a run where `incident_id` is None."""

    __tablename__ = "events"

    number: Mapped[int] = mapped_column(RowNumber, primary_key=True, autoincrement=True)
    message_key: Mapped[str] = mapped_column(unique=True)
    run_id: Mapped[str]
    incident_id: Mapped[str | None]
    ts: Mapped[float]
    kind: Mapped[str]
    detail_json: Mapped[str]

    __table_args__ = (
        Index("ix_events_incident", "incident_id", "ts"),
        Index("ix_events_run", "run_id", "kind"),
        Index("ix_events_kind", "kind", "number"),
    )


class CursorRow(Base):
    """Up to where a stream is in the tables; committed together with its rows."""

    __tablename__ = "cursors"

    stream: Mapped[str] = mapped_column(primary_key=True)
    cursor: Mapped[str]


class SummaryRow(Base):
    """What is answered of an incident, ready-made: written in the transaction that changed the incident."""

    __tablename__ = "summaries"

    number: Mapped[int] = mapped_column(RowNumber, primary_key=True, autoincrement=False)  # of the incident
    incident_id: Mapped[str] = mapped_column(unique=True)
    made_by: Mapped[str]  # the renderer's version: another one's work is not trusted
    made_at: Mapped[float] = mapped_column(index=True)  # by the reporter's clock: live views look here
    summary_json: Mapped[str]
    detail_json: Mapped[str]


class FingerprintRow(Base):
    """By what an incident is known again: its token, data source, layer, cause."""

    __tablename__ = "fingerprints"

    kind: Mapped[str] = mapped_column(primary_key=True)
    value: Mapped[str] = mapped_column(primary_key=True)
    incident_id: Mapped[str] = mapped_column(primary_key=True)
    run_id: Mapped[str]

    __table_args__ = (Index("ix_fingerprints_incident", "incident_id"),)


class LayerWindowRow(Base):
    """The greatest norm of each layer within a window of steps: the run's heat map, of bounded size."""

    __tablename__ = "layer_windows"

    run_id: Mapped[str] = mapped_column(primary_key=True)
    first_step: Mapped[int] = mapped_column(primary_key=True)
    width: Mapped[int]
    norms_json: Mapped[str]


class SilenceRow(Base):
    """Incidents that match are not told while it lasts. `teams_json`: whose silence it is; null for all."""

    __tablename__ = "silences"

    silence_id: Mapped[str] = mapped_column(primary_key=True)
    matchers_json: Mapped[str]
    teams_json: Mapped[str | None]
    starts_at: Mapped[float]
    ends_at: Mapped[float] = mapped_column(index=True)
    created_at: Mapped[float]
    created_by: Mapped[str]
    reason: Mapped[str]


class DeliveryRow(Base):
    """What a receiver was told of an incident. `intended` is written before anything is sent."""

    __tablename__ = "deliveries"

    incident_id: Mapped[str] = mapped_column(primary_key=True)
    receiver: Mapped[str] = mapped_column(primary_key=True)
    state: Mapped[str]
    reference: Mapped[str | None]  # the receiver's own name for the message, such as Slack's ts
    told_revision: Mapped[int] = mapped_column(default=-1)
    told_status: Mapped[str | None]
    intended_at: Mapped[float]
    thread_told: Mapped[str] = mapped_column(default="")  # what the thread holds already
