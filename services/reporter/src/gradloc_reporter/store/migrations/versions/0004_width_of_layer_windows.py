"""The width of a run's layer windows beside the run: looking it up read every window at every commit."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("runs", sa.Column("layer_width", sa.BigInteger(), nullable=False, server_default="1"))
    op.execute(
        "UPDATE runs SET layer_width = "
        "COALESCE((SELECT MAX(width) FROM layer_windows WHERE layer_windows.run_id = runs.run_id), 1)"
    )
