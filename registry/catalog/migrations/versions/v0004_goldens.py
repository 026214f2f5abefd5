"""The goldens of models: reference samples, sealed where privacy asks."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """From the tables with the heads of audit chains."""
    op.create_table(
        "penstock_goldens",
        sa.Column("model", sa.String(64), primary_key=True),
        sa.Column("version", sa.String(64), primary_key=True),
        sa.Column("digest", sa.String(32), primary_key=True),
        sa.Column("content_hash", sa.String(64), nullable=False),
        sa.Column("saved_at", sa.BigInteger, nullable=False),
        sa.Column("sample", sa.LargeBinary, nullable=False),
    )
