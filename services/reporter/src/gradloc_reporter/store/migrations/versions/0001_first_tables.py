"""The first tables: runs, steps, snapshots, incidents, spikes, findings, events, cursors, Slack messages."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

ROW_NUMBER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "cursors",
        sa.Column("stream", sa.Text(), nullable=False),
        sa.Column("cursor", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("stream"),
    )
    op.create_table(
        "events",
        sa.Column("number", ROW_NUMBER, autoincrement=True, nullable=False),
        sa.Column("message_key", sa.Text(), nullable=False),
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("incident_id", sa.Text(), nullable=True),
        sa.Column("ts", sa.Double(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("detail_json", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("number"),
        sa.UniqueConstraint("message_key"),
    )
    op.create_index("ix_events_incident", "events", ["incident_id", "ts"], unique=False)
    op.create_index("ix_events_run", "events", ["run_id", "kind"], unique=False)
    op.create_table(
        "findings",
        sa.Column("incident_id", sa.Text(), nullable=False),
        sa.Column("localization_attempt", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=True),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.Column("stage", sa.Text(), nullable=True),
        sa.Column("fraction", sa.Double(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("retryable", sa.Boolean(), nullable=True),
        sa.Column("verdict", sa.Text(), nullable=True),
        sa.Column("finding_json", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("incident_id", "localization_attempt"),
    )
    op.create_table(
        "incidents",
        sa.Column("number", ROW_NUMBER, autoincrement=True, nullable=False),
        sa.Column("incident_id", sa.Text(), nullable=False),
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("opened_at", sa.Double(), nullable=True),
        sa.Column("updated_at", sa.Double(), nullable=False),
        sa.Column("first_step", sa.BigInteger(), nullable=True),
        sa.Column("last_step", sa.BigInteger(), nullable=True),
        sa.Column("num_spikes", sa.BigInteger(), nullable=False),
        sa.Column("worst_spike_json", sa.Text(), nullable=True),
        sa.Column("resolved_at", sa.Double(), nullable=True),
        sa.Column("resolved_step", sa.BigInteger(), nullable=True),
        sa.Column("resolved_reason", sa.Text(), nullable=True),
        sa.Column("localization_attempt", sa.BigInteger(), nullable=False),
        sa.Column("finding_attempt", sa.BigInteger(), nullable=False),
        sa.Column("finding_json", sa.Text(), nullable=True),
        sa.Column("verdict", sa.Text(), nullable=True),
        sa.Column("cause", sa.Text(), nullable=True),
        sa.Column("acknowledged_at", sa.Double(), nullable=True),
        sa.Column("acknowledged_by", sa.Text(), nullable=True),
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("number"),
        sa.UniqueConstraint("incident_id"),
    )
    op.create_index("ix_incidents_run", "incidents", ["run_id", "number"], unique=False)
    op.create_index("ix_incidents_status", "incidents", ["status", "number"], unique=False)
    op.create_index("ix_incidents_verdict", "incidents", ["verdict", "number"], unique=False)
    op.create_table(
        "runs",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("framework", sa.Text(), nullable=True),
        sa.Column("world_size", sa.BigInteger(), nullable=True),
        sa.Column("model", sa.Text(), nullable=True),
        sa.Column("num_parameters", sa.BigInteger(), nullable=True),
        sa.Column("labels_json", sa.Text(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=True),
        sa.Column("ended_attempt", sa.BigInteger(), nullable=True),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.Column("end_reason", sa.Text(), nullable=True),
        sa.Column("last_attempt", sa.BigInteger(), nullable=False),
        sa.Column("last_step", sa.BigInteger(), nullable=True),
        sa.Column("last_step_at", sa.Double(), nullable=True),
        sa.Column("last_norm", sa.Double(), nullable=True),
        sa.Column("last_limit", sa.Double(), nullable=True),
        sa.Column("limits_attempt", sa.BigInteger(), nullable=False),
        sa.Column("limits_version", sa.BigInteger(), nullable=False),
        sa.Column("healthy_norm", sa.Double(), nullable=True),
        sa.Column("norm_limit", sa.Double(), nullable=True),
        sa.Column("num_events_dropped", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("run_id"),
    )
    op.create_table(
        "slack_messages",
        sa.Column("incident_id", sa.Text(), nullable=False),
        sa.Column("channel", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("slack_ts", sa.Text(), nullable=True),
        sa.Column("told_revision", sa.BigInteger(), nullable=False),
        sa.Column("told_status", sa.Text(), nullable=True),
        sa.Column("intended_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("incident_id"),
    )
    op.create_table(
        "snapshots",
        sa.Column("message_key", sa.Text(), nullable=False),
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("ts", sa.Double(), nullable=False),
        sa.Column("path", sa.Text(), nullable=True),
        sa.Column("num_bytes", sa.BigInteger(), nullable=True),
        sa.Column("weights", sa.Text(), nullable=True),
        sa.Column("failure", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("message_key"),
    )
    op.create_index("ix_snapshots_step", "snapshots", ["run_id", "attempt", "step"], unique=False)
    op.create_table(
        "spikes",
        sa.Column("spike_id", sa.Text(), nullable=False),
        sa.Column("incident_id", sa.Text(), nullable=False),
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("ts", sa.Double(), nullable=False),
        sa.Column("spike_json", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("spike_id"),
    )
    op.create_index(op.f("ix_spikes_incident_id"), "spikes", ["incident_id"], unique=False)
    op.create_index("ix_spikes_step", "spikes", ["run_id", "attempt", "step"], unique=False)
    op.create_table(
        "steps",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("ts", sa.Double(), nullable=False),
        sa.Column("grad_norm", sa.Double(), nullable=False),
        sa.Column("limit", sa.Double(), nullable=True),
        sa.Column("loss", sa.Double(), nullable=True),
        sa.Column("reward_mean", sa.Double(), nullable=True),
        sa.Column("ratio_max", sa.Double(), nullable=True),
        sa.Column("ratio_min", sa.Double(), nullable=True),
        sa.Column("kl", sa.Double(), nullable=True),
        sa.Column("entropy", sa.Double(), nullable=True),
        sa.Column("lr", sa.Double(), nullable=True),
        sa.Column("step_s", sa.Double(), nullable=True),
        sa.Column("stall_s", sa.Double(), nullable=False),
        sa.Column("num_tokens", sa.BigInteger(), nullable=False),
        sa.Column("decision", sa.Text(), nullable=False),
        sa.Column("rules_hit", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "attempt", "step"),
    )


def downgrade() -> None:
    for table in (
        "slack_messages",
        "cursors",
        "events",
        "findings",
        "spikes",
        "incidents",
        "snapshots",
        "steps",
        "runs",
    ):
        op.drop_table(table)
