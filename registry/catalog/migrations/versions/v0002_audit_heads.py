"""The heads of the audit log's chains, one row for each writer."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """From the tables of models, versions and transitions."""
    op.create_table(
        "penstock_audit_heads",
        sa.Column("writer", sa.String(200), primary_key=True),
        sa.Column("sequence", sa.BigInteger, nullable=False),
        sa.Column("mac", sa.String(64), nullable=False),
    )
