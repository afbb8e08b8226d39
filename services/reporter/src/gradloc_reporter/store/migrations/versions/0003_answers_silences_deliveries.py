"""Ready-made answers, fingerprints, layer windows, silences; deliveries by receiver instead of Slack alone."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("runs", sa.Column("thinned_to", sa.BigInteger(), nullable=False, server_default="0"))
    op.add_column("snapshots", sa.Column("removed_at", sa.Double(), nullable=True))
    for name, kind in (
        ("last_spike_at", sa.Double()),
        ("closed_at", sa.Double()),
        ("closed_by", sa.Text()),
        ("reopened_at", sa.Double()),
        ("pinned_by", sa.Text()),
    ):
        op.add_column("incidents", sa.Column(name, kind, nullable=True))
    op.create_index("ix_incidents_cause", "incidents", ["cause", "number"], unique=False)
    op.create_index("ix_incidents_opened", "incidents", ["opened_at"], unique=False)
    op.create_index("ix_events_kind", "events", ["kind", "number"], unique=False)
    op.create_table(
        "summaries",
        sa.Column("number", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=False, nullable=False),
        sa.Column("incident_id", sa.Text(), nullable=False),
        sa.Column("made_by", sa.Text(), nullable=False),
        sa.Column("made_at", sa.Double(), nullable=False),
        sa.Column("summary_json", sa.Text(), nullable=False),
        sa.Column("detail_json", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("number"),
        sa.UniqueConstraint("incident_id"),
    )
    op.create_index(op.f("ix_summaries_made_at"), "summaries", ["made_at"], unique=False)
    op.create_table(
        "fingerprints",
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("value", sa.Text(), nullable=False),
        sa.Column("incident_id", sa.Text(), nullable=False),
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("kind", "value", "incident_id"),
    )
    op.create_index("ix_fingerprints_incident", "fingerprints", ["incident_id"], unique=False)
    op.create_table(
        "layer_windows",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("first_step", sa.BigInteger(), nullable=False),
        sa.Column("width", sa.BigInteger(), nullable=False),
        sa.Column("norms_json", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "first_step"),
    )
    op.create_table(
        "silences",
        sa.Column("silence_id", sa.Text(), nullable=False),
        sa.Column("matchers_json", sa.Text(), nullable=False),
        sa.Column("teams_json", sa.Text(), nullable=True),
        sa.Column("starts_at", sa.Double(), nullable=False),
        sa.Column("ends_at", sa.Double(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("created_by", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("silence_id"),
    )
    op.create_index(op.f("ix_silences_ends_at"), "silences", ["ends_at"], unique=False)
    op.create_table(
        "deliveries",
        sa.Column("incident_id", sa.Text(), nullable=False),
        sa.Column("receiver", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("reference", sa.Text(), nullable=True),
        sa.Column("told_revision", sa.BigInteger(), nullable=False),
        sa.Column("told_status", sa.Text(), nullable=True),
        sa.Column("intended_at", sa.Double(), nullable=False),
        sa.Column("thread_told", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("incident_id", "receiver"),
    )
    op.execute(
        "INSERT INTO deliveries (incident_id, receiver, state, reference, told_revision, told_status, intended_at, "
        "thread_told) SELECT incident_id, channel, state, slack_ts, told_revision, told_status, intended_at, '' "
        "FROM slack_messages"
    )
    op.drop_table("slack_messages")
