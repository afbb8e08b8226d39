"""The team of a run, from its labels: what a token limited to teams is compared with."""

import json

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("runs", sa.Column("team", sa.Text(), nullable=True))
    runs = sa.table(
        "runs", sa.column("run_id", sa.Text()), sa.column("labels_json", sa.Text()), sa.column("team", sa.Text())
    )
    connection = op.get_bind()
    for run_id, labels_json in connection.execute(sa.select(runs.c.run_id, runs.c.labels_json)).all():
        team = json.loads(labels_json).get("team")
        if team is not None:
            connection.execute(runs.update().where(runs.c.run_id == run_id).values(team=team))
    op.create_index("ix_runs_team", "runs", ["team"], unique=False)
